"""A reader that goes away, or a terminal that is closed: the run's end, its record and the exit code say one thing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from glasshouse.errors import ExitCode
from simulators.command_line import Shell

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    made = Shell(tmp_path_factory.mktemp("user"))
    assert made.ask("init").code == 0
    made.job("long", "1200")
    made.job("short", "24")
    yield made
    assert made.left_running() == []


def what_is_said(shell: Shell, run_id: str) -> set[str]:
    """How a run ended, from each place that says it."""
    record = shell.newest()
    assert record is not None
    assert record["run_id"] == run_id
    (row,) = (one for one in shell.ask("status", "--json").object["runs"] if one["run_id"] == run_id)
    one = shell.ask("status", run_id, "--json").object
    return {record["outcome"], row["outcome"], one["outcome"]}


@pytest.mark.parametrize("lines", [1, 3])
def test_a_run_outlives_the_reader_of_its_output_and_ends_as_everything_says(shell: Shell, lines: int) -> None:
    command = shell.start("run", "short.toml")
    assert command.stdout is not None
    for _ in range(lines):
        assert command.stdout.readline()
    command.stdout.close()
    assert command.stderr is not None
    said = command.stderr.read()
    command.stderr.close()
    code = command.wait(timeout=60)
    assert "Traceback" not in said
    assert "BrokenPipe" not in said
    run = shell.newest()
    assert run is not None
    (outcome,) = what_is_said(shell, run["run_id"])
    if outcome == "completed":
        assert (code, run["exit_code"], run["verdict"]) == (ExitCode.DONE, ExitCode.DONE, "good")
        assert shell.ask("verify", run["run_id"]).code == ExitCode.DONE
    else:  # the reader had gone before a runtime was placed
        assert (code, outcome, run["code"]) == (ExitCode.INTERRUPTED, "interrupted", "interrupted")
        assert lines == 1


def test_a_closed_terminal_interrupts_the_run_and_the_exit_code_says_so(shell: Shell) -> None:
    before, (master, slave) = shell.known(), pty.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    command = subprocess.Popen(
        [sys.executable, "-m", "glasshouse.cli", "run", "long.toml"],
        cwd=shell.folder,
        env=shell.environment | {"TERM": "xterm"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(slave)
    os.set_blocking(master, False)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            os.read(master, 65536)
        run = shell.newest()
        events = Path("/none") if run is None else shell.home / "runs" / run["run_id"] / "out" / "events.log"
        if run and run["run_id"] not in before and events.exists() and b'"type":"progress"' in events.read_bytes():
            break
        time.sleep(0.05)
    os.close(master)
    assert command.wait(timeout=60) == ExitCode.INTERRUPTED
    assert run is not None
    assert what_is_said(shell, run["run_id"]) == {"interrupted"}
    assert shell.ask("verify", run["run_id"]).code == ExitCode.INTERRUPTED


def test_a_log_is_followed_to_the_end_of_its_run(shell: Shell) -> None:
    placed = shell.ask("run", "short.toml", "--detach", "--json").object
    followed = shell.ask("logs", placed["run_id"], "-f")
    assert (followed.code, "the run has ended" in followed.err) == (0, True)
    assert "the first row is" in followed.out
    assert followed.out == shell.ask("logs", placed["run_id"]).out
    assert shell.ask("logs", placed["run_id"], "-f").out == followed.out, "of a run that has ended: all of it, at once"
    refused = shell.ask("logs", placed["run_id"], "-f", "--json")
    assert (refused.code, refused.error["code"]) == (ExitCode.USAGE, "usage")


def test_leaving_a_followed_log_lets_the_run_go_on(shell: Shell) -> None:
    placed = shell.ask("run", "long.toml", "--detach", "--json").object
    shell.wait_until_running(shell.known() - {placed["run_id"]})
    command = shell.start("logs", placed["run_id"], "-f")
    assert command.stderr is not None
    assert "nothing vouches" in command.stderr.readline()
    command.send_signal(signal.SIGINT)
    assert shell.end(command).code == ExitCode.INTERRUPTED
    assert shell.ask("status", placed["run_id"], "--json").object["outcome"] is None
    assert "interrupted" in shell.ask("stop", placed["run_id"]).out
