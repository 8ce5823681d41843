"""An owner with a gate that stays: added, run against, revoked at; and gone and back in the middle of a run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import Code, ExitCode
from glasshouse.providers.serve.runs import Runs
from simulators.command_line import SCRIPT, Answer, Shell
from simulators.line_user import add_checkpoints, kill_runtime, wait_for_checkpoint
from tools.ports import free_port
from tools.sshd import needs_sshd, serving_ssh
from tools.waiting import wait_for

pytestmark = pytest.mark.slow


@dataclass
class Keeper:
    """Who runs the gate: another user, with a home of their own.

    Attributes:
        told: what the gate says of itself.
    """

    shell: Shell
    port: int
    owner: Path
    told: dict[str, Any]
    process: subprocess.Popen[str] | None = None

    @property
    def store(self) -> Path:
        return self.shell.folder / "store"

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def start(self) -> None:
        where = ("--bind", f"127.0.0.1:{self.port}", "--advertise", self.url)
        keeps = ("--store", str(self.store), "--store-limit", "1")
        self.process = self.shell.start("broker", "serve", *where, "--owner", str(self.owner), *keeps, "--json")
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()
        self.told = json.loads(line)

    def stop(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(20) == 0
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    folder = tmp_path_factory.mktemp("owner")
    made = Shell(folder)
    assert made.ask("init").code == 0
    made.job("short", "24")
    for name in ("long", "longer"):
        job = made.job(name, "1200")
        job.write_text(job.read_text() + 'lease = "6s"\n')
    yield made
    assert made.left_running() == []


@pytest.fixture(scope="module")
def keeper(shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keeper]:
    folder = tmp_path_factory.mktemp("gate")
    made = Keeper(Shell(folder), free_port(), shell.home / "owner.pub", {})
    made.start()
    pinned = ("--key", made.told["key"], "--certificate", made.told["certificate"])
    added = shell.ask("gate", "add", "small", made.url, *pinned)
    assert added.code == 0, added.err
    yield made
    made.stop()


@pytest.fixture(scope="module")
def ended(shell: Shell, keeper: Keeper) -> Answer:
    """A run whose gate stays."""
    serving = shell.home / "broker" / "serving.json"
    before = serving.read_bytes() if serving.exists() else None
    answer = shell.ask("run", "short.toml", "--gate", "small", "--json")
    assert (serving.read_bytes() if serving.exists() else None) == before, "no broker was started here"
    return answer


def test_another_gate_than_the_one_that_is_pinned_is_not_added(shell: Shell, keeper: Keeper) -> None:
    for key, certificate in (("00" * 32, keeper.told["certificate"]), (keeper.told["key"], "00" * 32)):
        pinned = ("--key", key, "--certificate", certificate)
        refused = shell.ask("gate", "add", "other", keeper.url, *pinned, "--json")
        assert (refused.code, refused.error["code"]) == (ExitCode.UNREACHABLE, Code.BROKER_UNTRUSTED)
    assert [one["name"] for one in shell.ask("gate", "list", "--json").object["gates"]] == ["small"]


def test_a_run_whose_gate_stays_ends_as_any_other(shell: Shell, ended: Answer) -> None:
    assert ended.code == ExitCode.DONE, ended.err
    assert (ended.object["outcome"], ended.object["receipt"]["verdict"]) == ("completed", "good")
    run = ended.object["run_id"]
    assert shell.ask("verify", run).code == ExitCode.DONE
    assert shell.ask("fetch", run, "-o", "outputs").code == ExitCode.DONE


def test_a_detached_run_that_is_lost_goes_on_at_its_gate(shell: Shell, keeper: Keeper) -> None:
    known = shell.known()
    add_checkpoints(shell, shell.job("kept", "60"))
    placed = shell.ask("run", "kept.toml", "--gate", "small", "--detach", "--json").object
    (shell.folder / "train.py").write_text(SCRIPT)  # of the other stories; this one has sealed its own
    run = str(shell.wait_until_running(known)["run_id"])
    wait_for_checkpoint(shell, run)
    kill_runtime(shell, run)
    assert shell.ask("attach", placed["run_id"], "--json").object["outcome"] == "lost"
    again = shell.ask("resume", run, "--detach", "--json")
    assert again.code == ExitCode.DONE, again.err
    ended = shell.ask("attach", again.object["run_id"], "--json")
    assert ended.code == ExitCode.DONE, ended.out + ended.err
    assert [leg["outcome"] for leg in ended.object["line"]["legs"]] == ["lost", "completed"]
    # Its supervisor had no key of the owner's to ask the gate with what became of the first machine; who fetches has.
    assert "glasshouse fetch RUN" in shell.ask("verify", ended.object["run_id"]).err
    assert shell.ask("fetch", ended.object["run_id"], "-o", "kept").code == ExitCode.DONE
    verified = shell.ask("verify", ended.object["run_id"], "--json")
    assert (verified.code, verified.object["not_wiped"]) == (ExitCode.DONE, [1]), verified.out


def test_a_gate_that_restarts_in_the_middle_of_a_run_is_found_again(shell: Shell, keeper: Keeper) -> None:
    shell.job("middle", "160")
    known = shell.known()
    placed = shell.ask("run", "middle.toml", "--gate", "small", "--detach", "--json").object
    shell.wait_until_running(known)
    keeper.stop()
    keeper.start()
    ended = shell.ask("attach", placed["run_id"], "--json")
    assert (ended.code, ended.object["receipt"]["verdict"]) == (ExitCode.DONE, "good"), ended.err


def test_runs_of_a_revoked_package_end_within_their_lease(shell: Shell, keeper: Keeper) -> None:
    known = shell.known()
    job = shell.folder / "long.toml"
    job.write_text(f'gate = "{keeper.url}"\n' + job.read_text())
    placed = shell.ask("run", "long.toml", "--detach", "--json").object
    shell.wait_until_running(known)
    # Without a word of the gate: it is remembered who has the key.
    revoked = shell.ask("revoke", placed["run_id"], "--running", "--json")
    assert revoked.code == ExitCode.DONE, revoked.err
    assert revoked.object["gates"] == ["small"], "what is kept of a URL is the gate's name"
    assert revoked.object["runs_with_the_key"] == [placed["run_id"]]
    wait_for(lambda: shell.ask("status", placed["run_id"], "--json").object["outcome"] is not None)
    found = shell.ask("status", placed["run_id"], "--json").object
    assert found["code"] == Code.LEASE_LOST
    assert found["outcome"] != "completed"


def test_a_url_that_was_not_added_is_refused_before_anything_is_sealed(shell: Shell, keeper: Keeper) -> None:
    known = shell.known()
    for command in (("run", "short.toml"), ("broker", "audit")):
        refused = shell.ask(*command, "--gate", "https://gate.example:8443", "--json")
        assert (refused.code, refused.error["code"]) == (ExitCode.USAGE, Code.USAGE)
        assert "its key has to be pinned" in refused.error["message"]
    assert shell.known() == known


@pytest.mark.usefixtures("ended")
def test_the_audit_log_of_a_gate_is_checked_and_remembered(shell: Shell, keeper: Keeper) -> None:
    first = shell.ask("broker", "audit", "--gate", "small", "--json")
    assert first.code == ExitCode.DONE, first.err
    events = [record["event"] for record in first.object["records"]]
    assert events[:4] == ["delegation", "deployment", "launch", "challenge"]
    [kept] = shell.ask("gate", "list", "--json").object["gates"]
    assert kept["audited"]["records"] == len(events)
    assert shell.ask("broker", "audit", "--gate", keeper.url, "--json").object["gate"] == "small"
    # A gate that moves is still held to what it showed; one that shows another log is not believed.
    pinned = ("--key", keeper.told["key"], "--certificate", keeper.told["certificate"])
    assert shell.ask("gate", "add", "small", keeper.url, *pinned, "--force").code == ExitCode.DONE
    gates = shell.home / "gates.json"
    listed = gates.read_text()
    assert f'"records": {len(events)}' in listed or f'"records":{len(events)}' in listed
    gates.write_text(listed.replace(kept["audited"]["sha256"], "00" * 32))
    refused = shell.ask("broker", "audit", "--gate", "small", "--json")
    assert (refused.code, refused.error["code"]) == (ExitCode.VERIFICATION_FAILED, Code.LOG_INVALID)
    refused = shell.ask("run", "short.toml", "--gate", "small", "--json")
    assert (refused.code, refused.error["code"]) == (ExitCode.VERIFICATION_FAILED, Code.LOG_INVALID)
    gates.write_text(listed)
    assert len(keeper.shell.ask("broker", "audit", "--json").object["records"]) == len(events), "it was given no key"
    whole = keeper.shell.ask("broker", "audit", "--json")
    assert whole.code == ExitCode.DONE, whole.err
    assert len(whole.object["records"]) == len(events), "there is one owner"


@needs_sshd
def test_a_run_elsewhere_needs_nothing_of_its_owner_once_it_is_placed(
    shell: Shell, keeper: Keeper, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("two")
    there = folder / "there"
    with serving_ssh(folder / "ssh") as host:
        ways = ("--python", sys.executable, "--config", str(host.options[1]), "--folder", str(there))
        url = f"ssh://{host.host}:{host.port}"
        assert shell.ask("machine", "add", "lab", url, *ways).code == 0
        job = shell.job("away", "300")
        job.write_text(job.read_text() + 'lease = "6s"\n')
        known = shell.known()
        placed = shell.ask("run", "away.toml", "--on", "lab", "--gate", "small", "--detach", "--json").object
        run = shell.wait_until_running(known)
        os.kill(run["supervisor"]["pid"], signal.SIGKILL)
        wait_for(lambda: shell.ask("status", placed["run_id"], "--json").object["phase"] == "unattended")
        # It trains for longer than its lease, and ends by itself, with nobody of its owner's there.
        [left] = [one for name, one in Runs(there / "runs") if name == placed["run_id"]]
        wait_for(lambda: left.ended() is not None)
        assert left.ended() == 0
        ended = shell.ask("attach", placed["run_id"], "--json")
        assert (ended.code, ended.object["outcome"], ended.object["receipt"]["verdict"]) == (0, "completed", "good")
        assert shell.ask("fetch", placed["run_id"], "-o", "away").code == ExitCode.DONE
        assert [name for name, _ in Runs(there / "runs")] == []
        assert list(there.glob("**/sockets/*")) == []


@needs_sshd
def test_what_a_run_left_is_fetched_from_its_gate_when_its_machine_is_gone(
    shell: Shell, keeper: Keeper, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("three")
    there = folder / "there"
    with serving_ssh(folder / "ssh") as host:
        ways = ("--python", sys.executable, "--config", str(host.options[1]), "--folder", str(there))
        assert shell.ask("machine", "add", "rented", f"ssh://{host.host}:{host.port}", *ways).code == 0
        shell.job("left", "40")
        known = shell.known()
        placed = shell.ask("run", "left.toml", "--on", "rented", "--gate", "small", "--detach", "--json").object
        run = shell.wait_until_running(known)
        os.kill(run["supervisor"]["pid"], signal.SIGKILL)
        early = shell.ask("fetch", placed["run_id"], "-o", "early", "--from-gate", "--json")
        assert (early.code, early.error["code"]) == (ExitCode.USAGE, Code.FILE_MISSING), "it has no receipt yet"
        assert not (shell.home / "runs" / placed["run_id"] / "out" / "receipt.json").exists()
        stored = keeper.store / placed["run_id"]
        wait_for(lambda: (stored / "receipt.json").exists() and (stored / "outputs-0000.sealed").exists())
        wait_for(lambda: not _sends(there, placed["run_id"]))
    shutil.rmtree(there)
    sealed = stored / "outputs-0000.sealed"
    genuine = sealed.read_bytes()
    sealed.write_bytes(bytes(len(genuine)))
    lied = shell.ask("fetch", placed["run_id"], "-o", "lied", "--json")
    assert (lied.code, lied.error["code"]) == (ExitCode.VERIFICATION_FAILED, Code.OUTPUT_TAMPERED)
    assert not (shell.home / "runs" / placed["run_id"] / "out" / "receipt.json").exists(), "nothing was taken"
    sealed.write_bytes(genuine)
    kept = b"".join(path.read_bytes() for path in stored.iterdir())
    (shell.folder / "taken").write_text("a file, and no folder")
    assert shell.ask("fetch", placed["run_id"], "-o", "taken", "--json").code != ExitCode.DONE
    here = shell.home / "runs" / placed["run_id"] / "out" / "outputs" / "0000.sealed"
    here.unlink()  # lost, while the receipt is here
    fetched = shell.ask("fetch", placed["run_id"], "-o", "left", "--json")
    assert fetched.code == ExitCode.DONE, fetched.err
    assert fetched.object["verdict"] == "good"
    assert fetched.object["outputs"]
    for one in fetched.object["outputs"]:
        content = Path(one["path"]) if Path(one["path"]).is_absolute() else shell.folder / one["path"]
        assert content.read_bytes()[:64] not in kept, "the gate has it sealed"
    verified = shell.ask("verify", placed["run_id"], "--json")
    assert verified.code == ExitCode.DONE, verified.err
    ended = shell.ask("status", placed["run_id"], "--json").object
    assert (ended["outcome"], ended["receipt"]["verdict"]) == ("completed", "good")
    assert shell.ask("logs", placed["run_id"]).code == ExitCode.DONE
    wait_for(lambda: not stored.exists(), within_s=10)
    assert shell.ask("fetch", placed["run_id"], "-o", "again").code == ExitCode.DONE, "it is here now"


def _sends(there: Path, run_id: str) -> bool:
    """Whether the process that sends what a run leaves goes on."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"glasshouse.providers.serve.storing" in words and str(there / "runs" / run_id).encode() in words:
                return True
    return False


