"""How a run ended is what its verified receipt says; without one, nobody can say, and no exit code is 0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glasshouse.errors import Code, ExitCode
from glasshouse.jobs.finish import Conclusion, conclude
from glasshouse.jobs.follow import Seen
from glasshouse.jobs.summary import missing_checks, summary
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
    from glasshouse.jobs.rundir import RunFolder

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
