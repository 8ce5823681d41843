"""The whole story as a user types it: init, run, status, logs, fetch, verify, artifact; and what may not be seen."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from glasshouse.errors import ExitCode
from simulators.command_line import CANARY, Answer, Shell

RESULT = f"500 rows, {CANARY},499".encode()
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    made = Shell(tmp_path_factory.mktemp("user"))
    assert made.ask("init").code == 0
    made.job("quick", "5")
    yield made
    assert made.left_running() == []


@pytest.fixture(scope="module")
def finished(shell: Shell) -> Answer:
    """One completed run, for people; the stories below ask about it."""
    return shell.ask("run", "quick.toml")


@pytest.mark.smoke
def test_a_run_is_told_to_people_step_by_step(finished: Answer) -> None:
    assert (finished.code, finished.err) == (ExitCode.DONE, "")
    steps = ("packed", "prepared", "hardened", "measured", "attested", "released", "opened", "trained", "zeroized")
    places = [finished.out.index(f"✓ {step}") for step in steps]
    assert places == sorted(places)
    for said in (
        "completed, at assurance software",
        "result.txt",
        "5 steps",
        "genuine and complete",
        "glasshouse fetch",
    ):
        assert said in finished.out


def test_the_terminal_and_the_run_folder_show_neither_data_nor_names(shell: Shell, finished: Answer) -> None:
    run = shell.newest()
    assert run is not None
    folder = shell.home / "runs" / run["run_id"]
    assert CANARY not in finished.out + finished.err
    kept = [path for path in folder.rglob("*") if path.is_file()]
    assert len(kept) > 5
    for path in kept:
        data = path.read_bytes()
        for secret in (CANARY.encode(), RESULT, b"rows.csv", b"train.py", b"result.txt"):
            assert secret not in data, f"{secret!r} in {path.name}"
        assert stat.S_IMODE(path.stat().st_mode) & 0o177 == 0, path
    for path in (folder, folder / "out", folder / "out" / "outputs"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_status_names_the_run_and_its_verdict(shell: Shell, finished: Answer) -> None:
    begins = finished.out.split("\nRun ", 1)[1][:8]
    run_id = next(one["run_id"] for one in shell.ask("status", "--json").object["runs"] if one["run_id"][:8] == begins)
    (run,) = (one for one in shell.ask("status", "--json").object["runs"] if one["run_id"] == run_id)
    assert (run["name"], run["outcome"], run["verdict"], run["phase"]) == ("ward-seven", "completed", "good", "ended")
    one = shell.ask("status", run_id, "--json").object
    assert (one["outcome"], one["receipt"]["verdict"]) == ("completed", "good")
    assert one["outputs"][0]["name"] == "result.txt"
    assert "completed" in shell.ask("status").out


def test_the_owner_reads_the_log_and_fetches_the_outputs(shell: Shell, finished: Answer) -> None:
    logs = shell.ask("logs")
    assert (logs.code, logs.out) == (0, f"the first row is {CANARY},0\n")
    assert CANARY in shell.ask("logs", "latest", "--json").object["segments"][0]["text"]
    fetched = shell.ask("fetch", "latest", "-o", "out", "--json").object
    (output,) = fetched["outputs"]
    assert (shell.folder / "out" / "result.txt").read_bytes() == RESULT
    assert (output["name"], output["sha256"]) == ("result.txt", hashlib.sha256(RESULT).hexdigest())
    again = shell.ask("fetch", "latest", "-o", "out", "--json")
    assert (again.code, again.error["code"]) == (ExitCode.USAGE, "usage")
    assert shell.ask("fetch", "latest", "-o", "out", "--force").code == 0


def test_the_receipt_is_verified_offline_and_an_altered_one_is_not(shell: Shell, finished: Answer) -> None:
    good = shell.ask("verify", "latest", "--json")
    assert (good.code, good.object["status"], good.object["assurance"]) == (ExitCode.DONE, "good", "software")
    receipt = Path(good.object["path"])
    alone = shell.folder / "alone"
    alone.mkdir()
    data = receipt.read_bytes()
    (alone / "receipt.json").write_bytes(data)
    (alone / "altered.json").write_bytes(data.replace(b'"keyid":"', b'"keyid":"0', 1))
    (alone / "cut.json").write_bytes(data[:-40])
    (alone / "owner.pub").write_bytes((shell.home / "owner.pub").read_bytes())
    nowhere = ("--home", str(alone / "no-home"), "--json")
    by_owner = ("--owner", str(alone / "owner.pub"), *nowhere)
    assert shell.ask("verify", str(alone / "receipt.json"), *by_owner).code == ExitCode.DONE
    for name in ("altered.json", "cut.json"):
        assert shell.ask("verify", str(alone / name), *by_owner).code == ExitCode.VERIFICATION_FAILED
    unknown = shell.ask("verify", str(alone / "receipt.json"), *nowhere)
    assert (unknown.code, unknown.error["code"]) == (ExitCode.USAGE, "identity")


def test_another_owner_is_told_that_it_is_not_theirs(shell: Shell, finished: Answer, tmp_path: Path) -> None:
    assert shell.ask("init", "--home", str(tmp_path / "other")).code == 0
    refused = shell.ask("verify", "latest", "--owner", str(tmp_path / "other" / "owner.pub"), "--json")
    assert (refused.code, refused.error["code"]) == (ExitCode.VERIFICATION_FAILED, "owner-mismatch")


def test_the_artifact_can_be_shown_to_anyone(shell: Shell, finished: Answer) -> None:
    made = shell.ask("artifact", "latest", "-o", "artifact.json", "--json")
    assert made.code == ExitCode.DONE, made.out
    data = (shell.folder / "artifact.json").read_bytes()
    for secret in (CANARY, "ward-seven", "rows.csv", "train.py", "result.txt", str(shell.folder)):
        assert secret.encode() not in data
    alone = shell.ask("verify", "artifact.json", "--json").object
    assert (alone["kind"], alone["bundle"]) == ("artifact", None)
    run = shell.newest()
    assert run is not None
    receipt = str(shell.home / "runs" / run["run_id"] / "out" / "receipt.json")
    both = shell.ask("verify", "artifact.json", "--bundle", receipt)
    assert both.code == ExitCode.DONE
    for said in ("every field is what the bundle", "to others it is the owner's word", "dates", "probes", "work"):
        assert said in both.out
    misused = shell.ask("verify", receipt, "--bundle", receipt, "--json")
    assert (misused.code, misused.error["code"]) == (ExitCode.USAGE, "usage")
    none = shell.ask("artifact", "latest", "-o", "revealed.json", "--reveal-weights", "--json")
    assert (none.code, none.error["code"]) == (ExitCode.USAGE, "usage"), "a run without weights has none to reveal"


def test_a_sealed_package_runs_its_json_is_one_object_with_everything_promised_and_it_is_revoked(shell: Shell) -> None:
    sealed = shell.ask("seal", "quick.toml", "-o", "job.sealed", "--json").object
    assert CANARY.encode() not in (shell.folder / "job.sealed").read_bytes()
    shown = shell.ask("inspect", "job.sealed", "--json").object
    assert (shown["signature"], shown["package"]) == ("valid", sealed["package"])
    assert shell.ask("verify", "job.sealed", "--content", "--json").object["assets"] == 2
    answer = shell.ask("run", "job.sealed", "--json")
    assert (answer.code, answer.err) == (ExitCode.DONE, "")
    found = answer.object
    assert found["package"] == sealed["package"]
    for name in (
        *("run_id", "state", "outcome", "attestation", "assurance", "hardening", "package", "workload", "work"),
        *("loss", "outputs", "lifecycle_s", "training_imports_s", "zeroization", "receipt"),
    ):
        assert found[name] is not None, name
    assert (found["state"], found["outcome"], found["assurance"]) == ("zeroized", "completed", "software")
    assert found["attestation"]["ear_status"] == "warning", "software evidence is never better than that"
    assert found["work"]["done"] == 5
    assert [(one["name"], one["bytes"]) for one in found["outputs"]] == [("result.txt", len(RESULT))]
    assert found["outputs"][0]["sha256"] == hashlib.sha256(RESULT).hexdigest()
    assert {probe["result"] for probe in found["zeroization"]} <= {"clean", "unverifiable"}
    assert found["lifecycle_s"]["total"] > 0
    assert shell.ask("revoke", "job.sealed", "--json").object["revoked"] is True
    before = shell.known()
    refused = shell.ask("run", "job.sealed", "--json")
    assert (refused.code, refused.error["code"]) == (ExitCode.USAGE, "package-revoked")
    assert shell.known() == before, "a run that never began leaves no folder"


def test_the_raw_leg_gives_the_same_result_and_is_called_unprotected(shell: Shell) -> None:
    answer = shell.ask("run", "quick.toml", "--raw", "--json")
    assert answer.code == ExitCode.DONE
    found = answer.object
    assert (found["protected"], found["assurance"], found["outcome"]) == (False, None, "completed")
    assert "UNPROTECTED" in found["label"]
    assert found["outputs"][0]["sha256"] == hashlib.sha256(RESULT).hexdigest()
    assert (Path(found["files"]) / "result.txt").read_bytes() == RESULT
    assert "UNPROTECTED" in shell.ask("run", "quick.toml", "--raw").out


def test_a_script_that_fails_is_a_failed_run_with_its_words_sealed(shell: Shell) -> None:
    shell.job("failing", "5", f"it broke on {CANARY}")
    answer = shell.ask("run", "failing.toml", "--json")
    assert answer.code == ExitCode.RUN_FAILED
    assert (answer.object["outcome"], answer.object["code"]) == ("failed", "script-failed")
    assert answer.object["receipt"]["verdict"] == "not-completed"
    assert CANARY not in answer.out + answer.err
    assert f"it broke on {CANARY}" in shell.ask("logs").out
    assert shell.ask("verify", "latest").code == ExitCode.RUN_FAILED


def test_work_outside_of_the_output_folders_is_named_to_the_owner_and_to_nobody_else(shell: Shell) -> None:
    (shell.folder / "losing.py").write_text(
        "open('outputs/kept', 'w').write('x')\nopen('lost-4711.pt', 'w').write('model')"
    )
    job = (shell.folder / "quick.toml").read_text().replace('"train.py"', '"losing.py"')
    (shell.folder / "losing.toml").write_text(job)
    answer = shell.ask("run", "losing.toml")
    assert answer.code == ExitCode.DONE
    assert "1 file, 5 B, written outside of the job's output folders" in answer.out
    assert "lost-4711.pt" in answer.out
    found = shell.ask("status", "latest", "--json").object
    assert found["uncollected"] == {"files": 1, "bytes": 5, "named": ["lost-4711.pt"], "links": []}
    assert "lost-4711.pt" in shell.ask("logs").out
    folder = shell.home / "runs" / found["run_id"]
    assert not [path for path in folder.rglob("*") if path.is_file() and b"lost-4711" in path.read_bytes()]


def test_an_encrypted_identity_runs_and_its_passphrase_is_in_no_process(tmp_path: Path) -> None:
    shell, passphrase = Shell(tmp_path), "correct horse battery staple"
    (tmp_path / "passphrase").write_text(passphrase)
    (tmp_path / "passphrase").chmod(0o600)
    file = ("--passphrase-file", "passphrase")
    assert shell.ask("init", *file).code == 0
    shell.job("slow", "24")
    refused = shell.ask("run", "slow.toml", "--json")
    assert (refused.code, refused.error["code"]) == (ExitCode.USAGE, "identity")
    running = shell.start("run", "slow.toml", "--json", *file)
    shell.wait_until_running()
    seen = 0
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            try:
                data = (process / name).read_bytes()
            except OSError:
                continue
            seen += str(tmp_path).encode() in data
            assert passphrase.encode() not in data
    assert seen >= 3, "command, broker, runtime and worker were looked at"
    answer = shell.end(running)
    assert answer.object["outcome"] == "completed"
    assert answer.object["outputs"][0]["name"] == "result.txt"
    for path in shell.home.rglob("*"):
        if path.is_file():
            assert passphrase.encode() not in path.read_bytes()
    assert shell.left_running() == []


@pytest.mark.parametrize(
    ("before", "after", "code", "key"),
    [
        ('workload = "script"', 'wrkload = "script"', "job-invalid", "workload"),
        ('assurance = "software"', 'assurance = "gpu-tee"', "chain-missing", "policy.assurance"),
        ('"rows.csv" = "rows.csv"', '"rows.csv" = "absent.csv"', "file-missing", "rows.csv"),
        ('"rows.csv" = "rows.csv"', '"rows.csv" = "/etc/passwd"', "job-invalid", "rows.csv"),
        ('script = "train.py"', "script = 7", "job-invalid", "params.script"),
    ],
)
def test_a_bad_job_file_is_refused_before_anything_starts(
    shell: Shell, before: str, after: str, code: str, key: str
) -> None:
    known, text = shell.known(), shell.job("bad", "5").read_text()
    assert before in text
    (shell.folder / "bad.toml").write_text(text.replace(before, after))
    answer = shell.ask("run", "bad.toml", "--json")
    assert (answer.code, answer.error["code"]) == (ExitCode.USAGE, code)
    assert key in answer.error["message"]
    assert shell.known() == known


def test_a_package_that_was_tampered_with_is_not_run(shell: Shell) -> None:
    shell.ask("seal", "quick.toml", "-o", "flipped.sealed", "--force")
    path = shell.folder / "flipped.sealed"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    answer = shell.ask("run", "flipped.sealed", "--json")
    # Its public part is whole: the key is released, and the worker refuses the chunk that does not open.
    assert answer.code == ExitCode.RUN_FAILED
    assert (answer.object["outcome"], answer.object["outputs"]) == ("failed", [])
    for cut in (100, 10):
        path.write_bytes(data[:-cut])
        refused = shell.ask("run", "flipped.sealed", "--json")
        assert (refused.code, refused.error["code"]) == (ExitCode.VERIFICATION_FAILED, "package-truncated")
    path.write_bytes(b"not a package")
    assert shell.ask("inspect", "flipped.sealed", "--json").error["code"] == "package-not-recognised"


def test_tamper_and_doctor_speak_json(shell: Shell) -> None:
    stories = shell.ask("tamper", "--json")
    assert (stories.code, stories.object["held"]) == (ExitCode.DONE, True)
    assert len(stories.object["stories"]) == 41
    findings = shell.ask("doctor", "--json").object
    assert findings["assurance"] == "software"
    assert any(finding["feature"] == "host-sees-memory" for finding in findings["findings"])
    assert json.dumps(findings)


@pytest.mark.parametrize("kind", ["lora", "mlp", "script"])
def test_a_new_job_file_runs_as_it_is(shell: Shell, kind: str) -> None:
    (shell.folder / "new").mkdir(exist_ok=True)
    assert shell.ask("new", kind, "-o", f"new/{kind}.toml").code == ExitCode.DONE
    ran = shell.ask("run", f"new/{kind}.toml", "--json", timeout_s=300).object
    assert (ran["outcome"], ran["uncollected"]) == ("completed", None)
    assert ran["outputs"]
