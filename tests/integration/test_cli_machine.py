"""A user with a machine of their own that ssh reaches: named, run on, followed, stopped, and taken over."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import glasshouse
from glasshouse.errors import ExitCode
from glasshouse.providers.serve.runs import Runs
from simulators.command_line import SUM, Shell
from tools.sshd import needs_sshd, serving_ssh
from tools.waiting import wait_for

pytestmark = [pytest.mark.slow, needs_sshd]

BUSY = """
import time
from glasshouse import task
for step in range(100):
    time.sleep(0.05)
    task.current().progress(step + 1, 100)
"""


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    folder = tmp_path_factory.mktemp("two")
    (folder / "user").mkdir()
    made = Shell(folder / "user")
    with serving_ssh(folder / "ssh") as host:
        assert made.ask("init").code == 0
        url, there = f"ssh://{host.host}:{host.port}", ("--folder", str(folder / "there"))
        ways = ("--python", sys.executable, "--config", str(folder / "ssh" / "client"))
        named = made.ask("machine", "add", "lab", url, *ways, *there)
        assert named.code == 0, named.err
        other = ("--folder", str(folder / "elsewhere"), "--address", "127.0.0.1")
        assert made.ask("machine", "add", "den", url, *ways, *other).code == 0
        made.job("long", "1200")
        made.job("short", "24")
        yield made
        assert made.left_running() == []


def left_there(shell: Shell) -> list[str]:
    """What the machines still have of runs."""
    places = [shell.folder.parent / name for name in ("there", "elsewhere")]
    runs = [run for place in places if place.exists() for run, _ in Runs(place / "runs")]
    return runs + [path.name for place in places for path in place.glob("files/*")]


def test_a_run_on_a_machine_ends_as_one_here_does_and_leaves_nothing_there(shell: Shell) -> None:
    ended = shell.ask("run", "short.toml", "--on", "lab", "--json")
    assert ended.code == ExitCode.DONE, ended.err
    assert (ended.object["outcome"], ended.object["receipt"]["verdict"]) == ("completed", "good")
    assert shell.ask("verify", "latest").code == ExitCode.DONE
    assert shell.ask("logs", "latest").code == ExitCode.DONE
    assert shell.ask("fetch", "latest", "-o", "outputs").code == ExitCode.DONE
    assert left_there(shell) == []


@pytest.fixture(scope="module")
def hooked(shell: Shell) -> Iterator[str]:
    """A machine with the same files but one: a hook that runs at every start of its interpreter."""
    folder = shell.folder.parent / "hooked"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = next((folder / "lib").glob("python*/site-packages"))
    (packages / "sitecustomize.py").write_text("evil = True\n")
    (packages / "ours.pth").write_text(
        "\n".join(path for path in sys.path if path.startswith("/") and "-packages" in path)
    )
    with (packages / "ours.pth").open("a") as listing:
        listing.write(f"\n{Path(glasshouse.__file__).parents[1]}\n")
    known = json.loads((shell.home / "machines.json").read_text())
    ways = ("--python", str(folder / "bin" / "python"), "--config", known["lab"]["config"])
    named = shell.ask("machine", "add", "hooked", known["lab"]["url"], *ways, "--folder", str(folder / "runs"))
    assert named.code == 0, named.err
    yield "hooked"
    assert shell.ask("machine", "remove", "hooked").code == 0


def test_a_machine_that_measures_otherwise_is_refused_before_anything_is_sent(shell: Shell, hooked: str) -> None:
    refused = shell.ask("run", "short.toml", "--on", hooked, "--json")
    assert (refused.code, refused.error["code"]) == (ExitCode.REFUSED, "measurement-unknown"), refused.err
    assert "another start_up" in refused.error["message"]
    assert re.search(r"\d files differ, \S+/\S+ \((more|missing)\)", refused.error["message"])
    assert not list((shell.folder.parent / "hooked" / "runs").glob("files/*"))
    parts = [shell.ask("measure", *on, "--json").object["parts"] for on in ((), ("--on", "lab"), ("--on", hooked))]
    assert parts[0] == parts[1]
    assert {part for part in parts[0] if parts[0][part] != parts[2][part]} == {"start_up"}
    listed = shell.ask("measure", "--on", hooked, "--diff", "this", "--json").object["differences"]
    assert {"how": "more", "name": "site-0/sitecustomize.py", "part": "start_up"} in listed


def test_a_recorded_machine_is_accepted_by_the_jobs_that_name_it(shell: Shell, hooked: str) -> None:
    added = shell.ask("reference", "add", "theirs", "--on", hooked)
    assert added.code == 0, added.err
    assert "what hooked reports of itself" in added.err
    assert shell.ask("measure", "--on", hooked, "--diff", "theirs", "--json").object["differences"] == []
    job = shell.job("named", "5").read_text()
    (shell.folder / "named.toml").write_text(job + 'reference = ["theirs"]\n')
    for on in ("lab", "local"):
        refused = shell.ask("run", "named.toml", "--on", on, "--json")
        assert (refused.code, refused.error["code"]) == (ExitCode.REFUSED, "measurement-unknown")
        assert "another start_up than the reference theirs" in refused.error["message"]
    (shell.folder / "named.toml").write_text(job + 'reference = ["theirs", "this"]\n')
    ended = shell.ask("run", "named.toml", "--on", "lab", "--json")
    assert (ended.code, ended.object["receipt"]["verdict"]) == (ExitCode.DONE, "good"), ended.err
    assert shell.ask("reference", "remove", "theirs").code == 0
    assert shell.ask("run", "named.toml", "--on", "lab").code == ExitCode.USAGE


def test_a_detached_run_is_stopped_from_here(shell: Shell) -> None:
    placed = shell.ask("run", "long.toml", "--on", "lab", "--detach", "--json").object
    shell.wait_until_running()
    stopped = shell.ask("stop", placed["run_id"], "--json")
    assert (stopped.code, stopped.object["outcome"]) == (ExitCode.DONE, "interrupted")
    assert left_there(shell) == []


def test_a_run_whose_supervisor_is_killed_goes_on_there_and_is_taken_over(shell: Shell) -> None:
    shell.job("alone", "100")
    placed = shell.ask("run", "alone.toml", "--on", "lab", "--detach", "--json").object
    run = shell.wait_until_running()
    os.kill(run["supervisor"]["pid"], signal.SIGKILL)
    wait_for(lambda: shell.ask("status", placed["run_id"], "--json").object["phase"] == "unattended")
    ended = shell.ask("attach", placed["run_id"], "--json")
    assert (ended.code, ended.object["outcome"], ended.object["receipt"]["verdict"]) == (0, "completed", "good")
    assert left_there(shell) == []


def test_a_group_is_placed_over_two_machines_and_taken_over_as_one(shell: Shell) -> None:
    job = shell.job("wide", "1").read_text().replace("train.py", "sum.py") + 'egress = ["group"]\n'
    (shell.folder / "wide.toml").write_text(job)
    (shell.folder / "sum.py").write_text(BUSY + SUM)
    assert shell.ask("run", "wide.toml", "--on", "lab,local").code == ExitCode.USAGE
    assert shell.ask("run", "wide.toml", "--on", "lab,den", "--machines", "3").code == ExitCode.USAGE
    placed = shell.ask("run", "wide.toml", "--on", "lab,den", "--detach", "--json", timeout_s=120).object
    run = shell.wait_until_running()
    os.kill(run["supervisor"]["pid"], signal.SIGKILL)
    wait_for(lambda: shell.ask("status", placed["run_id"], "--json").object["phase"] == "unattended")
    ended = shell.ask("attach", placed["run_id"], "--json", timeout_s=120)
    assert ended.code == ExitCode.DONE, ended.out + ended.err
    assert [one["verdict"] for one in ended.object["group"]["ended"]] == ["good", "good"]
    said = "".join(shell.ask("logs", placed["run_id"], "--machine", number).out for number in ("0", "1"))
    assert sorted(line for line in said.splitlines() if line.startswith("rank")) == [
        "rank 0 of 2 has 3",
        "rank 1 of 2 has 3",
    ]
    assert left_there(shell) == []


def test_what_a_killed_command_left_is_swept_and_nobody_elses(shell: Shell) -> None:
    stranger = shell.folder.parent / "there" / "runs" / ("cd" * 16)
    stranger.mkdir()
    (stranger / "order.json").write_text("{}")
    shell.job("swept", "5")
    placed = shell.ask("run", "swept.toml", "--on", "lab", "--detach", "--json").object
    os.kill(shell.wait_until_running()["supervisor"]["pid"], signal.SIGKILL)
    assert shell.ask("machine", "remove", "lab").code == ExitCode.USAGE, "a run goes on there"
    assert shell.ask("attach", placed["run_id"]).code == ExitCode.DONE
    runs = Runs(shell.folder.parent / "there" / "runs")
    (shell.folder.parent / "there" / "runs" / placed["run_id"]).mkdir()  # as one that was not cleared at its end
    swept = shell.ask("machine", "sweep", "lab", "--json")
    assert swept.code == 0, swept.err
    assert swept.object["left"] == {stranger.name: "is no run of yours"}
    assert [run for run, _ in runs] == [stranger.name]
    (stranger / "order.json").unlink()
    stranger.rmdir()


def test_a_machine_that_is_not_there_is_told_before_a_key_is_given_to_anybody(shell: Shell) -> None:
    for address, said in (
        ("ssh://127.0.0.1:1", "refused"),
        ("nowhere", "no machine is called"),
        ("ssh://a b", "address"),
    ):
        answer = shell.ask("run", "short.toml", "--on", address)
        assert answer.code in (ExitCode.USAGE, ExitCode.UNREACHABLE)
        assert said in answer.err


def test_machines_are_listed_and_forgotten(shell: Shell) -> None:
    assert shell.ask("machine", "add", "lab", "ssh://other").code == ExitCode.USAGE
    assert shell.ask("machine", "add", "other", "ssh://user@host:22").code == 0
    listed = shell.ask("machine", "list", "--json").object["machines"]
    assert [one["name"] for one in listed if one["name"] != "hooked"] == ["den", "lab", "other"]
    assert shell.ask("machine", "remove", "other").code == 0
    assert shell.ask("machine", "remove", "other").code == ExitCode.USAGE


def test_a_machine_is_looked_at_before_anything_is_sent_there(shell: Shell) -> None:
    looked = shell.ask("doctor", "--on", "lab", "--json")
    assert looked.code == 0, looked.err
    assert looked.object["profile"] in ("standard", "strict")
    assert {"disk", "memory", "torch"} <= {finding["feature"] for finding in looked.object["findings"]}
    assert "lab" in shell.ask("doctor", "--on", "lab").out
