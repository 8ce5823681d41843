"""Measurements with arms of known behaviour: what they leave, and what is left when something goes wrong."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from glasshouse.bench.harness.arms import Finished
from glasshouse.bench.harness.engine import Engine, Pieces, _note
from glasshouse.bench.harness.sequential import Legs
from glasshouse.bench.harness.stop import Stop
from glasshouse.bench.overhead.analysis import Analysis, analyse
from glasshouse.bench.overhead.artifact import Part
from glasshouse.bench.overhead.design import Arm, Design, Mode, Phase, WarmupRule
from glasshouse.bench.overhead.exclusions import Rule
from glasshouse.bench.overhead.parity import Same
from glasshouse.bench.overhead.slices import Outcome, SessionEnd, Slice
from glasshouse.errors import Code, RunError, UsageError
from glasshouse.wire import pacing
from glasshouse.wire.kdf import salted
from simulators.paced_arms import MemoryStore, PacedWorld, Quiet, nothing_seen

QUICK = WarmupRule(least_ns=1_000_000_000, cap_ns=60_000_000_000, window_blocks=5)


def _design(**changes: Any) -> Design:
    values: dict[str, Any] = {
        "mode": Mode.INTERLEAVED,
        "seed": hashlib.sha256(b"engine").digest(),
        "sessions": 2,
        "blocks_per_session": 6,
        "slice_steps": 100,
        "warmup": QUICK,
    }
    return Design(**(values | changes))


@pytest.fixture
def stop() -> Iterator[Stop]:
    with Stop() as made:
        yield made


class Run:
    """A measurement of a world, and what it left."""

    def __init__(self, world: PacedWorld, stop: Stop, design: Design, *, room: int = 10**9, burn_ns: int = 0) -> None:
        self.world, self.design, self.store, self.watch = world, design, MemoryStore(room), Quiet()
        pieces = Pieces(
            design=design,
            store=self.store,
            arms=world.arms,
            look=nothing_seen,
            watch=self.watch,
            stop=stop,
            guard_steps=70,
            burn_ns=burn_ns,
        )
        self.engine = (Legs if design.mode is Mode.SEQUENTIAL else Engine)(pieces)

    def all(self) -> Run:
        for number in range(self.design.sessions):
            self.engine.session(number)
        return self

    @property
    def analysis(self) -> Analysis:
        return analyse(self.design, self.store.records)

    @property
    def ends(self) -> list[SessionEnd]:
        return [record for record in self.store.records if isinstance(record, SessionEnd)]

    @property
    def slices(self) -> list[Slice]:
        return [record for record in self.store.records if isinstance(record, Slice)]


def _at(arm: Arm, number: int, act: Callable[[pacing.Slice], pacing.Slice]) -> Callable[..., pacing.Slice]:
    """Return a misfortune that befalls one slice."""

    def happens(which: Arm, which_number: int, report: pacing.Slice) -> pacing.Slice:
        return act(report) if (which, which_number) == (arm, number) else report

    return happens


def _dies(code: Code) -> Callable[[pacing.Slice], pacing.Slice]:
    def act(_report: pacing.Slice) -> pacing.Slice:
        raise RunError(code, f"it ended by {code.value}")

    return act


def test_a_planted_overhead_is_found_and_everything_can_be_replayed(stop: Stop) -> None:
    run = Run(PacedWorld(overhead=0.02), stop, _design()).all()
    found = run.analysis
    assert found.result is not None
    assert found.result.log_ratio == pytest.approx(0.02, abs=1e-6)
    assert found.attempts.included == found.attempts.blocks_planned == 12
    assert found.parked is not None
    part = Part.of(run.design, tuple(run.store.records), tuple(run.store.notes))
    assert part.parity.word is Same.SAME


def test_weights_are_compared_through_the_salt_of_the_receipt_and_files_not_at_all() -> None:
    """What lies in the measurement for anyone to read commits to nothing that a guess could be compared with."""
    weights, settings = hashlib.sha256(b"weights").digest(), hashlib.sha256(b'{"r": 16}').digest()
    outputs = (("output", "file", settings), ("output", "weights", weights))
    salts = (b"s" * 32, b"t" * 32)
    raw = Finished(done=5, start_ns=1, outputs=outputs)
    protected = Finished(done=5, start_ns=2, outputs=outputs, salts=salts, bundle=b"bundle", lifecycle_us={})
    note = _note(0, {Arm.RAW: raw, Arm.PROTECTED: protected})
    assert note.raw is not None
    assert note.protected is not None
    assert note.protected.outputs == (("output", "file", None), ("output", "weights", salted(salts[1], weights)))
    assert note.raw.outputs == note.protected.outputs
    null = [_note(0, {Arm.RAW: raw, Arm.PROTECTED: raw}) for _ in range(2)]
    assert all(one.raw is not None and one.raw == replace(one.protected, start_ns=1) for one in null)
    assert null[0].raw != null[1].raw  # the salt is drawn for the session, and nowhere kept
    assert weights.hex().encode() not in null[0].encode() + note.encode()


def test_what_is_burnt_in_every_step_of_p_is_the_overhead(stop: Stop) -> None:
    run = Run(PacedWorld(step_ns=5_000_000), stop, _design(), burn_ns=100_000).all()
    assert run.analysis.result is not None
    assert run.analysis.result.slowdown == pytest.approx(0.02, abs=1e-6)


def test_nothing_is_measured_before_the_warm_up_is_steady(stop: Stop) -> None:
    run = Run(PacedWorld(), stop, _design(sessions=1)).all()
    phases = [one.phase for one in run.slices]
    warm = phases.count(Phase.WARMUP)
    assert warm == 4 * QUICK.window_blocks == 4 * run.ends[0].warmup_blocks
    assert phases == [Phase.WARMUP] * warm + [Phase.MEASURED] * 24


def test_both_arms_use_the_same_batches_even_when_the_guard_becomes_too_short(stop: Stop) -> None:
    """A machine that wakes up: at a third of a step's time, the guard of 70 steps lasts less than its least 250 ms."""
    run = Run(PacedWorld(faster_from=14), stop, _design(sessions=1)).all()
    assert all(one.guard_ns >= run.design.guard_ns for one in run.slices)
    assert run.analysis.attempts.excluded == ()
    later = [order.until for arm, order in run.world.orders[-8:]]
    assert min(b - a for a, b in zip(later, later[4:], strict=False)) > 2 * (70 + 100)


