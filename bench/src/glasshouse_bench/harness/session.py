"""One session: both arms from their launch to what they left, and the note of it.

Laws: the attempt is written down before anything is started; whatever happens, both arms have ended and the note says
how before the next session begins; no rule here looks at how fast an arm is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping

from glasshouse.errors import GlasshouseError
from glasshouse_bench.artifact import Arm, Attempt, Ended, Lifecycle, Part, Spent
from glasshouse_bench.harness.arms import END_S, Left, Worker
from glasshouse_bench.harness.machine import Card, Sampler, clock
from glasshouse_bench.harness.stop import Stop
from glasshouse_bench.records import Record, parse

__all__ = ["Makes", "lifecycle_of", "read", "run_session", "side_by_side", "warm_after_ns"]

_LOOK_S = 0.1
# Steps that are under way at the schedule's end are ended; an arm that is gone earlier has died. Afterwards a run seals
# its outputs and wipes itself: one that takes longer than so is stopped, and the attempt is lost.
_EARLY_NS = 1_000_000_000
LATE_NS = 30_000_000_000
_BEFORE = ("harden", "attest", "release", "open")
_AFTER = ("seal_outputs", "zeroize")


# Makes the arm `R` or `P` of one session, whose schedule ends at an instant (`stage.Stage`).
Makes = Callable[[str, int], Worker]


def run_session(
    part: Part, number: int, make: Makes, *, ready_ns: int, stop: Stop, card: Card | None = None
) -> tuple[Attempt, str]:
    """Attempt one session, and write down what came of it.

    Args:
        ready_ns: from now until both arms are expected to be warm, or each of two whole processes.

    Returns:
        The note, and why an arm failed, for people.

    Raises:
        UsageError: `disk-full`.
    """
    began = clock()
    part.attempt(Attempt(session=number, began=began))
    # Whatever breaks off in here, the attempt stands: its note has no arms, and it counts as one that died.
    with Sampler(began.monotonic_ns, card) as sampler:
        if part.design.mode.whole:
            left, background = _one_after_the_other(part, number, make, ready_ns, stop), None
        else:
            length_ns = part.design.length_ns
            left, background = side_by_side(make, length_ns=length_ns, ready_ns=ready_ns, stop=stop, number=number)
    raw, protected = left["R"], left["P"]
    note = Attempt(
        session=number,
        began=began,
        raw=raw.arm,
        protected=protected.arm,
        lifecycle=lifecycle_of(raw, protected),
        background=background,
        samples=tuple(sampler.samples[:4096]),
    )
    note = part.keep(note, raw=_whole(raw), protected=_whole(protected), receipt=protected.bundle)
    return note, "; ".join(reason for reason in (raw.reason, protected.reason) if reason)


def _whole(left: Left) -> bytes | None:
    """Return an arm's record, if its run completed: no receipt stands behind the steps of one that did not."""
    return left.record if left.arm.ended is Ended.COMPLETED else None


def warm_after_ns(part: Part, note: Attempt) -> int:
    """Return the time from a session's begin until its window could begin, or some of it; 0 where it is not known."""
    warmup = part.design.warmup_steps
    records = [] if part.design.mode.whole else [parse(data) for data in part.records(note) if data is not None]
    if len(records) < 2:
        return 0
    ends_ns = [int(one.steps.end[warmup - 1]) if len(one.losses) >= warmup > 0 else one.until_ns for one in records]
    return max(ends_ns) - note.began.monotonic_ns + 10**9


def side_by_side(
    make: Makes, *, length_ns: int, ready_ns: int, stop: Stop, number: int = 0
) -> tuple[dict[str, Left], Spent | None]:
    """Run both arms at once, which take turns by their plans; return what they left, and the background.

    Args:
        length_ns: for which both are to take their slots.
        ready_ns: from now until both are expected to be warm.
        number: of the session; who is started first follows from it.
    """
    end_ns = clock().monotonic_ns + ready_ns + length_ns
    order = ("R", "P") if number % 2 == 0 else ("P", "R")
    with contextlib.ExitStack() as stack:
        workers, lost = _started(order, make, end_ns, stack)
        ends, background = _watched(workers, end_ns, length_ns, stop, lost)
        return lost | {arm: worker.left(ends[arm]) for arm, worker in workers.items()}, background


