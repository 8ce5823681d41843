"""Machines that cannot take a run: each says what happened and what to do, and nothing is left on either side."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from glasshouse.errors import ExitCode
from glasshouse.jobs.owner.processes import ProcessName
from glasshouse.providers.place.ways import SshHost
from glasshouse.providers.serve.runs import Runs
from simulators.command_line import Shell
from tools.sshd import needs_sshd, serving_ssh
from tools.waiting import wait_for

pytestmark = [pytest.mark.slow, needs_sshd]

# Of the place's command, `-I -B -m MODULE FOLDER NONCE`, with what is otherwise there.
OTHERWISE = """#!/bin/sh
exec {python} -I -B -c '
import os, platform, sys, time, types
from glasshouse.providers.serve import facts
from glasshouse.providers.serve import server as serve
from glasshouse.providers.serve.__main__ import main as place_main
{otherwise}
sys.exit(place_main(sys.argv[1:]))' "$5" "$6"
"""


class Lab:
    """A user here, and a machine that ssh reaches."""

    def __init__(self, folder: Path, host: SshHost) -> None:
        self.folder, self.host, self.there = folder, host, folder / "there"
        self.shell = user(folder / "user")

    def add(self, shell: Shell | None = None, **other: str) -> None:
        """Name the machine, or one that is not quite like it."""
        ways = {"python": sys.executable, "config": str(self.folder / "ssh" / "client"), "folder": str(self.there)}
        url = other.pop("url", f"ssh://{self.host.host}:{self.host.port}")
        options = [word for name, value in (ways | other).items() for word in (f"--{name}", value)]
        named = (shell or self.shell).ask("machine", "add", "lab", url, *options, "--force")
        assert named.code == 0, named.err

    def left(self) -> list[str]:
        """What the machine has of runs."""
        runs = [run for run, _ in Runs(self.there / "runs")] if self.there.exists() else []
        return runs + [path.name for path in self.there.glob("files/*")]


def user(folder: Path) -> Shell:
    folder.mkdir()
    made = Shell(folder)
    assert made.ask("init").code == 0
    made.job("short", "24")
    made.job("long", "2400")
    return made


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    with serving_ssh(folder / "ssh") as host:
        made = Lab(folder, host)
        yield made
        assert made.shell.left_running() == []


def config(lab: Lab, text: str) -> dict[str, str]:
    path = lab.folder / "client"
    path.write_text(text + (lab.folder / "ssh" / "client").read_text())
    return {"config": str(path)}


def an_unknown_host_key(lab: Lab) -> dict[str, str]:
    (lab.folder / "none").touch()
    return config(lab, f"UserKnownHostsFile {lab.folder}/none\nGlobalKnownHostsFile none\n")


def a_changed_host_key(lab: Lab) -> dict[str, str]:
    known = f"[{lab.host.host}]:{lab.host.port} {(lab.folder / 'ssh' / 'user.pub').read_text()}"
    (lab.folder / "changed").write_text(known)
    return config(lab, f"UserKnownHostsFile {lab.folder}/changed\n")


def a_wrong_user(lab: Lab) -> dict[str, str]:
    return {"url": f"ssh://no-such-user@{lab.host.host}:{lab.host.port}"}


def script(lab: Lab, text: str) -> dict[str, str]:
    path = lab.folder / "python"
    path.write_text(text)
    path.chmod(0o700)
    return {"python": str(path)}


def otherwise(text: str) -> Callable[[Lab], dict[str, str]]:
    return lambda lab: script(lab, OTHERWISE.format(python=sys.executable, otherwise=text))


def says(text: str) -> Callable[[Lab], dict[str, str]]:
    return lambda lab: script(lab, f"#!/bin/sh\n{text}\n")


def a_folder_of_everybodys(lab: Lab) -> dict[str, str]:
    folder = lab.folder / "everybodys"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)
    return {"folder": str(folder)}


REFUSALS: dict[str, tuple[Callable[[Lab], dict[str, str]], str, str]] = {
    "an unknown host key": (an_unknown_host_key, "Host key verification failed", "compare the machine's host key"),
    "a changed host key": (a_changed_host_key, "Host key verification failed", "find out why before"),
    "a wrong user": (a_wrong_user, "Permission denied", "the user, or the key, is not accepted"),
    "no Python": (lambda _lab: {"python": "/nowhere/python3"}, "/nowhere/python3", "machine add --python"),
    "no Glasshouse": (says(f'exec {sys.executable} -S "$@"'), "No module named", "install this version of Glasshouse"),
    "a Python that is too old": (says("echo SyntaxError: invalid syntax >&2; exit 1"), "SyntaxError", "needs 3.11"),
    "another Python": (
        otherwise('platform.python_version = lambda: "3.9.2"'), "has Python 3.9.2, and Glasshouse needs", "--python",
    ),
    "a clock an hour ahead": (
        otherwise("now = time.time_ns; time.time_ns = lambda: now() + 3600 * 10**9"), "ahead of this one", "set-ntp",
    ),
    "a clock an hour behind": (
        otherwise("now = time.time_ns; time.time_ns = lambda: now() - 3600 * 10**9"), "behind this one", "set-ntp",
    ),
    "no room": (
        otherwise("os.statvfs = lambda _path: types.SimpleNamespace(f_bavail=9, f_frsize=1 << 20)"),
        "has 9 MiB of room", "make room there",
    ),
    "a full disk": (
        otherwise("from pathlib import Path\ndef full(*_, **__): raise OSError(28, os.strerror(28))\nPath.mkdir=full"),
        "cannot be used: No space left", "make room there",
    ),
    "a home on NFS": (otherwise("facts._file_system = lambda _folder: 0x6969"), "on NFS, which other", "--folder"),
    "no hard links": (
        otherwise("def refused(*_names): raise OSError(1, os.strerror(1))\nos.link = refused"), "without hard links",
        "--folder",
    ),
    "a folder of everybody's": (a_folder_of_everybodys, "is not this user's own folder", "name another one"),
    "an older place": (says('echo "glasshouse-place 0 $6"; sleep 9'), "has version 0", "same version of Glasshouse"),
    "an account that is closed": (
        says("echo This account is currently not available."), "first line from there was: This account", "",
    ),
    "nobody there": (lambda _lab: {"url": "ssh://127.0.0.1:1"}, "Connection refused", "see that sshd runs there"),
}  # fmt: skip


@pytest.mark.parametrize("which", REFUSALS)
def test_a_machine_that_cannot_take_a_run_is_a_sentence_with_what_to_do(lab: Lab, which: str) -> None:
    make, said, hint = REFUSALS[which]
    lab.add(**make(lab))
    before = lab.shell.known()
    answer = lab.shell.ask("run", "short.toml", "--on", "lab")
    words = " ".join(answer.err.split())
    assert answer.code in (ExitCode.UNREACHABLE, ExitCode.RUN_FAILED), answer.out + answer.err
    assert said in words, words
    assert hint in words, words
    assert "Traceback" not in words
    assert lab.shell.known() == before
    assert lab.left() == []


def test_what_a_login_prints_and_a_server_that_forwards_nothing_hinder_no_run(
    lab: Lab, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("loud")
    (folder / "banner").write_text("Authorised use only! Permission denied to all others.\n")
    force = 'ForceCommand echo Welcome; echo Disk quota: fine; eval exec "$SSH_ORIGINAL_COMMAND"\n'
    more = f"{force}DisableForwarding yes\nBanner {folder}/banner\n"
    with serving_ssh(folder / "ssh", more) as host:
        lab.add(url=f"ssh://{host.host}:{host.port}", config=str(folder / "ssh" / "client"))
        ended = lab.shell.ask("run", "short.toml", "--on", "lab", "--json")
        assert (ended.code, ended.object["receipt"]["verdict"]) == (0, "good"), ended.err
    assert lab.left() == []


def test_two_owners_on_one_machine_see_and_sweep_nothing_of_each_others(lab: Lab) -> None:
    other = user(lab.folder / "other")
    lab.add()
    lab.add(other)
    placed = other.ask("run", "long.toml", "--on", "lab", "--detach", "--json").object
    other.wait_until_running()
    ended = lab.shell.ask("run", "short.toml", "--on", "lab", "--json")
    assert (ended.code, ended.object["receipt"]["verdict"]) == (0, "good"), ended.err
    swept = lab.shell.ask("machine", "sweep", "lab", "--json").object
    assert swept == {"removed": 0, "left": {placed["run_id"]: "is no run of yours"}}
    assert lab.shell.ask("stop", placed["run_id"]).code == ExitCode.USAGE
    assert other.ask("stop", placed["run_id"], "--json").object["outcome"] == "interrupted"
    assert lab.left() == []
    assert other.left_running() == []


@pytest.mark.parametrize(
    ("by_then", "verdict"),
    [
        ("it goes on", "not-completed"),
        pytest.param("it has ended by then", "incomplete", marks=pytest.mark.long),
    ],
)
def test_a_machine_that_is_away_is_given_up_and_ended_by_a_sweep_when_it_is_back(
    lab: Lab, tmp_path_factory: pytest.TempPathFactory, by_then: str, verdict: str
) -> None:
    folders = [tmp_path_factory.mktemp(name) for name in ("before", "after")]
    with serving_ssh(folders[0] / "ssh") as host:
        lab.add(url=f"ssh://{host.host}:{host.port}", config=str(folders[0] / "ssh" / "client"))
        placed = lab.shell.ask("run", "long.toml", "--on", "lab", "--detach", "--json").object
        run = lab.shell.wait_until_running()
    supervisor = ProcessName.from_json(run["supervisor"])
    assert supervisor is not None
    for child in psutil.Process(supervisor.pid).children(recursive=True):
        child.send_signal(signal.SIGKILL)  # its line; there is no server that takes another
    assert lab.shell.ask("stop", placed["run_id"], "--no-wait").code == 0
    given = lab.shell.ask("stop", placed["run_id"], "--give-up")
    words = " ".join(given.out.split())
    assert given.code == 0, given.err
    assert "is not known" in words
    assert not re.search("nothing is left|wiped itself (?!or)", words)
    assert lab.shell.ask("status", placed["run_id"], "--json").object["outcome"] == "lost"
    assert not supervisor.alive
    assert lab.left() != []
    if by_then == "it has ended by then":
        there = Runs(lab.there / "runs")[placed["run_id"]]
        there.stop(signal.SIGINT)  # without the broker, which signs for its end
        wait_for(lambda: there.ended() is not None, within_s=120)
    with serving_ssh(folders[1] / "ssh") as host:
        lab.add(url=f"ssh://{host.host}:{host.port}", config=str(folders[1] / "ssh" / "client"))
        assert lab.shell.ask("machine", "sweep", "lab", "--json").object == {"removed": 1, "left": {}}
    assert lab.left() == []
    wait_for(lambda: lab.shell.left_running() == [])
    # The sweep brought what the runtime left when it was stopped.
    told = lab.shell.ask("status", placed["run_id"], "--json").object
    assert (told["outcome"], told["receipt"]["verdict"]) == ("interrupted", verdict)


def test_a_third_ctrl_c_leaves_a_machine_that_is_away(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("away")
    with serving_ssh(folder / "ssh") as host:
        lab.add(url=f"ssh://{host.host}:{host.port}", config=str(folder / "ssh" / "client"))
        command = lab.shell.start("run", "long.toml", "--on", "lab")
        run = lab.shell.wait_until_running()
    for child in psutil.Process(command.pid).children(recursive=True):
        if child.name() == "ssh":
            child.send_signal(signal.SIGKILL)
    answer = _pressed(lab.shell, command)
    assert answer[0] == ExitCode.UNREACHABLE
    assert "left to itself: lab cannot be reached" in " ".join(answer[1].split())
    assert lab.shell.ask("status", run["run_id"], "--json").object["phase"] == "unattended"
    found = tmp_path_factory.mktemp("found")
    with serving_ssh(found / "ssh") as host:
        lab.add(url=f"ssh://{host.host}:{host.port}", config=str(found / "ssh" / "client"))
        stopped = lab.shell.ask("stop", run["run_id"], "--json")
        assert stopped.object["outcome"] == "interrupted", stopped.err
    assert lab.left() == []


def _pressed(shell: Shell, command: subprocess.Popen[str]) -> tuple[int, str]:
    """Press Ctrl-C until it ends; each is given time to be shown."""
    for _ in range(30):
        command.send_signal(signal.SIGINT)
        try:
            out, err = command.communicate(timeout=2)
        except subprocess.TimeoutExpired:
            continue
        return command.returncode, out + err
    answer = shell.end(command)
    return answer.code, answer.out + answer.err
