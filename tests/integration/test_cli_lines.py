"""A user whose machines are lost: a run goes on, is moved and goes back, and all of its machines are accounted for."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from glasshouse.errors import ExitCode
from glasshouse.providers.serve.keepers import KEEPER
from simulators.command_line import Shell
from simulators.line_user import add_checkpoints, kill_runtime, wait_for_checkpoint
from tools.sshd import needs_sshd, serving_ssh

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    folder = tmp_path_factory.mktemp("lines")
    (folder / "user").mkdir()
    made = Shell(folder / "user")
    assert made.ask("init").code == 0
    add_checkpoints(made, made.job("long", "1200"))
    add_checkpoints(made, made.job("short", "60"))
    add_checkpoints(made, made.job("kept", "60"), retries=1)
    # Does not complete while a command that is to stop it starts on a busy machine.
    add_checkpoints(made, made.job("moved", "300"))
    yield made
    assert made.left_running() == []


def lost(shell: Shell, job: str = "short") -> str:
    """Have a run counted once, and killed; return its id."""
    before = shell.known()
    running = shell.start("run", f"{job}.toml", "--json")
    run = str(shell.wait_until_running(before)["run_id"])
    wait_for_checkpoint(shell, run)
    kill_runtime(shell, run)
    ended = shell.end(running)
    assert ended.object["outcome"] == "lost", ended.object
    return run


def test_a_run_whose_machine_was_lost_goes_on_and_both_machines_are_accounted_for(shell: Shell, tmp_path: Path) -> None:
    first = lost(shell)
    resumed = shell.ask("resume", "latest", "--json")
    assert resumed.code == ExitCode.DONE, resumed.out + resumed.err
    told = resumed.object
    assert (told["outcome"], told["line"]["leg"], told["line"]["before"]) == ("completed", 2, first)
    assert [(leg["leg"], leg["outcome"], leg["wiping_shown"]) for leg in told["line"]["legs"]] == [
        (1, "lost", False),
        (2, "completed", True),
    ]
    second = told["run_id"]
    assert shell.ask("fetch", second, "-o", str(tmp_path / "out")).code == ExitCode.DONE
    begun, steps = map(int, (tmp_path / "out" / "result.txt").read_text().split())
    assert begun >= 1
    assert steps == 60
    assert "begun at 0" not in shell.ask("logs", second).out

    verified = shell.ask("verify", second)
    assert verified.code == ExitCode.DONE, verified.out + verified.err
    assert "2 legs (assurance software): the training completed in the last" in verified.out
    assert "its wiping is NOT SHOWN" in verified.out
    assert "its wiping is not shown" in shell.ask("status", second).out
    assert f"it went on as {second[:8]}" in shell.ask("status", first).out
    # The file of the line says the same to who has no more than that, and the owner's public key.
    assert shell.ask("export", second, "-o", str(tmp_path / "export"), "--pem").code == ExitCode.DONE
    shutil.copy(shell.home / "owner.pub", tmp_path)
    offline = shell.ask(
        *("verify", str(tmp_path / "export" / "line.json"), "--owner", str(tmp_path / "owner.pub")),
        *("--home", str(tmp_path / "elsewhere"), "--json"),
    )
    assert offline.code == ExitCode.DONE, offline.out + offline.err
    assert (offline.object["kind"], offline.object["not_wiped"]) == ("line", [1])
    # There is nothing to go on with any more.
    assert "has completed" in shell.ask("resume", second).err
    assert shell.ask("verify", first).code != ExitCode.DONE


def test_a_lost_machine_is_replaced_as_often_as_the_job_allows_and_not_silently(shell: Shell) -> None:
    before = shell.known()
    running = shell.start("run", "kept.toml")
    run = str(shell.wait_until_running(before)["run_id"])
    wait_for_checkpoint(shell, run)
    kill_runtime(shell, run)
    ended = shell.end(running)
    assert ended.code == ExitCode.DONE, ended.out + ended.err
    assert "local is lost; 0 more may be replaced; leg 2 goes on from checkpoint 1, at local" in ended.out
    assert "leg 1: local, from the beginning" in ended.out
    assert shell.ask("verify", "latest").code == ExitCode.DONE


def test_a_run_goes_back_to_an_older_checkpoint_by_its_owners_order(shell: Shell) -> None:
    first = lost(shell, "long")
    before = shell.known()
    running = shell.start("resume", first, "--json")
    second = str(shell.wait_until_running(before)["run_id"])
    wait_for_checkpoint(shell, second)
    busy = shell.ask("rewind", first, "--to", "1", "--json")
    assert (busy.code, busy.error["code"]) == (ExitCode.USAGE, "line-busy")
    kill_runtime(shell, second)
    assert shell.end(running).object["outcome"] == "lost"
    unknown = shell.ask("rewind", first, "--to", "7", "--json")
    assert (unknown.code, unknown.error["code"]) == (ExitCode.USAGE, "checkpoint-stale")
    before = shell.known()
    running = shell.start("rewind", first, "--to", "1", "--json")
    third = str(shell.wait_until_running(before)["run_id"])
    assert shell.ask("stop", third).code == ExitCode.DONE
    assert shell.end(running).object["outcome"] == "interrupted"
    verified = shell.ask("verify", third)
    assert verified.code == ExitCode.INTERRUPTED, verified.out + verified.err
    assert "from checkpoint 1 (step 1), an older one by its owner's order" in verified.out


@contextmanager
def serving_machines(shell: Shell, folder: Path, *names: str) -> Iterator[None]:
    """Serve machines of the user's behind one sshd, each with a folder of its own."""
    with serving_ssh(folder / "ssh") as host:
        url, ways = f"ssh://{host.host}:{host.port}", ("--config", str(folder / "ssh" / "client"), "--force")
        for name in names:
            there = ("--python", sys.executable, "--folder", str(folder / name))
            added = shell.ask("machine", "add", name, url, *ways, *there)
            assert added.code == ExitCode.DONE, added.err
        yield