def _one_after_the_other(part: Part, number: int, make: Makes, ready_ns: int, stop: Stop) -> dict[str, Left]:
    """Run each arm alone: to its target, the design's length, or, as a script has none, to the end of its schedule."""
    left: dict[str, Left] = {}
    for arm in ("R", "P") if part.design.raw_first(number) else ("P", "R"):
        end_ns = clock().monotonic_ns + ready_ns + part.design.length_ns
        with contextlib.ExitStack() as stack:
            workers, lost = _started((arm,), make, end_ns, stack)
            ends, _ = _watched(workers, end_ns, 0, stop, lost)
            left |= lost | {arm: worker.left(ends[arm]) for arm, worker in workers.items()}
    return left


def _started(
    order: tuple[str, ...], make: Makes, end_ns: int, stack: contextlib.ExitStack
) -> tuple[dict[str, Worker], dict[str, Left]]:
    """Return the arms that were started, and what there is of those that were not."""
    workers: dict[str, Worker] = {}
    for arm in order:
        try:
            worker = make(arm, end_ns)
            stack.callback(worker.close)
            worker.start()
        except GlasshouseError as error:
            never = Left(arm=Arm(ended=Ended.NOT_STARTED, code=error.code), reason=error.message)
            return workers, {one: never for one in order if one not in workers}
        workers[arm] = worker
    return workers, {}


def _watched(
    workers: Mapping[str, Worker], end_ns: int, length_ns: int, stop: Stop, lost: Mapping[str, Left]
) -> tuple[dict[str, Ended], Spent | None]:
    """Wait until all have ended; return how, and what agent and watchdog spent while the slots were taken."""
    ends = dict.fromkeys(workers, Ended.COMPLETED)
    looks: list[tuple[int, int]] = []
    asked = False
    while any(worker.alive for worker in workers.values()):
        now_ns = clock().monotonic_ns
        alive = [arm for arm, worker in workers.items() if worker.alive]
        gone = bool(lost) or (len(alive) < len(workers) and now_ns < end_ns - _EARLY_NS)
        late = now_ns > end_ns + LATE_NS
        if not asked and (stop.asked or gone or late):
            asked = True
            for arm in alive:
                ends[arm] = Ended.INTERRUPTED if stop.asked else Ended.KILLED
                workers[arm].stop()
        if now_ns > end_ns + round(1e9 * END_S):
            for arm in alive:
                ends[arm] = Ended.KILLED
                workers[arm].close()
        training = [worker.pinned() for worker in workers.values()]  # each is asked
        protected = workers.get("P")
        if protected is not None and all(training) and length_ns and now_ns < end_ns and len(alive) == len(workers):
            spent = protected.spent_ns()
            looks += [] if spent is None else [(now_ns, spent)]
        time.sleep(_LOOK_S)
    return ends, _spent(looks)


def _spent(looks: list[tuple[int, int]]) -> Spent | None:
    if len(looks) < 2 or looks[-1][1] < looks[0][1]:
        return None
    return Spent(spent_ns=looks[-1][1] - looks[0][1], over_ns=looks[-1][0] - looks[0][0])


def lifecycle_of(raw: Left, protected: Left) -> Lifecycle | None:
    found = protected.lifecycle_us
    starts = _start_us(raw), _start_us(protected)
    if found is None or None in starts or any(found.get(step) is None for step in (*_BEFORE, *_AFTER)):
        return None
    steps = {step: int(found[step] or 0) for step in (*_BEFORE, *_AFTER)}
    before = sum(steps[step] for step in _BEFORE)
    return Lifecycle(start=int(starts[1] or 0) - int(starts[0] or 0) - before, **steps)


def _start_us(left: Left) -> int | None:
    """Return the time from an arm's launch to its first step."""
    record = read(left)
    if record is None or left.arm.launched_ns is None or not len(record.steps.begin):
        return None
    return (int(record.steps.begin[0]) - left.arm.launched_ns) // 1000


def read(left: Left) -> Record | None:
    """Return an arm's steps, if it left a record that can be read: a reader judges it by itself."""
    if left.record is None:
        return None
    with contextlib.suppress(GlasshouseError):
        return parse(left.record)
    return None