def test_arms_start_in_the_drawn_order_and_end_before_the_next_session(stop: Stop) -> None:
    run = Run(PacedWorld(), stop, _design()).all()
    first = run.design.launched_first(0)
    assert run.world.started == [first, first.other, first.other, first]
    assert len(run.world.closed) == 4


def test_a_null_run_says_nothing_of_hooks(stop: Stop) -> None:
    run = Run(PacedWorld(), stop, _design(mode=Mode.NULL)).all()
    assert {one.hooks_ns for one in run.slices} == {None}
    assert run.analysis.direct is None


@pytest.mark.parametrize("arm", list(Arm))
@pytest.mark.parametrize("code", [Code.NONFINITE_LOSS, Code.OUT_OF_MEMORY, Code.WORKER_KILLED])
def test_an_arm_that_dies_in_a_block_ends_its_session_and_no_other(stop: Stop, arm: Arm, code: Code) -> None:
    # Ten slices of either arm warm up; its sixth measured slice is in the third block.
    run = Run(PacedWorld(misfortune=_at(arm, 15, _dies(code))), stop, _design())
    run.engine.session(0)
    run.world.misfortune = lambda _arm, _number, report: report
    run.engine.session(1)
    assert [(end.outcome, end.code) for end in run.ends] == [(Outcome.FAILED, code), (Outcome.COMPLETE, None)]
    assert run.analysis.attempts.completed == 2 + 6
    assert run.analysis.attempts.incomplete == 1
    assert run.store.notes[0].raw is None
    assert run.store.notes[0].protected is None
    assert len(run.world.closed) == 4
    assert code.value in run.watch.reasons[0]


def test_an_arm_that_cannot_start_leaves_a_session_without_a_block(stop: Stop) -> None:
    run = Run(PacedWorld(), stop, _design(sessions=1))

    class Broken(type(run.world.arms(Arm.RAW))):  # type: ignore[misc]
        def start(self) -> None:
            raise RunError(Code.DEVICE_MISSING, "there is no GPU here")

    run.engine._pieces = replace(run.engine._pieces, arms=lambda arm: Broken(run.world, arm))
    run.all()
    assert run.ends[0].code is Code.DEVICE_MISSING
    assert run.analysis.result is None
    assert len(run.world.closed) == 1


def test_a_slice_that_never_comes_fails_its_session(stop: Stop) -> None:
    run = Run(PacedWorld(misfortune=_at(Arm.RAW, 12, _dies(Code.DURATION_EXCEEDED))), stop, _design(sessions=1)).all()
    assert run.ends[0].outcome is Outcome.FAILED
    assert run.ends[0].code is Code.DURATION_EXCEEDED
    assert sorted(run.world.closed) == [Arm.PROTECTED, Arm.RAW]


