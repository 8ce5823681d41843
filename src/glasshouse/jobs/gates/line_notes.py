"""What an owner keeps of a line with its runs, from what its gate says now and then: so a fork shows later.

```
runs/ID/line/         0700, of machine 0 of each leg
  order.json          the owner's order that began it
  abandoned.json      the gate's word that it is over without a receipt of each machine
  tickets/SEQ-DIGEST  tickets of its checkpoints, each once
```

Law: nothing is kept that the gate's key did not sign for this line; what was kept is not replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from glasshouse.broker.http_api import LineView
from glasshouse.errors import Code, FormatError, UsageError, VerificationError
from glasshouse.jobs.owner.home import Home, is_folder, is_there, private_folder, read_bounded, write_private
from glasshouse.jobs.owner.rundir import RunFolder, RunRecord
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.lines.statements import LegAbandoned, Ticket

_MAX_BYTES = 128 * 1024
_NAME_CHARS = 16
Kind = TypeVar("Kind", Ticket, LegAbandoned)


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownLeg:
    """A run that was, or was to be, a leg of a line."""

    folder: RunFolder
    record: RunRecord

    @property
    def number(self) -> int:
        """Which leg."""
        return self.record.leg or 0


def known_legs(home: Home, line: str) -> list[KnownLeg]:
    """Return the runs of a line that are here, in the order of their legs; of one leg that was begun twice, both."""
    found: list[KnownLeg] = []
    for folder in RunFolder.everywhere(home):
        with contextlib.suppress(UsageError):  # a damaged record is of no line
            record = folder.load()
            if record.line == line and record.leg is not None:
                found.append(KnownLeg(folder=folder, record=record))
    return sorted(found, key=lambda one: (one.number, one.record.created_us))


def went_on_as(home: Home, record: RunRecord) -> str | None:
    """Return how the last run is called that went on where a run had ended; None for one that did not go on."""
    legs = [] if record.line is None else known_legs(home, record.line)
    later = [leg.folder.run_id[:8] for leg in legs if leg.number > (record.leg or 0)]
    return later[-1] if later else None


class LineNotes:
    """The `line/` of one run's folder."""

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.line
        self._tickets = folder.line / "tickets"

    @property
    def order(self) -> Envelope | None:
        """The order that began the leg; None where it began without one."""
        return self._read(self._path / "order.json")

    @property
    def abandoned(self) -> Envelope | None:
        """The gate's word that the leg was abandoned; None where it is not known to be."""
        return self._read(self._path / "abandoned.json")

    def tickets(self) -> list[Envelope]:
        """Return the tickets of the leg, by number; two of one number where its gate gave two."""
        names = sorted(self._tickets.iterdir()) if is_folder(self._tickets) else []
        return [found for path in names if (found := self._read(path)) is not None]

    def keep_order(self, order: Envelope) -> None:
        """Keep the order that begins the leg; raises `UsageError`."""
        self._write(self._path / "order.json", order)

    def keep_abandoned(self, abandoned: Envelope) -> None:
        """Keep the gate's word that the leg is over; raises `UsageError`."""
        self._write(self._path / "abandoned.json", abandoned)

    def keep_ticket(self, ticket: Ticket, envelope: Envelope) -> None:
        """Keep a ticket; raises `UsageError`, and `VerificationError` (`line-forked`) beside another of its number."""
        name = f"{ticket.seq:016d}-"
        path = self._tickets / f"{name}{ticket.digest.hex()[:_NAME_CHARS]}"
        self._write(path, envelope)
        if others := [one for one in self._tickets.iterdir() if one.name.startswith(name) and one != path]:
            raise VerificationError(
                Code.LINE_FORKED,
                f"the gate counted two checkpoints as number {ticket.seq} of one line: {path} and {others[0]}",
                hint="both are signed by it: ask who runs it; go on from neither before you have looked at both",
            )

    def _read(self, path: Path) -> Envelope | None:
        if not is_there(path):
            return None
        try:
            return Envelope.parse(read_bounded(path, max_bytes=_MAX_BYTES, what="note of a line"), max_bytes=_MAX_BYTES)
        except FormatError:
            raise UsageError(Code.USAGE, f"the note of a line {path} is damaged") from None

    def _write(self, path: Path, envelope: Envelope) -> None:
        if not is_there(path):
            private_folder(path.parent)
            write_private(path, envelope.encode())


def keep(home: Home, view: LineView, *, gate: bytes) -> None:
    """Keep what a gate shows of a line, each document with the run that it is of, where that is here.

    Args:
        gate: its signing key.

    Raises:
        VerificationError: `line-forked`: it signed two checkpoints of one number; or it signed something else.
        UsageError: it cannot be kept.
    """
    runs = {leg.record.run_id: leg.folder for leg in known_legs(home, view.id.hex())}
    for ticket, envelope in _tickets(view, gate):
        if ticket.run_id in runs:
            LineNotes(runs[ticket.run_id]).keep_ticket(ticket, envelope)
    for envelope in view.abandoned:
        said = _signed(LegAbandoned, envelope, gate, view)
        # A gate that was put back from a backup of before that leg does not know its runs.
        its = [run_id for run_id in said.run_ids if run_id in runs] or [
            leg.record.run_id for leg in known_legs(home, view.id.hex()) if leg.number == said.leg
        ]
        if its:
            LineNotes(runs[its[0]]).keep_abandoned(envelope)


def known_tickets(home: Home, line: str, *, gate: bytes) -> dict[Ticket, Envelope]:
    """Return the tickets of a line that are kept here; raises as `keep`."""
    found: dict[Ticket, Envelope] = {}
    for leg in known_legs(home, line):
        for envelope in LineNotes(leg.folder).tickets():
            with _of_gate():
                found[Ticket.from_envelope(envelope, gate)] = envelope
    return found


def _tickets(view: LineView, gate: bytes) -> Iterator[tuple[Ticket, Envelope]]:
    if view.ticket is not None:
        yield _signed(Ticket, view.ticket, gate, view), view.ticket


def _signed(kind: type[Kind], envelope: Envelope, gate: bytes, view: LineView) -> Kind:
    with _of_gate():
        said = kind.from_envelope(envelope, gate)
    if (said.line, said.deployment) != (view.id, view.deployment):
        raise VerificationError(Code.CHECKPOINT_FOREIGN, "the gate shows a document of another line")
    return said


@contextlib.contextmanager
def _of_gate() -> Iterator[None]:
    try:
        yield
    except FormatError as error:
        raise VerificationError(
            error.code, f"what the gate shows of the line is not what it signed: {error.message}"
        ) from None