@needs_sshd
def test_a_run_whose_runtime_is_killed_at_one_machine_goes_on_at_another_by_its_owners_word(
    shell: Shell, tmp_path: Path
) -> None:
    with serving_machines(shell, tmp_path, "lab", "den"):
        before = shell.known()
        running = shell.start("run", "short.toml", "--on", "lab", "--json")
        first = str(shell.wait_until_running(before)["run_id"])
        wait_for_checkpoint(shell, first)
        keeper = json.loads((tmp_path / "lab" / "runs" / first / KEEPER).read_text())
        os.kill(int(keeper["runtime"]), signal.SIGKILL)
        assert shell.end(running).object["outcome"] == "lost"
        # That it was killed is the word of its host alone.
        busy = shell.ask("resume", first, "--on", "den", "--json")
        assert (busy.code, busy.error["code"]) == (ExitCode.USAGE, "line-busy"), busy.out
        assert "--lost" in busy.error["hint"]
        resumed = shell.ask("resume", first, "--lost", "--on", "den", "--json")
        assert resumed.code == ExitCode.DONE, resumed.out + resumed.err
        second = resumed.object["run_id"]
        assert [(leg["place"], leg["outcome"], leg["wiping_shown"]) for leg in resumed.object["line"]["legs"]] == [
            ("lab", "lost", False),
            ("den", "completed", True),
        ]
        assert shell.ask("fetch", second, "-o", str(tmp_path / "out")).code == ExitCode.DONE
        verified = shell.ask("verify", second, "--json")
        assert (verified.code, verified.object["status"], verified.object["not_wiped"]) == (ExitCode.DONE, "good", [1])
        begun = verified.object["legs"][1]["begins"]["step"]
        assert begun >= 1
        assert (tmp_path / "out" / "result.txt").read_text() == f"{begun} 60"
        assert [shell.ask("machine", "sweep", name).code for name in ("lab", "den")] == [ExitCode.DONE] * 2
        assert [path for name in ("lab", "den") for path in (tmp_path / name / "runs").iterdir()] == []


@needs_sshd
def test_a_run_is_moved_to_another_machine_and_the_first_is_shown_to_be_wiped(shell: Shell, tmp_path: Path) -> None:
    with serving_machines(shell, tmp_path, "lab"):
        before = shell.known()
        running = shell.start("run", "moved.toml", "--json")
        run = str(shell.wait_until_running(before)["run_id"])
        wait_for_checkpoint(shell, run)
        # A name that is none stops nothing.
        mistyped = shell.ask("migrate", run, "--on", "nowhere", "--json")
        assert (mistyped.code, mistyped.error["code"]) == (ExitCode.USAGE, "usage")
        assert shell.ask("status", run, "--json").object["outcome"] is None
        moved = shell.ask("migrate", run, "--on", "lab", "--json")
        assert moved.code == ExitCode.DONE, moved.out + moved.err
        assert shell.end(running).object["outcome"] == "interrupted"
        told = moved.object["line"]["legs"]
        assert [(leg["place"], leg["outcome"], leg["wiping_shown"]) for leg in told] == [
            ("local", "interrupted", True),
            ("lab", "completed", True),
        ]
        verified = shell.ask("verify", "latest", "--json")
        assert (verified.code, verified.object["not_wiped"]) == (ExitCode.DONE, [])


@needs_sshd
def test_a_machine_that_was_called_lost_and_lives_is_ended_by_a_sweep_and_its_receipt_counts(
    shell: Shell, tmp_path: Path
) -> None:
    with serving_machines(shell, tmp_path, "lab"):
        before = shell.known()
        running = shell.start("run", "long.toml", "--on", "lab", "--json")
        first = str(shell.wait_until_running(before)["run_id"])
        wait_for_checkpoint(shell, first)
        busy = shell.ask("resume", first, "--json")
        assert (busy.code, busy.error["code"]) == (ExitCode.USAGE, "line-busy")
        before = shell.known()
        going = shell.start("resume", first, "--lost", "--on", "local", "--json")
        second = str(shell.wait_until_running(before)["run_id"])
        shell.end(running)
        wait_for_checkpoint(shell, second)
        swept = shell.ask("machine", "sweep", "lab", "--json")
        assert swept.code == ExitCode.DONE, swept.out + swept.err
        assert shell.ask("stop", second).code == ExitCode.DONE
        shell.end(going)
    verified = shell.ask("verify", second, "--json")
    assert (verified.code, verified.object["not_wiped"]) == (ExitCode.INTERRUPTED, []), verified.out
    first_ended, second_ended = (leg["receipts"][0]["outcome"] for leg in verified.object["legs"])
    # It hears of the other by the sweep's own connection, or is asked to stop before that.
    assert (first_ended in ("superseded", "interrupted"), second_ended) == (True, "interrupted")
    told = shell.ask("status", second, "--json").object["line"]["legs"]
    assert [(leg["outcome"], leg["wiping_shown"]) for leg in told] == [(first_ended, True), ("interrupted", True)]


def test_what_keeps_no_checkpoints_cannot_go_on(shell: Shell) -> None:
    shell.job("plain", "24")
    ended = shell.ask("run", "plain.toml", "--json")
    assert ended.object["line"] is None
    refused = shell.ask("resume", "latest", "--json")
    assert (refused.code, refused.error["code"]) == (ExitCode.USAGE, "usage")
    assert "[checkpoints]" in refused.error["hint"]
