"""What was asked for, and the designs that follow from it and from a calibration.

Laws: what a design takes from the calibration follows from it alone; the number of sessions never depends on what was
found.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from glasshouse.errors import Code, UsageError
from glasshouse.wire.signing import SigningKey
from glasshouse.workloads.slots import BLOCK
from glasshouse_bench.beside import Calibration
from glasshouse_bench.calibration import LEAST_BLOCKS, LEAST_NS, Calibrated, calibrate
from glasshouse_bench.design import Design, Exclusions, Kind, Machine, Mode, Padding, Planted, Workload
from glasshouse_bench.documents import plain
from glasshouse_bench.harness.arms import PADDING_BYTES
from glasshouse_bench.harness.subject import Subject, commitment

__all__ = ["Setting", "Wish", "plan", "refuse_short", "session_s"]

STEAL_PPM = 20_000
# The null's interval may be twice as wide: half of the sessions give 1.4 times the width, and t adds to it.
NULL_SHARE = 2
LEAST_SESSIONS, WANTED_SESSIONS = 6, 20
_LEAST_ALTERNATING = 10
# Of a whole process the first five seconds do not count, and half of its time has to.
_LEAST_WHOLE_NS, _LONGEST_NS = 12_000_000_000, 60_000_000_000
_END_S = 2.0  # from the schedule's end until both arms have ended and the note is written


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


def refuse_short(wish: Wish) -> None:
    """Refuse a time in which no job has room, before anything is started."""
    least_s = LEAST_SESSIONS * (5 + _END_S)
    if wish.seconds < least_s:
        raise UsageError(
            Code.USAGE,
            f"{wish.seconds:.0f} s are too short: {LEAST_SESSIONS} sessions of any job take {least_s:.0f} s or more",
            hint="ask for --time 10m",
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """What a design has of the job and of the machine, before anything is calibrated.

    Args:
        subject: what is trained.
        subject_sha256: its digest, which no design has.
        owner: who can recompute a design's commitment to it.
        cpus: where both arms may run; empty for anywhere.
        machine: as it was described.
    """

    _: KW_ONLY
    subject: Subject
    subject_sha256: bytes
    owner: SigningKey
    cpus: tuple[int, ...]
    machine: Machine

    def members(self, mode: Mode, wish: Wish, seed: bytes) -> dict[str, Any]:
        """Return the members of a design that follow from what is measured where, and from what was asked for."""
        job = self.subject.job
        return {
            "mode": mode,
            "seed": seed,
            "margin_ppm": round(wish.margin * 1e6),
            "asked_s": round(wish.seconds),
            "exclusions": Exclusions(steal_ppm=STEAL_PPM),
            "padding": Padding(fixed_bytes=0, random_bytes=PADDING_BYTES),
            "planted": wish.planted if mode is Mode.NULL else None,
            "assurance": None if mode is Mode.NULL else job.floor.assurance,
            "workload": Workload(
                kind=Kind(job.workload),
                name=plain(job.name) or job.workload,
                commitment=commitment(self.owner, seed, self.subject_sha256),
                deterministic=job.params.get("deterministic") is True,
                threads=self.subject.threads or os.cpu_count() or 1,
                cpus=self.cpus or tuple(sorted(os.sched_getaffinity(0))),
            ),
            "machine": self.machine,
        }


def plan(wish: Wish, found: Calibration, setting: Setting) -> list[Design]:
    """Return the design of each part.

    Raises:
        UsageError: `usage`, steps that no slot can hold, or too short a time for this job.
    """
    created_us = time.time_ns() // 1000
    chosen = None if all(mode.whole for mode in wish.modes) else _slots(found)
    typical_ns = float(np.median(found.raw_ns))
    designs = []
    for mode in wish.modes:
        share = NULL_SHARE if mode is Mode.NULL and len(wish.modes) > 1 else 1
        least = _LEAST_ALTERNATING if mode is Mode.ALTERNATING else 1 if mode is Mode.SEQUENTIAL else LEAST_SESSIONS
        length_ns = _whole_ns(found, wish.seconds, least) if chosen is None else _length_ns(found, chosen, wish.seconds)
        each_s = session_s(mode, found, length_ns)
        sessions = int(wish.seconds / share / each_s)
        if sessions < least and share == 1:
            raise UsageError(
                Code.USAGE,
                f"{wish.seconds:.0f} s are too short for this job: {least} sessions of {each_s:.0f} s are needed",
                hint=f"ask for --time {math.ceil(least * each_s / 60) + 1}m",
            )
        designs.append(
            Design(
                **setting.members(mode, wish, secrets.token_bytes(32)),
                sessions=max(sessions, least),
                length_ns=length_ns,
                slot_ns=1_000_000 if chosen is None else chosen.slot_ns,
                steps=64 if chosen is None else chosen.steps,
                uncounted=1 if chosen is None else chosen.uncounted,
                warmup_steps=max(3, round(0.5e9 / typical_ns)),
                calibration_sha256=found.sha256,
                created_us=created_us,
            )
        )
    return designs


def session_s(mode: Mode, found: Calibration, length_ns: int) -> float:
    """Return how long a session takes, with the start and the end of its processes."""
    if mode.whole:
        return 2 * (length_ns / 1e9 + _END_S + found.start_us / 1e6)
    return 2e-6 * found.start_us + length_ns / 1e9 + _END_S


def _slots(found: Calibration) -> Calibrated:
    start_s, between = found.start_us / 1e6, found.between_ppm / 1e6
    return calibrate(found.raw_ns, found.protected_ns, start_s=2 * start_s, between=between, device=found.device)


def _whole_ns(found: Calibration, seconds: float, sessions: int) -> int:
    """Return for how long each whole process trains: what leaves room for the pairs, and twenty steps at least."""
    room_s = (seconds / sessions - session_s(Mode.ALTERNATING, found, 0)) / 2
    slowest_ns = max(*found.raw_ns, *found.protected_ns)
    return max(_LEAST_WHOLE_NS, 20 * slowest_ns, min(_LONGEST_NS, round(room_s * 1e9)))


def _length_ns(found: Calibration, chosen: Calibrated, seconds: float) -> int:
    """Return T: what the calibration says, or what leaves room for the sessions that an interval needs."""
    room_s = seconds / WANTED_SESSIONS - session_s(Mode.INTERLEAVED, found, 0)
    least_ns = max(LEAST_NS, LEAST_BLOCKS * BLOCK * chosen.slot_ns)
    return max(least_ns, min(chosen.session_ns, round(room_s * 1e9)))
