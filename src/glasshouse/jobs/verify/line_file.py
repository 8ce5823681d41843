"""The line file: all documents of a line in one file, from its first machine to its last (spec/checkpoints.md 9)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from glasshouse.errors import GlasshouseError
from glasshouse.evidence.bundle import Bundle
from glasshouse.evidence.receipt import MAX_BUNDLE_BYTES
from glasshouse.jobs.gates.line_notes import KnownLeg, LineNotes, known_legs
from glasshouse.jobs.owner.home import Home, is_there, open_regular, write_private
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.wire.canonical import Json
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.group import MAX_MACHINES
from glasshouse.wire.lines.statements import LINE_FORMAT, MAX_LINE_BYTES
from glasshouse.wire.record import LEFT_OUT, Record, items, raw

LINE_NAME = "line.json"
MAX_FILE_LEGS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class LegDocuments(Record, name="line file.legs"):
    """What there is of one leg; nothing of it is verified here."""

    abandoned: Annotated[Envelope | None, LEFT_OUT] = None  # the gate's word that it ended without all receipts
    # Of its machines that left a receipt; two of one machine where it was released twice.
    bundles: Annotated[tuple[Json, ...], items(2 * MAX_MACHINES, raw()), LEFT_OUT] = ()
    order: Annotated[Envelope | None, LEFT_OUT] = None  # the owner's, that began it
    tickets: Annotated[tuple[Envelope, ...], items(100_000), LEFT_OUT] = ()  # of its checkpoints that are known


@dataclass(frozen=True, kw_only=True, slots=True)
class LineFile(Record, name="line file", max_bytes=MAX_LINE_BYTES, constants={"format": LINE_FORMAT}):
    """The legs of a line, from the first."""

    legs: Annotated[tuple[LegDocuments, ...], items(MAX_FILE_LEGS, min_items=1)]


def line_file(home: Home, line: str) -> LineFile | None:
    """Return what is known here of a line, up to the last leg of which there is anything; None for nothing.

    Raises `UsageError` for a damaged note.
    """
    runs: dict[int, list[KnownLeg]] = {}
    for leg in known_legs(home, line):
        runs.setdefault(leg.number, []).append(leg)
    kept = _kept([leg.folder for its in runs.values() for leg in its])
    found = [_documents(runs.get(number, ())) for number in range(1, max(runs, default=0) + 1)]
    # Of runs that were removed since, what a later one has beside its receipt.
    found = [kept.get(number, leg) if leg == LegDocuments() else leg for number, leg in enumerate(found, 1)]
    while found and found[-1] == LegDocuments(order=found[-1].order):
        del found[-1]  # it goes on, or never began
    return LineFile(legs=tuple(found[:MAX_FILE_LEGS])) if found else None


def write_line_file(home: Home, folder: RunFolder) -> None:
    """Write what is known of a run's line beside its receipt; raises as `line_file`."""
    record = folder.load()
    if record.line is not None and (found := line_file(home, record.line)) is not None and is_there(folder.out):
        write_private(folder.out / LINE_NAME, found.encode())


def _kept(folders: Sequence[RunFolder]) -> dict[int, LegDocuments]:
    """Return what line files of before have of each leg."""
    found: dict[int, LegDocuments] = {}
    for folder in folders:
        with contextlib.suppress(GlasshouseError, OSError), open_regular(folder.out / LINE_NAME) as stream:
            file = LineFile.parse(stream.read(MAX_LINE_BYTES + 1))
            found |= {number: leg for number, leg in enumerate(file.legs, 1) if leg != LegDocuments()}
    return found


def _documents(runs: Sequence[KnownLeg]) -> LegDocuments:
    """Return the documents of a leg, from its run or runs: one that was begun and never released has left none."""
    bundles: list[Json] = []
    tickets: dict[bytes, Envelope] = {}
    order = abandoned = None
    for leg in runs:
        notes = LineNotes(leg.folder)
        its = [bundle for folder in leg.folder.machines() if (bundle := _bundle(folder)) is not None]
        told = notes.tickets()
        bundles += its
        tickets |= {envelope.encode(): envelope for envelope in told}
        abandoned = notes.abandoned or abandoned
        if order is None or its or told or notes.abandoned is not None:
            order = notes.order
    return LegDocuments(abandoned=abandoned, bundles=tuple(bundles), order=order, tickets=tuple(tickets.values()))


def _bundle(folder: RunFolder) -> Json:
    """Return a run's receipt bundle; None where it has none, or was released no key."""
    with contextlib.suppress(GlasshouseError, OSError), open_regular(folder.receipt) as stream:
        bundle = Bundle.parse(stream.read(MAX_BUNDLE_BYTES + 1))
        if bundle.ear is not None:
            return bundle.to_json()
    return None
