"""How a run ended is what its verified receipt says; without one, nobody can say, and no exit code is 0."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from glasshouse.errors import Code, ExitCode
from glasshouse.jobs.owner.processes import ProcessName
from glasshouse.jobs.results.summary import missing_checks, summary
from glasshouse.jobs.supervise.follow import Seen
from glasshouse.jobs.verify.conclusion import Conclusion, conclude, conclude_again, survivors
from glasshouse.wire.states import Outcome, State
from simulators.owner_side import OwnersWorld


def ended(world: OwnersWorld, tmp_path: Path, **story: object) -> Conclusion:
    folder = world.settle(tmp_path)
    world.tell(folder, world.run(**story))
    return conclude(folder, owner_signing=world.owner.public, agent_exit=0)


@pytest.mark.parametrize(
    ("story", "outcome", "verdict", "code"),
    [
        ({}, Outcome.COMPLETED, "good", ExitCode.DONE),
        ({"outcome": Outcome.FAILED, "code": Code.WORKER_KILLED}, Outcome.FAILED, "not-completed", ExitCode.RUN_FAILED),
        (
            {"outcome": Outcome.INTERRUPTED, "code": Code.INTERRUPTED},
            Outcome.INTERRUPTED,
            "not-completed",
            ExitCode.INTERRUPTED,
        ),
        ({"outcome": Outcome.RESIDUE, "code": Code.RESIDUE_FOUND}, Outcome.RESIDUE, "not-completed", ExitCode.RESIDUE),
        (
            {
                "outcome": Outcome.REFUSED,
                "code": Code.MEASUREMENT_UNKNOWN,
                "attested": False,
                "reach": State.MEASURED,
            },
            Outcome.REFUSED,
            "incomplete",
            ExitCode.REFUSED,
        ),
        # A completed run that nobody countersigned is never reported as good.
        ({"broker_away": True}, Outcome.COMPLETED, "incomplete", ExitCode.INCOMPLETE),
    ],
)
def test_the_receipt_decides(
    tmp_path: Path, story: dict[str, object], outcome: Outcome, verdict: str, code: ExitCode
) -> None:
    conclusion = ended(OwnersWorld(), tmp_path, **story)
    assert (conclusion.outcome, conclusion.verdict, conclusion.exit_code) == (outcome, verdict, code)


@pytest.mark.parametrize(
    ("agent_exit", "outcome", "code"),
    [
        (None, Outcome.LOST, ExitCode.RUN_FAILED),
        (-9, Outcome.LOST, ExitCode.RUN_FAILED),
        (0, Outcome.LOST, ExitCode.RUN_FAILED),
        (2, Outcome.FAILED, ExitCode.RUN_FAILED),
        (3, Outcome.REFUSED, ExitCode.REFUSED),
        (77, Outcome.FAILED, ExitCode.RUN_FAILED),
        (130, Outcome.INTERRUPTED, ExitCode.INTERRUPTED),
    ],
)
def test_without_a_receipt_an_exit_code_proves_nothing(
    tmp_path: Path, agent_exit: int | None, outcome: Outcome, code: ExitCode
) -> None:
    world = OwnersWorld()
    conclusion = conclude(world.settle(tmp_path), owner_signing=world.owner.public, agent_exit=agent_exit)
    assert (conclusion.outcome, conclusion.verdict, conclusion.exit_code) == (outcome, "no-receipt", code)
    assert conclusion.receipt is None
    assert conclusion.problem


def test_a_receipt_by_another_owner_is_believed_in_nothing(tmp_path: Path) -> None:
    world, other = OwnersWorld(), OwnersWorld(name="somebody else")
    folder = world.settle(tmp_path)
    other.tell(folder, other.run())
    conclusion = conclude(folder, owner_signing=world.owner.public, agent_exit=0)
    assert (conclusion.verdict, conclusion.receipt) == ("invalid", None)
    assert conclusion.exit_code is ExitCode.VERIFICATION_FAILED


def test_a_good_receipt_of_another_run_says_nothing_about_this_one(tmp_path: Path) -> None:
    world = OwnersWorld()
    folder = world.settle(tmp_path)
    world.tell(folder, world.run())
    moved = folder.path.rename(folder.path.with_name("f" * 32))
    from glasshouse.jobs.owner.rundir import RunFolder

    conclusion = conclude(RunFolder(moved), owner_signing=world.owner.public, agent_exit=0)
    assert (conclusion.verdict, conclusion.exit_code) == ("invalid", ExitCode.VERIFICATION_FAILED)


def test_a_log_that_was_edited_afterwards_is_noticed(tmp_path: Path) -> None:
    world = OwnersWorld()
    folder = world.settle(tmp_path)
    world.tell(folder, world.run())
    folder.events.write_bytes(folder.events.read_bytes().replace(b'"loss":"0.4"', b'"loss":"0.1"'))
    conclusion = conclude(folder, owner_signing=world.owner.public, agent_exit=0)
    assert (conclusion.verdict, conclusion.code) == ("invalid", Code.LOG_INVALID)


def test_the_summary_has_every_field_that_programs_rely_on(tmp_path: Path) -> None:
    world = OwnersWorld()
    folder = world.settle(tmp_path)
    world.tell(folder, world.run())
    conclusion = conclude(folder, owner_signing=world.owner.public, agent_exit=0)
    found = summary(folder, folder.load(), Seen.of(folder.events), conclusion)
    assert json.loads(json.dumps(found)) == found
    for name in [
        "run_id",
        "state",
        "outcome",
        "attestation",
        "assurance",
        "hardening",
        "package",
        "workload",
        "work",
        "loss",
        "outputs",
        "lifecycle_s",
        "training_imports_s",
        "zeroization",
        "receipt",
    ]:
        assert found[name] is not None, name
    assert found["state"] == "zeroized"
    assert found["package"].keys() == {"id", "manifest_sha256"}
    assert found["work"].keys() == {"unit", "done", "elapsed_s", "rate_per_s", "stop_reason"}
    assert found["loss"] == {"first": 0.8, "final": 0.4}
    assert found["work"]["rate_per_s"] == 1000.0
    assert found["lifecycle_s"].keys() == {"harden", "attest", "release", "open", "seal_outputs", "zeroize", "total"}
    assert {"name", "sha256", "bytes"} <= found["outputs"][0].keys()
    assert {"probe", "result"} <= found["zeroization"][0].keys()


def test_the_summary_of_a_lost_run_claims_nothing(tmp_path: Path) -> None:
    world = OwnersWorld()
    folder = world.settle(tmp_path)
    conclusion = conclude(folder, owner_signing=world.owner.public, agent_exit=-9)
    found = summary(folder, folder.load(), Seen(), conclusion)
    assert found["outcome"] == "lost"
    for name in ("attestation", "assurance", "hardening", "work", "loss"):
        assert found[name] is None
    assert found["outputs"] == found["zeroization"] == []
    assert found["receipt"]["path"] is None


def test_the_checks_that_a_machine_lacks_are_listed(tmp_path: Path) -> None:
    world = OwnersWorld()
    folder = world.settle(tmp_path)
    seen = Seen(
        checks={
            ("agent", "watched"): "passed",
            ("worker", "landlock"): "unavailable",
            ("agent", "no-swap"): "failed",
            ("sentinel", "landlock"): "failed",
        }
    )
    strict = folder.update(profile="strict")
    assert missing_checks(strict, seen) == ["agent.no-swap", "worker.landlock"]
    assert missing_checks(folder.update(profile="standard"), seen) == []


@pytest.mark.parametrize(("outcome", "agent_exit"), [("lost", -9), ("failed", 77), ("interrupted", 130)])
def test_a_second_look_tells_the_same_story_as_the_record(tmp_path: Path, outcome: str, agent_exit: int) -> None:
    """The supervisor's exit code is not the runtime's: a killed runtime was `lost` once and `failed` the next time."""
    world = OwnersWorld()
    folder = world.settle(tmp_path)
    first = conclude(folder, owner_signing=world.owner.public, agent_exit=agent_exit)
    assert first.outcome.value == outcome
    folder.update(agent=ProcessName.of())
    record = folder.end(outcome=outcome, verdict=first.verdict, exit_code=int(first.exit_code))
    again = conclude_again(folder, record, owner_signing=world.owner.public)
    assert (again.outcome, again.exit_code, again.verdict) == (first.outcome, first.exit_code, "no-receipt")
    assert "wip" in again.problem


def test_a_run_that_was_never_placed_lost_nothing(tmp_path: Path) -> None:
    world = OwnersWorld()
    folder = world.settle(tmp_path)
    record = folder.end(outcome="failed", code="platform-unsupported")
    again = conclude_again(folder, record, owner_signing=world.owner.public)
    assert (again.outcome, again.code) == (Outcome.FAILED, Code.PLATFORM)
    assert again.problem == "no runtime was placed, and no key was released"


def test_a_runtime_whose_supervisor_was_killed_before_it_recorded_it_is_looked_for(tmp_path: Path) -> None:
    world = OwnersWorld()
    folder = world.settle(tmp_path)
    wait = "import time; time.sleep(60)"
    runtime = subprocess.Popen([sys.executable, "-X", f"pycache_prefix={folder.scratch}", "-c", wait])
    try:
        record = folder.end(outcome="lost", verdict="no-receipt")
        again = conclude_again(folder, record, owner_signing=world.owner.public)
        assert f"kill -9 {runtime.pid}" in again.problem
    finally:
        runtime.kill()
        runtime.wait()
    folder.out.mkdir(exist_ok=True)
    folder.events.touch()
    again = conclude_again(folder, record, owner_signing=world.owner.public)
    assert "without wiping and without a receipt" in again.problem


def test_a_killed_runtime_is_said_not_to_have_wiped_and_its_folders_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = OwnersWorld()
    folder = world.settle(tmp_path)
    monkeypatch.setattr("glasshouse.runtime.worker.named_directory.left", lambda: [f"{tmp_path}/glasshouse-ws-7-1-ab"])
    monkeypatch.setattr("glasshouse.runtime.worker.named_directory.remove_left", lambda _path: False)
    problem = conclude(folder, owner_signing=world.owner.public, agent_exit=-9).problem
    assert "ended (signal 9) without wiping" in problem
    assert "memory went back to the kernel" in problem
    assert f"may hold cleartext, look at them and remove them: {tmp_path}/glasshouse-ws-7-1-ab" in problem


def test_what_a_killed_runtime_left_in_memory_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = OwnersWorld()
    folder = world.settle(tmp_path)
    left = tmp_path / "glasshouse-ws-7-1-ab"
    (left / "work").mkdir(parents=True)
    (left / "work" / "plain").write_text("the owner's")
    monkeypatch.setattr("glasshouse.runtime.worker.named_directory.left", lambda: [str(left)])
    problem = conclude(folder, owner_signing=world.owner.public, agent_exit=-9).problem
    assert not left.exists()
    assert problem.endswith("its workspace, which had a name, was removed")


def test_a_lost_run_looks_for_its_processes_before_it_says_that_its_memory_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glasshouse.jobs.verify.conclusion._PATIENCE_S", 0.0)
    world = OwnersWorld()
    folder = world.settle(tmp_path)
    command = [sys.executable, "-I", "-X", f"pycache_prefix={folder.scratch}", "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()  # for a moment after its start the kernel shows no command line of it
        found = conclude(folder, owner_signing=world.owner.public, agent_exit=-9)
        assert survivors(folder.scratch, folder.out, patience_s=0) == [worker.pid]
        worker.kill()
    assert f"still run, and may hold keys and cleartext; end them with: kill -9 {worker.pid};" in found.problem
    assert "went back to the kernel" not in found.problem
    found = conclude(folder, owner_signing=world.owner.public, agent_exit=-9)
    assert "none of its processes is left, and its memory went back to the kernel" in found.problem


def test_a_system_that_lists_no_processes_is_not_taken_for_one_without_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert survivors(tmp_path, tmp_path, processes=tmp_path / "absent") is None
    monkeypatch.setattr("glasshouse.jobs.verify.conclusion.survivors", lambda _scratch, _out: None)
    world = OwnersWorld()
    found = conclude(world.settle(tmp_path), owner_signing=world.owner.public, agent_exit=None)
    assert "cannot be seen here" in found.problem
