"""Whole sessions of real workers: what they leave is read, and what is planted in one of them is found."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from glasshouse.errors import UsageError
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.verify.verdict import verify_bundle
from glasshouse_bench.artifact import Attempt, Ended, Part
from glasshouse_bench.design import Kind, Mode, Planted
from glasshouse_bench.harness import alone, profiled
from glasshouse_bench.harness.session import run_session
from glasshouse_bench.harness.stage import Stage
from glasshouse_bench.harness.stop import Stop
from glasshouse_bench.harness.subject import builtin, owners
from glasshouse_bench.records import parse
from glasshouse_bench.sessions import Outcome, session_of
from glasshouse_bench.statement import write_statement
from glasshouse_bench.verify import verify_measurement
from simulators.sealed_design import design

# A busy machine takes its time: the next session of the design gives both arms more to start in.
READY_NS = (10 * 10**9, 24 * 10**9, 60 * 10**9)


def attempted(part: Part, stage: Stage) -> tuple[Attempt, str]:
    """Attempt sessions until one has steps of both arms; return its note."""
    for number, ready_ns in enumerate(READY_NS):
        with Stop() as stop:
            note, reason = run_session(part, number, stage.arms(part.design, number), ready_ns=ready_ns, stop=stop)
        records = [parse(data) for data in part.records(note) if data is not None]
        if len(records) == 2 and session_of(*records, length_ns=part.design.length_ns).outcome is Outcome.COMPLETE:
            return note, reason
    raise AssertionError(f"no session of {len(READY_NS)} had room for both arms")


@pytest.mark.slow
def test_a_session_of_real_workers_leaves_all_that_a_reader_computes_from(tmp_path: Path) -> None:
    owner = Identity.generate()
    sealed = replace(design(Mode.INTERLEAVED, sessions=3), length_ns=3 * 10**9, slot_ns=150 * 10**6)
    part = Part.begin(tmp_path, sealed)
    with Stage(lambda folder: builtin("mlp", folder, device="cpu"), identity=owner) as stage:
        note, reason = attempted(part, stage)
        assert not list(stage.home.raw.glob("*")), "nothing of the raw run is left in the clear"
        assert not list(stage.home.path.glob("*.sealed"))
    assert (note.raw.ended, note.protected.ended, reason) == (Ended.COMPLETED, Ended.COMPLETED, "")
    assert note.protected.deployment
    assert note.lifecycle is not None
    assert note.background is not None
    assert 0 < note.background.spent_ns < note.background.over_ns
    assert not stage.home.path.exists()
    records = [parse(data) for data in part.records(note) if data is not None]
    # Reading a record refuses each step that began outside its own worker's slots.
    assert [one.reason for one in records] == ["end", "end"]
    assert set(records[0].slots.tolist()).isdisjoint(records[1].slots.tolist())
    assert all(one.hooks_ns.any() for one in records), "messages were passed on in some slot"
    assert session_of(*records, length_ns=sealed.length_ns).unlike_losses is None
    # An ordinary run: its receipt names the record, and nothing else tells it apart.
    receipt = verify_bundle(part.receipt(note.session).read_bytes(), owner=owner.public.signing).chain.receipt
    assert receipt.work is not None
    assert receipt.outcome.value == "completed"
    assert (receipt.work.stop_reason, receipt.work.done) == ("time", len(records[1].losses))
    assert len(receipt.outputs) == 3
    write_statement(tmp_path, owner=owner.signing, created_us=note.began.real_us + 60_000_000)
    verdict = verify_measurement(tmp_path, owner=owner.public)
    assert verdict.assurance == "software"
    [main] = verdict.measurement.parts
    assert main.analysis["attempts"]["outcomes"]["complete"] == 1
    assert "n=1, no interval" in verdict.sentence


@pytest.mark.long
def test_what_is_planted_in_one_of_two_raw_workers_is_found(tmp_path: Path) -> None:
    planted = Planted(step_ppm=2_000_000, bunched_ns=0)
    sealed = replace(design(Mode.NULL, sessions=3), length_ns=4 * 10**9, slot_ns=150 * 10**6, planted=planted, steps=2)
    part = Part.begin(tmp_path, sealed)
    with Stage(lambda folder: builtin("mlp", folder, device="cpu"), identity=Identity.generate()) as stage:
        note, _ = attempted(part, stage)
    assert note.protected.deployment is None
    raw, slower = (parse(data) for data in part.records(note) if data is not None)
    found = session_of(raw, slower, length_ns=sealed.length_ns)
    assert found.outcome is Outcome.COMPLETE
    assert found.blocks is not None
    # Three times as long; whatever else this machine does, not by twice as much.
    assert math.log(1.5) < found.blocks.contrast < math.log(6)


@pytest.mark.long
def test_both_arms_alone_are_timed_and_make_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "RAW_S", 1.0)
    with Stop() as stop, Stage(lambda folder: builtin("mlp", folder, device="cpu"), identity=Identity.generate()) as at:
        found = alone.calibrated(at, stop, device=False)
        same = alone.parity(at, stop)
    assert min(len(found.raw_ns), len(found.protected_ns)) >= 20
    assert found.lifecycle is not None
    assert same is not None
    assert same.same
    assert same.deployment != found.deployment
    assert alone._committed(bytes(32), {"a": bytes(32)}) != alone._committed(bytes(32), {"a": bytes(31) + b"\1"})


SCRIPT = """
import itertools, time
from glasshouse.task import current
for step in itertools.count(1):
    time.sleep(0.01)
    current().progress(step, loss=1 / step)