def test_a_loss_that_is_no_number_but_ends_nothing_excludes_its_block(stop: Stop) -> None:
    world = PacedWorld(misfortune=_at(Arm.PROTECTED, 13, lambda report: replace(report, loss_finite=False)))
    run = Run(world, stop, _design(sessions=1)).all()
    assert run.analysis.attempts.excluded == ((Rule.NONFINITE, 1),)
    assert run.analysis.attempts.included == 5


def test_a_laptop_that_slept_in_a_slice_excludes_its_block(stop: Stop) -> None:
    world = PacedWorld(misfortune=_at(Arm.RAW, 13, lambda report: replace(report, skew_ns=3600 * 10**9)))
    run = Run(world, stop, _design(sessions=1)).all()
    assert run.analysis.attempts.excluded == ((Rule.CLOCK, 1),)
    assert run.ends[0].outcome is Outcome.COMPLETE


def test_a_clock_that_stood_still_in_the_warm_up_makes_it_longer(stop: Stop) -> None:
    world = PacedWorld(misfortune=_at(Arm.RAW, 3, lambda report: replace(report, t1_ns=report.t0_ns)))
    run = Run(world, stop, _design(sessions=1)).all()
    assert run.ends[0].warmup_blocks == 2 + QUICK.window_blocks
    assert run.analysis.unsteady == ()


def test_a_count_that_runs_backwards_is_no_measurement(stop: Stop) -> None:
    world = PacedWorld(misfortune=_at(Arm.RAW, 2, lambda report: replace(report, done_before=1)))
    run = Run(world, stop, _design(sessions=1)).all()
    assert run.ends[0].code is Code.WORKER_FAILED


def test_an_interrupt_in_a_block_keeps_the_blocks_before_it(stop: Stop) -> None:
    def interrupt(report: pacing.Slice) -> pacing.Slice:
        stop.ask()
        return report

    run = Run(PacedWorld(misfortune=_at(Arm.RAW, 15, interrupt)), stop, _design(sessions=1)).all()
    assert run.ends[0].outcome is Outcome.INTERRUPTED
    assert run.analysis.attempts.completed == 2
    assert run.analysis.attempts.sessions_completed == 0
    assert run.analysis.result is not None


def test_a_full_disk_ends_the_session_with_its_reason_and_keeps_what_is_there(stop: Stop) -> None:
    run = Run(PacedWorld(), stop, _design(sessions=1), room=4 * QUICK.window_blocks + 9).all()
    assert run.ends[0].code is Code.DISK_FULL
    assert run.analysis.attempts.completed == 2
    assert run.analysis.attempts.incomplete == 1


def test_a_disk_without_any_room_is_told_to_the_caller(stop: Stop) -> None:
    run = Run(PacedWorld(), stop, _design(sessions=1), room=3)
    run.store.make_room = lambda: None  # type: ignore[method-assign]
    with pytest.raises(UsageError) as caught:
        run.engine.session(0)
    assert caught.value.code is Code.DISK_FULL
    assert len(run.world.closed) == 2


@pytest.mark.parametrize("steps", [None, 400])
def test_legs_run_one_after_the_other_from_the_same_batch(stop: Stop, steps: int | None) -> None:
    design = _design(
        mode=Mode.SEQUENTIAL,
        sessions=4,
        blocks_per_session=1,
        slice_steps=steps,
        leg_ns=None if steps else 2_000_000_000,
        guard_steps=0,
        guard_ns=0,
        warmup=replace(QUICK, least_ns=500_000_000),
    )
    run = Run(PacedWorld(overhead=0.01), stop, design).all()
    found = run.analysis.sequential
    assert found is not None
    assert run.analysis.attempts.excluded == ()
    assert found.log_ratio == pytest.approx(0.01, abs=1e-3)
    assert found.order_effect == pytest.approx(0.0, abs=1e-3)
    assert found.units == 2
    measured = [one for one in run.slices if one.phase is Phase.MEASURED]
    for raw, protected in zip(measured[::2], measured[1::2], strict=True):
        assert raw.first_batch == protected.first_batch
    assert {one.parked_cpu_ns for one in measured} == {None}  # nobody waits


def test_a_leg_that_fails_is_counted(stop: Stop) -> None:
    design = _design(mode=Mode.SEQUENTIAL, sessions=2, blocks_per_session=1, slice_steps=100, guard_steps=0, guard_ns=0)
    run = Run(PacedWorld(misfortune=_at(Arm.PROTECTED, 1, _dies(Code.WORKER_KILLED))), stop, design).all()
    assert [end.code for end in run.ends] == [Code.WORKER_KILLED] * 2
    assert run.analysis.sequential is None
    assert run.analysis.attempts.incomplete == 2
