"""The story of a measurement: calibrate, seal the designs, and run every part's sessions in turn.

Laws: every design is in its file before the first session of any part; sessions of the parts take turns, so that an
interrupted measurement has some of each, and goes on where it was, for the same owner and by the same designs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from glasshouse.errors import Code, UsageError
from glasshouse.jobs.owner.durations import format_s
from glasshouse.jobs.owner.home import is_there, private_folder, write_private
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse_bench.artifact import Attempt, Part, read_document
from glasshouse_bench.beside import MAX_BESIDE_BYTES, Calibration
from glasshouse_bench.design import Design, Mode
from glasshouse_bench.harness.alone import calibrated, parity
from glasshouse_bench.harness.machine import Card, MemoryPeak, describe
from glasshouse_bench.harness.planning import Setting, Wish, plan, ready_ns, session_ns
from glasshouse_bench.harness.profiled import phases
from glasshouse_bench.harness.resume import CALIBRATION, OWNER, begun, check_same
from glasshouse_bench.harness.room import room_for, was_full
from glasshouse_bench.harness.session import run_session, warm_after_ns
from glasshouse_bench.harness.stage import Stage
from glasshouse_bench.harness.stop import Stop
from glasshouse_bench.harness.subject import Subject

__all__ = ["measure"]

PARITY, PHASES = "parity.json", "phases.json"


def measure(
    wish: Wish,
    make: Callable[[Path], Subject],
    *,
    folder: Path,
    identity: Identity,
    say: Callable[[str], None],
    stop: Stop,
    card: Card | None = None,
    cpus: tuple[int, ...] | None = None,
) -> list[Part]:
    """Measure, or go on with what was begun, and return the parts; what follows from them is `statement`'s.

    Args:
        wish: what was asked for; of a measurement that lies in the folder already, what its designs say.
        make: makes the job; is given a folder for its data.
        identity: the owner, the same for all of a measurement.
        say: shows a line to a person.
        cpus: where both arms may run; None chooses.

    Raises:
        UsageError: a job that cannot be measured, too short a time, a full disk; `owner-mismatch` or `usage` where
            another owner's measurement, or another design, lies in the folder.
        RunError: the job itself does not run, or `interrupted` before anything was measured.
    """
    there = begun(folder, identity.public)
    with room_for(folder), Stage(make, identity=identity) as stage:
        chosen = _cpus(stage.subject) if cpus is None else cpus
        stage.pin(chosen)
        _refuse_shared(card, wish)
        setting = Setting(
            subject=stage.subject,
            subject_sha256=stage.subject.sha256,
            owner=identity.signing,
            cpus=chosen,
            machine=describe(card),
        )
        if there:
            calibration = read_document(folder / CALIBRATION, Calibration, max_bytes=MAX_BESIDE_BYTES)
            check_same(there, wish, setting, calibration_sha256=calibration.sha256)
        else:
            on_card = card is not None and stage.subject.job.params.get("device") != "cpu"
            say("calibrating: a raw and a protected run without slots")
            memory = MemoryPeak(card if on_card else None)
            calibration = calibrated(stage, stop, device=on_card, look=memory.look)
            _refuse_crowded(memory, wish)
            write_private(private_folder(folder) / CALIBRATION, calibration.encode())
            write_private(folder / OWNER, identity.public.encode())  # before the first design: who may go on with it
        parts = _parts(folder, there, wish, calibration, setting)
        _say_plan(say, parts, _left_s(parts, calibration))
        later_ns = 0
        for part, number in _turns(parts):
            if stop.asked:
                break
            say(f"{part.design.mode.value} session {number + 1} of {part.design.sessions}")
            arms = stage.arms(part.design, number)
            to_start_ns = _to_start_ns(part.design, calibration, later_ns)
            note, reason = run_session(part, number, arms, ready_ns=to_start_ns, stop=stop, card=card)
            later_ns = max(later_ns, warm_after_ns(part, note))
            _say_session(say, part, note, reason, _left_s(parts, calibration))
            if any(was_full(arm.code, reason) for arm in (note.raw, note.protected)):
                # Each session that follows would be lost in the same way, and count.
                raise UsageError(Code.DISK_FULL, f"an arm of session {number} had no room: {reason}")
        if not stop.asked and not is_there(folder / PARITY):
            say("work parity: a raw and a protected run with the same target")
            same = parity(stage, stop)
            if same is not None:
                write_private(folder / PARITY, same.encode(), replace=False)
        interleaved = next((part.design for part in parts if part.design.mode is Mode.INTERLEAVED), None)
        if not stop.asked and not is_there(folder / PHASES) and interleaved is not None:
            say("phases of a step: one session under a profiler")
            to_start_ns = _to_start_ns(interleaved, calibration, later_ns)
            found = phases(stage, interleaved, stop, ready_ns=to_start_ns)
            if found is None:
                say("  none: an arm ended too soon, or nothing in the job names a phase")
            else:
                write_private(folder / PHASES, found.encode(), replace=False)
    return parts


def _parts(
    folder: Path, there: Mapping[Mode, Part], wish: Wish, calibration: Calibration, setting: Setting
) -> list[Part]:
    designs = {mode: part.design for mode, part in there.items()}
    if set(designs) != set(wish.modes):
        designs = {one.mode: one for one in plan(wish, calibration, setting)} | designs
    return [Part.begin(folder, designs[mode]) for mode in wish.modes]


def _cpus(subject: Subject) -> tuple[int, ...]:
    """Return the last processors, as many as the job has threads, where the harness keeps one for itself."""
    allowed = sorted(os.sched_getaffinity(0))
    threads = subject.threads
    return tuple(allowed[-threads:]) if threads is not None and threads < len(allowed) else ()


def _refuse_shared(card: Card | None, wish: Wish) -> None:
    if card is not None and _interleaved(wish) and card.shared() is False:
        raise UsageError(
            Code.USAGE,
            "this GPU is in a mode in which two processes cannot take turns by themselves (exclusive, or MPS)",
            hint="set its compute mode to DEFAULT and stop MPS, or measure with --mode alternating",
        )


def _refuse_crowded(memory: MemoryPeak, wish: Wish) -> None:
    if _interleaved(wish) and memory.fits_twice is False:
        raise UsageError(
            Code.USAGE,
            f"one arm alone takes {memory.taken_bytes / 2**30:.1f} GiB of this GPU's memory: two do not fit at once, "
            "with 2 GiB to spare",
            hint="make the model or the batch smaller, or measure with --mode alternating",
        )


def _interleaved(wish: Wish) -> bool:
    return any(not mode.whole for mode in wish.modes)


def _to_start_ns(design: Design, found: Calibration, later_ns: int) -> int:
    """Return the time in which a session's arms are to become warm.

    Args:
        later_ns: what the slowest session before it took; one that a machine held up for long does not make all longer.
    """
    calibrated_ns = ready_ns(design, found)
    return calibrated_ns if design.mode.whole else min(max(calibrated_ns, later_ns), 2 * calibrated_ns)


def _left_s(parts: Sequence[Part], found: Calibration) -> float:
    return sum((part.design.sessions - part.attempted) * session_ns(part.design, found) / 1e9 for part in parts)


def _say_plan(say: Callable[[str], None], parts: Sequence[Part], left_s: float) -> None:
    for design in (part.design for part in parts):
        slots = f"{design.steps} + {design.uncounted} steps in slots of {design.slot_ns / 1e6:.0f} ms"
        how = "whole processes" if design.mode.whole else slots
        say(f"{design.mode.value}: {design.sessions} sessions of {design.length_ns / 1e9:.0f} s, {how}")
        say(f"  design {design.sha256.hex()}")
    say(f"about {format_s(left_s)} from now; Ctrl-C keeps what is complete")
    say("the same command goes on with it, with -o and its folder")


def _say_session(say: Callable[[str], None], part: Part, note: Attempt, reason: str, left_s: float) -> None:
    second = "second raw" if part.design.mode is Mode.NULL else "protected"
    how = f"raw {note.raw.ended.value}, {second} {note.protected.ended.value}; about {format_s(left_s)} left"
    say(f"  {how}; {reason[:300]}" if reason else f"  {how}")


def _turns(parts: Sequence[Part]) -> list[tuple[Part, int]]:
    """Return the sessions that are left, those of the parts mixed evenly."""
    turns = sorted(
        ((number + 0.5) / part.design.sessions, place, number)
        for place, part in enumerate(parts)
        for number in range(part.attempted, part.design.sessions)
    )
    return [(parts[place], number) for _, place, number in turns]