"""


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_script_without_a_target_is_measured_in_whole_processes(tmp_path: Path, interrupted: bool) -> None:
    owner = Identity.generate()
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "job.toml").write_text(
        'name = "mine"\nworkload = "script"\n[inputs]\n"train.py" = "train.py"\n[params]\nscript = "train.py"\n'
        '[policy]\nassurance = "software"\nprofile = "standard"\n'
    )
    mine = owners(tmp_path / "job.toml", "script")
    sealed = design(Mode.SEQUENTIAL, sessions=3, length_ns=6 * 10**9, slot_ns=10**6, steps=64)
    sealed = replace(sealed, workload=replace(sealed.workload, kind=Kind.SCRIPT))
    part = Part.begin(tmp_path / "out", sealed)
    with Stop() as stop, Stage(lambda _folder: mine, identity=owner) as stage:
        if interrupted:
            timer = threading.Timer(8.0, stop.ask)
            timer.start()
            note, _ = run_session(part, 0, stage.arms(sealed, 0), ready_ns=12 * 10**9, stop=stop)
            timer.cancel()
        else:
            note, _ = attempted(part, stage)
    write_statement(tmp_path / "out", owner=owner.signing, created_us=note.began.real_us + 120_000_000)
    found = verify_measurement(tmp_path / "out", owner=owner.public).measurement.main
    last = found.analysis["sessions"][-1]["outcome"]
    assert last == (Outcome.DIED if interrupted else Outcome.COMPLETE).value


@pytest.mark.long
def test_both_arms_are_profiled_in_one_session_and_did_the_same_work(tmp_path: Path) -> None:
    sealed = replace(design(Mode.INTERLEAVED), slot_ns=150 * 10**6)
    with Stop() as stop, Stage(lambda folder: builtin("mlp", folder, device="cpu"), identity=Identity.generate()) as at:
        tries = (profiled.phases(at, sealed, stop, ready_ns=ready_ns) for ready_ns in READY_NS)
        found = next(one for one in tries if one is not None)
    assert found.same
    assert {one.name for one in found.phases} >= {"forward", "backward", "optimizer"}
    # Most of a step has a name, in both arms.
    for arm in ("raw_ns", "protected_ns"):
        assert sum(getattr(one, arm) for one in found.phases) > getattr(found, arm) / 2


def test_a_script_that_takes_no_step_is_told_what_a_step_is(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('no step')\n")
    (tmp_path / "job.toml").write_text(
        'name = "mine"\nworkload = "script"\n[inputs]\n"train.py" = "train.py"\n[params]\nscript = "train.py"\n'
        '[policy]\nassurance = "software"\nprofile = "standard"\n'
    )
    mine = owners(tmp_path / "job.toml", "script")
    with (
        Stop() as stop,
        Stage(lambda _folder: mine, identity=Identity.generate()) as at,
        pytest.raises(UsageError, match="took no step") as refused,
    ):
        alone.calibrated(at, stop, device=False)
    assert "task.progress" in refused.value.hint