def test_an_owner_whom_the_gate_does_not_know_runs_nothing_there(
    keeper: Keeper, tmp_path_factory: pytest.TempPathFactory
) -> None:
    stranger = Shell(tmp_path_factory.mktemp("stranger"))
    assert stranger.ask("init").code == 0
    stranger.job("short", "1")
    pinned = ("--key", keeper.told["key"], "--certificate", keeper.told["certificate"])
    assert stranger.ask("gate", "add", "small", keeper.url, *pinned).code == 0
    refused = stranger.ask("run", "short.toml", "--gate", "small", "--json")
    assert (refused.code, refused.error["code"]) == (ExitCode.REFUSED, Code.OWNER_REQUEST)


def test_a_gate_says_what_it_lacks_before_it_starts(shell: Shell) -> None:
    for arguments in (
        ("--bind", "127.0.0.1:0"),
        ("--bind", "127.0.0.1:0", "--advertise", "https://gate.example:1"),
        ("--advertise", "https://gate.example:1"),
        ("--bind", "127.0.0.1:0", "--advertise", "http://gate.example:1", "--owner", str(shell.home / "owner.pub")),
        (
            *("--bind", "0.0.0.0:0", "--advertise", "https://gate.example:1"),
            *("--owner", str(shell.home / "owner.pub"), "--behind-proxy"),
        ),
        ("--store", str(shell.folder / "store")),
        ("--store-limit", "1"),
    ):
        assert shell.ask("broker", "serve", *arguments).code == ExitCode.USAGE
