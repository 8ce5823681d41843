"""Phase slices: who runs when and with what, what is written down of it, and what becomes of an interrupted one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from glasshouse.bench.harness.phases import PhaseRun, PhaseWish, expected_s, measure_phases, order_of
from glasshouse.bench.harness.stop import Stop
from glasshouse.bench.overhead.artifact import load_phases
from glasshouse.bench.overhead.design import Arm
from glasshouse.bench.overhead.phases import read_phase_slices
from glasshouse.errors import Code, GlasshouseError, RunError, UsageError
from glasshouse.wire import pacing
from glasshouse.wire.pacing import Go
from simulators.paced_arms import FakeArm, PacedWorld

SEED = bytes(range(32))
# What of a step is spent where; the rest of it, a tenth, no stamp covers.
PARTS = {"forward": 0.3, "backward": 0.5, "optimizer": 0.1}


class StampedArm(FakeArm):
    """An arm whose job stamps its phases, and makes a checkpoint every so many steps (`world.checkpoint_every`)."""

    def slice(self, order: Go, timeout_s: float) -> pacing.Slice:
        report = super().slice(order, timeout_s)
        if not order.stamps:
            return report
        whole_ns = report.t1_ns - report.t0_ns
        parts = dict(PARTS)
        world = self._world
        assert isinstance(world, StampedWorld)
        every = world.checkpoint_every
        if every and report.done_after // every > report.done_before // every:
            parts["checkpoint"] = 0.05
        phases = {name: int(part * whole_ns) for name, part in parts.items()}
        return replace(report, phases=phases | {"residual": whole_ns - sum(phases.values())})


class StampedWorld(PacedWorld):
    """Both arms stamp."""

    checkpoint_every = 0

    def arms(self, arm: Arm) -> FakeArm:
        return StampedArm(self, arm)


Measure = Callable[..., PhaseRun | None]


@pytest.fixture
def measure(tmp_path: Path) -> Measure:
    def run(world: PacedWorld, *, blocks: int = 3, stop: Stop | None = None, every: int = 0) -> PhaseRun | None:
        wish = PhaseWish(seed=SEED, blocks=blocks, warmup_s=0, checkpoint_every=every)
        with Stop() as never:
            return measure_phases(wish, world.arms, path=tmp_path / "phases.jsonl", gpu=None, stop=stop or never)

    return run


def test_every_block_has_both_kinds_of_slices_of_both_arms_in_an_order_that_the_seed_draws() -> None:
    orders = [order_of(SEED, block) for block in range(400)]
    assert all(sorted(order) == sorted((arm, kind) for arm in Arm for kind in (True, False)) for order in orders)
    assert len(Counter(orders)) == 16
    assert max(Counter(orders).values()) < 60
    assert orders == [order_of(SEED, block) for block in range(400)]
    assert orders != [order_of(bytes(32), block) for block in range(400)]


def test_the_parts_of_a_known_step_are_found_in_either_arm(measure: Measure, tmp_path: Path) -> None:
    world = StampedWorld(overhead=0.02)
    found = measure(world)
    assert found is not None
    assert (found.checkpoints, found.ended) == ("none-made", None)
    for arm in Arm:
        one = found.phases.arms[arm]
        assert one.step_ns is not None
        assert {name: spent / one.stamped_step_ns for name, spent in one.phases_ns.items()} == pytest.approx(
            PARTS, rel=1e-6
        )
        assert one.residual_ns / one.stamped_step_ns == pytest.approx(0.1, rel=1e-6)
        assert one.blocks == 3
    raw, protected = found.phases.arms[Arm.RAW], found.phases.arms[Arm.PROTECTED]
    assert protected.phases_ns["forward"] / raw.phases_ns["forward"] == pytest.approx(1.0202, rel=1e-3)
    assert found.hooks > 0
    assert load_phases(tmp_path / "..") is None
    assert load_phases(tmp_path) == found.phases
    assert sorted(world.closed) == sorted(Arm)


def test_both_arms_run_the_same_batches_and_only_stamped_slices_carry_stamps(measure: Measure, tmp_path: Path) -> None:
    world = StampedWorld()
    measure(world)
    with (tmp_path / "phases.jsonl").open("rb") as lines:
        slices = list(read_phase_slices(lines))
    assert [(one.arm, one.stamped) for one in slices] == [one for block in range(3) for one in order_of(SEED, block)]
    measured = world.orders[-12:]
    assert [order.stamps for _, order in measured] == [one.stamped for one in slices]
    assert all(order.burn_ns == 0 and order.guard_ns >= 250_000_000 for _, order in measured)
    for block in range(3):
        ours = measured[4 * block : 4 * block + 4]
        begins = {arm: [order.until for whose, order in ours if whose is arm] for arm in Arm}
        assert begins[Arm.RAW] == begins[Arm.PROTECTED]
    assert {order.steps for _, order in measured} == {100}
    assert all("residual" not in (one.phases or {}) for one in slices)


def test_a_script_that_stamps_nothing_has_a_residual_and_no_phase(measure: Measure) -> None:
    class Silent(StampedArm):
        def slice(self, order: Go, timeout_s: float) -> pacing.Slice:
            report = FakeArm.slice(self, order, timeout_s)
            return replace(report, phases={"residual": report.t1_ns - report.t0_ns} if order.stamps else None)

    class Quiet(StampedWorld):
        def arms(self, arm: Arm) -> FakeArm:
            return Silent(self, arm)

    found = measure(Quiet())
    assert found is not None
    raw = found.phases.arms[Arm.RAW]
    assert raw.phases_ns == {}
    assert raw.residual_ns == raw.stamped_step_ns


def test_an_interrupted_measurement_keeps_its_whole_blocks(tmp_path: Path, measure: Measure) -> None:
    with Stop() as stop:
        world = StampedWorld()
        # Four slices of warm-up, one block, and the second slice of the next.
        world.misfortune = _at(10, stop.ask)
        found = measure(world, stop=stop)
    assert found is not None
    assert found.ended is Code.INTERRUPTED
    assert len(found.phases.slices) == 6
    assert load_phases(tmp_path) == found.phases
    assert sorted(world.closed) == sorted(Arm)


def test_one_that_is_interrupted_before_its_first_block_leaves_nothing(tmp_path: Path, measure: Measure) -> None:
    with Stop() as stop:
        world = StampedWorld()
        world.misfortune = _at(6, stop.ask)
        assert measure(world, stop=stop) is None
    assert list(tmp_path.iterdir()) == []
    assert sorted(world.closed) == sorted(Arm)


@pytest.mark.parametrize("when", [1, 7])
def test_an_arm_that_fails_is_told_and_both_are_ended(tmp_path: Path, measure: Measure, when: int) -> None:
    world = StampedWorld()

    def die() -> None:
        raise RunError(Code.WORKER_KILLED, "the arm was killed")

    world.misfortune = _at(when, die)
    with pytest.raises(GlasshouseError) as caught:
        measure(world)
    assert caught.value.code is Code.WORKER_KILLED
    assert list(tmp_path.iterdir()) == []
    assert sorted(world.closed) == sorted(Arm)


def test_a_loss_that_is_no_number_ends_it(measure: Measure) -> None:
    world = StampedWorld()
    world.misfortune = lambda arm, _number, report: replace(report, loss_finite=arm is Arm.RAW)
    with pytest.raises(RunError, match="protected arm") as caught:
        measure(world)
    assert caught.value.code is Code.NONFINITE_LOSS


def test_every_slice_of_a_job_with_checkpoints_holds_as_many(measure: Measure) -> None:
    world = StampedWorld()
    world.checkpoint_every = 150
    found = measure(world, every=150)
    assert found is not None
    assert found.checkpoints == "measured"
    assert {one.steps for one in found.phases.slices} == {150}
    assert found.phases.arms[Arm.PROTECTED].phases_ns["checkpoint"] > 0


def test_a_checkpoint_that_no_slice_could_hold_is_said_not_to_be_there(measure: Measure) -> None:
    found = measure(StampedWorld(), every=1_000_000)
    assert found is not None
    assert found.checkpoints == "none-in-a-slice"
    assert "checkpoint" not in found.phases.arms[Arm.RAW].phases_ns


def test_more_checkpoints_than_a_run_keeps_are_refused_before_they_are_made(tmp_path: Path, measure: Measure) -> None:
    with pytest.raises(UsageError, match="checkpoints; a run keeps 240") as caught:
        measure(StampedWorld(), every=1, blocks=6)
    assert "checkpoint_every = " in (caught.value.hint or "")
    assert list(tmp_path.iterdir()) == []


def test_slices_that_are_there_are_not_written_over(tmp_path: Path, measure: Measure) -> None:
    (tmp_path / "phases.jsonl").write_text("mine\n")
    world = StampedWorld()
    with pytest.raises(UsageError, match="cannot write"):
        measure(world)
    assert (tmp_path / "phases.jsonl").read_text() == "mine\n"
    assert world.started == []


def test_what_it_takes_grows_with_the_blocks_and_with_the_step() -> None:
    def takes(blocks: int, step_s: float) -> float:
        return expected_s(PhaseWish(seed=SEED, blocks=blocks), start_s=3.0, step_s=step_s)

    assert takes(6, 0.01) < takes(12, 0.01) < takes(12, 2.0)


def _at(number: int, act: Callable[[], None]) -> Callable[[Arm, int, pacing.Slice], pacing.Slice]:
    """Return a misfortune that acts with the slice of this number, counted over both arms."""
    seen = [0]

    def misfortune(_arm: Arm, _number: int, report: pacing.Slice) -> pacing.Slice:
        seen[0] += 1
        if seen[0] == number:
            act()
        return report

    return misfortune
