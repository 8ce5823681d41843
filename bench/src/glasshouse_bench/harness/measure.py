"""The story of a measurement: calibrate, seal the designs, and run every part's sessions in turn.

Laws: every design is in its file before the first session of any part; sessions of the parts take turns, so that an
interrupted measurement has some of each, and goes on where it was; the number of sessions never depends on what was
found.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from glasshouse.errors import Code, UsageError
from glasshouse.jobs.files import is_there, private_folder, write_private
from glasshouse.jobs.identity import Identity
from glasshouse.wire.canonical import decode
from glasshouse.workloads.slots import BLOCK
from glasshouse_bench.artifact import Attempt, Part, read_file
from glasshouse_bench.beside import Calibration
from glasshouse_bench.calibration import LEAST_BLOCKS, LEAST_NS, Calibrated, calibrate
from glasshouse_bench.design import Design, Exclusions, Kind, Mode, Padding, Planted, Workload
from glasshouse_bench.documents import plain
from glasshouse_bench.harness.alone import calibrated, parity
from glasshouse_bench.harness.arms import PADDING_BYTES
from glasshouse_bench.harness.machine import Card, describe
from glasshouse_bench.harness.session import run_session
from glasshouse_bench.harness.stage import Stage
from glasshouse_bench.harness.stop import Stop
from glasshouse_bench.harness.subject import Subject

__all__ = ["CALIBRATION", "Viewer", "Wish", "measure", "refuse_short"]

CALIBRATION, PARITY = "calibration.json", "parity.json"
STEAL_PPM = 20_000
# The null's interval may be twice as wide: half of the sessions give 1.4 times the width, and t adds to it.
NULL_SHARE = 2
LEAST_SESSIONS, WANTED_SESSIONS = 6, 20
_LEAST_ALTERNATING = 10
_LONGEST_NS = 60_000_000_000
_END_S = 2.0  # from the schedule's end until both arms have ended and the note is written
_MAX_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Wish:
    """What was asked for.

    Args:
        modes: the parts.
        seconds: for the sessions of the first part, and half as much for a null beside it.
        margin: of equivalence, such as 0.01.
        planted: added to the second raw arm of a null measurement.
    """

    _: KW_ONLY
    modes: Sequence[Mode]
    seconds: float
    margin: float
    planted: Planted | None = None


class Viewer(Protocol):
    """Shows a measurement to a person."""

    def doing(self, what: str) -> None:
        """Something begins."""

    def planned(self, designs: Mapping[Mode, Design], *, seconds: float) -> None:
        """The designs are in their files; the sessions take about so long."""

    def session(self, part: Part, note: Attempt, reason: str) -> None:
        """A session has ended."""


def measure(
    wish: Wish,
    make: Callable[[Path], Subject],
    *,
    folder: Path,
    identity: Identity,
    viewer: Viewer,
    stop: Stop,
    card: Card | None = None,
    cpus: tuple[int, ...] | None = None,
) -> list[Part]:
    """Measure, or go on with what was begun, and return the parts; what follows from them is `statement`'s.

    Args:
        wish: what was asked for; not looked at where designs lie in the folder already.
        make: makes the job; is given a folder for its data.
        folder: gets the files.
        identity: the owner.
        viewer: told of everything.
        stop: ends it early.
        card: the GPU.
        cpus: where both arms may run; None chooses.

    Raises:
        UsageError: a job that cannot be measured, too short a time, a full disk.
        RunError: the job itself does not run, or `interrupted` before anything was measured.
    """
    refuse_short(wish)
    with Stage(make, identity=identity) as stage:
        chosen = _cpus(stage.subject) if cpus is None else cpus
        stage.pin(chosen)
        _refuse_shared(card, wish)
        begun = [mode for mode in Mode if is_there(folder / mode.value / "design.json")]
        if begun:
            calibration = load_calibration(folder)
            parts = [Part.begin(folder, Part.open(folder, mode).design) for mode in begun]
        else:
            on_card = card is not None and stage.subject.job.params.get("device") != "cpu"
            viewer.doing("calibrating: a raw and a protected run without slots")
            calibration = calibrated(stage, stop, device=on_card)
            write_private(private_folder(folder) / CALIBRATION, calibration.encode(), replace=False)
            designs = plan(wish, calibration, stage.subject, cpus=chosen, card=card)
            parts = [Part.begin(folder, design) for design in designs]
        viewer.planned({part.design.mode: part.design for part in parts}, seconds=_left_s(parts, calibration))
        for part, number in _turns(parts):
            if stop.asked:
                break
            viewer.doing(f"{part.design.mode.value} session {number + 1} of {part.design.sessions}")
            arms = stage.arms(part.design, number)
            note, reason = run_session(part, number, arms, start_s=calibration.start_us / 1e6, stop=stop, card=card)
            viewer.session(part, note, reason)
        if not stop.asked and not is_there(folder / PARITY):
            viewer.doing("work parity: a raw and a protected run with the same target")
            same = parity(stage, stop)
            if same is not None:
                write_private(folder / PARITY, same.encode(), replace=False)
    return parts


def load_calibration(folder: Path) -> Calibration:
    """Return what a measurement was designed from; raises `FormatError`."""
    return Calibration.parse(decode(read_file(folder / CALIBRATION, max_bytes=_MAX_BYTES), max_bytes=_MAX_BYTES))


def refuse_short(wish: Wish) -> None:
    """Refuse a time in which no job has room, before anything is started."""
    least_s = LEAST_SESSIONS * (5 + _END_S)
    if wish.seconds < least_s:
        raise UsageError(
            Code.USAGE,
            f"{wish.seconds:.0f} s are too short: {LEAST_SESSIONS} sessions of any job take {least_s:.0f} s or more",
            hint="ask for --time 10m",
        )


def plan(wish: Wish, found: Calibration, subject: Subject, *, cpus: tuple[int, ...], card: Card | None) -> list[Design]:
    """Return the design of each part.

    Raises:
        UsageError: `usage`, steps that no slot can hold, or too short a time for this job.
    """
    job, created_us = subject.job, time.time_ns() // 1000
    chosen = None if all(mode.whole for mode in wish.modes) else _slots(found)
    typical_ns = float(np.median(found.raw_ns))
    designs = []
    for mode in wish.modes:
        share = NULL_SHARE if mode is Mode.NULL and len(wish.modes) > 1 else 1
        least = _LEAST_ALTERNATING if mode is Mode.ALTERNATING else 1 if mode is Mode.SEQUENTIAL else LEAST_SESSIONS
        length_ns = _whole_ns(found, wish.seconds, least) if chosen is None else _length_ns(found, chosen, wish.seconds)
        session_s = _session_s(mode, found, length_ns)
        sessions = int(wish.seconds / share / session_s)
        if sessions < least and share == 1:
            raise UsageError(
                Code.USAGE,
                f"{wish.seconds:.0f} s are too short for this job: {least} sessions of {session_s:.0f} s are needed",
                hint=f"ask for --time {math.ceil(least * session_s / 60) + 1}m",
            )
        designs.append(
            Design(
                mode=mode,
                seed=secrets.token_bytes(32),
                sessions=max(sessions, least),
                length_ns=length_ns,
                slot_ns=1_000_000 if chosen is None else chosen.slot_ns,
                steps=64 if chosen is None else chosen.steps,
                uncounted=1 if chosen is None else chosen.uncounted,
                warmup_steps=max(3, round(0.5e9 / typical_ns)),
                margin_ppm=round(wish.margin * 1e6),
                asked_s=round(wish.seconds),
                exclusions=Exclusions(steal_ppm=STEAL_PPM),
                padding=Padding(fixed_bytes=0, random_bytes=PADDING_BYTES),
                planted=wish.planted if mode is Mode.NULL else None,
                assurance=None if mode is Mode.NULL else job.floor.assurance,
                workload=Workload(
                    kind=Kind(job.workload),
                    name=plain(job.name) or job.workload,
                    commitment=None,
                    deterministic=job.params.get("deterministic") is True,
                    threads=subject.threads or os.cpu_count() or 1,
                    cpus=cpus or tuple(sorted(os.sched_getaffinity(0))),
                ),
                machine=describe(card),
                calibration_sha256=found.sha256,
                created_us=created_us,
            )
        )
    return designs


def _cpus(subject: Subject) -> tuple[int, ...]:
    """Return the last processors, as many as the job has threads, where the harness keeps one for itself."""
    allowed = sorted(os.sched_getaffinity(0))
    threads = subject.threads
    return tuple(allowed[-threads:]) if threads is not None and threads < len(allowed) else ()


def _refuse_shared(card: Card | None, wish: Wish) -> None:
    interleaved = any(not mode.whole for mode in wish.modes)
    if card is not None and interleaved and card.shared() is False:
        raise UsageError(
            Code.USAGE,
            "this GPU is in a mode in which two processes cannot take turns by themselves (exclusive, or MPS)",
            hint="set its compute mode to DEFAULT and stop MPS, or measure with --mode alternating",
        )


def _session_s(mode: Mode, found: Calibration, length_ns: int) -> float:
    if mode.whole:
        return 2 * (length_ns / 1e9 + _END_S + found.start_us / 1e6)
    return 2e-6 * found.start_us + length_ns / 1e9 + _END_S


def _slots(found: Calibration) -> Calibrated:
    start_s, between = found.start_us / 1e6, found.between_ppm / 1e6
    return calibrate(found.raw_ns, found.protected_ns, start_s=2 * start_s, between=between, device=found.device)


def _whole_ns(found: Calibration, seconds: float, sessions: int) -> int:
    """Return for how long each whole process trains: what leaves room for the pairs, and twenty steps at least."""
    room_s = (seconds / sessions - _session_s(Mode.ALTERNATING, found, 0)) / 2
    slowest_ns = max(*found.raw_ns, *found.protected_ns)
    return max(LEAST_NS, 20 * slowest_ns, min(_LONGEST_NS, round(room_s * 1e9)))


def _length_ns(found: Calibration, chosen: Calibrated, seconds: float) -> int:
    """Return T: what the calibration says, or what leaves room for the sessions that an interval needs."""
    room_s = seconds / WANTED_SESSIONS - _session_s(Mode.INTERLEAVED, found, 0)
    least_ns = max(LEAST_NS, LEAST_BLOCKS * BLOCK * chosen.slot_ns)
    return max(least_ns, min(chosen.session_ns, round(room_s * 1e9)))


def _left_s(parts: Sequence[Part], found: Calibration) -> float:
    return sum(
        (part.design.sessions - part.attempted) * _session_s(part.design.mode, found, part.design.length_ns)
        for part in parts
    )


def _turns(parts: Sequence[Part]) -> list[tuple[Part, int]]:
    """Return the sessions that are left, those of the parts mixed evenly."""
    turns = sorted(
        ((number + 0.5) / part.design.sessions, place, number)
        for place, part in enumerate(parts)
        for number in range(part.attempted, part.design.sessions)
    )
    return [(parts[place], number) for _, place, number in turns]
