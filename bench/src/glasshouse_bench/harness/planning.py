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
from dataclasses import dataclass, replace
from typing import Any

from glasshouse.errors import Code, UsageError
from glasshouse.wire.crypto import SigningKey
from glasshouse_bench.beside import Calibration
from glasshouse_bench.calibration import END_NS, LEAST_SESSIONS
from glasshouse_bench.design import Design, Exclusions, Kind, Machine, Mode, Padding, Planted, Workload
from glasshouse_bench.documents import plain
from glasshouse_bench.harness.arms import PADDING_BYTES
from glasshouse_bench.harness.subject import Subject, commitment

__all__ = ["Setting", "Wish", "plan", "ready_ns", "refuse_short", "session_ns"]

STEAL_PPM = 20_000
# The null's interval may be twice as wide: half of the sessions give 1.4 times the width, and t adds to it.
NULL_SHARE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What was asked for.

    Args:
        seconds: for the sessions of the first part, and half as much for a null beside it.
        margin: of equivalence, such as 0.01.
        planted: added to the second raw arm of a null measurement.
    """

    modes: Sequence[Mode]
    seconds: float
    margin: float
    planted: Planted | None = None


def refuse_short(wish: Wish) -> None:
    """Refuse a time in which no job has room, before anything is started."""
    least = LEAST_SESSIONS[Mode.INTERLEAVED]
    least_s = least * (5 + END_NS / 1e9)
    if wish.seconds < least_s:
        raise UsageError(
            Code.USAGE,
            f"{wish.seconds:.0f} s are too short: {least} sessions of any job take {least_s:.0f} s or more",
            hint="ask for --time 10m",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What a design has of the job and of the machine, before anything is calibrated.

    Args:
        subject_sha256: of what is trained, which no design has.
        owner: who can recompute a design's commitment to it.
        cpus: where both arms may run; empty for anywhere.
    """

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
    designs = []
    for mode in wish.modes:
        share = NULL_SHARE if mode is Mode.NULL and len(wish.modes) > 1 else 1
        least = LEAST_SESSIONS[mode]
        schedule: dict[str, Any] = {**found.schedule(mode, round(wish.seconds))}
        design = Design(
            **setting.members(mode, wish, secrets.token_bytes(32)),
            **schedule,
            sessions=least,
            calibration_sha256=found.sha256,
            created_us=created_us,
        )
        # Of whole numbers: a time that holds the sessions exactly is not too short.
        each_ns = session_ns(design, found)
        each_s = each_ns / 1e9
        sessions = round(wish.seconds) * 10**9 // (share * each_ns)
        if sessions < least and share == 1:
            raise UsageError(
                Code.USAGE,
                f"{wish.seconds:.0f} s are too short for this job: {least} sessions of {each_s:.0f} s are needed",
                hint=f"ask for --time {math.ceil(least * each_s / 60) + 1}m",
            )
        designs.append(replace(design, sessions=max(sessions, least)))
    return designs


def session_ns(design: Design, found: Calibration) -> int:
    """Return how long a session takes, with the start and the end of its processes."""
    if design.mode.whole:
        return 2 * (1000 * found.start_us + design.length_ns + END_NS)
    return ready_ns(design, found) + design.length_ns + END_NS


def ready_ns(design: Design, found: Calibration) -> int:
    """Return the time from sealing a session until its window begins, as far as the calibration shows it.

    An arm that is later shortens the window, of which half may be lost.
    """
    most_ns = 2000 * found.start_us  # for which T has room
    if design.mode.whole:
        return most_ns
    # A calibrated arm started alone, and two start at once. Of the slots half are an arm's, and a window begins one
    # second after the warm-ups.
    warm = -(-design.warmup_steps // (design.steps + design.uncounted))
    return min(1250 * found.start_us + 2 * warm * design.slot_ns + 10**9, most_ns)
