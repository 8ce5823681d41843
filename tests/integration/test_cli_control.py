"""Runs that are interrupted, detached, stopped, killed; and brokers that die under them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import Code, ExitCode
from glasshouse.handshake.delegation import Delegation
from glasshouse.handshake.launch import LaunchFile
from glasshouse.jobs.gates.embedded import Embedded
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.owner.processes import Interrupts
from glasshouse.jobs.owner.rundir import Phase, RunFolder
from glasshouse.jobs.places.known_machines import place_of
from glasshouse.jobs.supervise.prepare import prepare
from glasshouse.jobs.supervise.supervision import run_here
from glasshouse.wire.states import Outcome
from simulators.command_line import Shell
from tools.waiting import wait_for

LONG = "1200"  # a minute; every story below ends it long before
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    made = Shell(tmp_path_factory.mktemp("user"))
    assert made.ask("init").code == 0
    made.job("long", LONG)
    made.job("short", "24")
    yield made
    assert made.left_running() == []


def status(shell: Shell, run: dict[str, Any]) -> dict[str, Any]:
    return shell.ask("status", run["run_id"], "--json").object


def test_ctrl_c_zeroizes_and_says_so_and_a_second_one_too(shell: Shell) -> None:
    command = shell.start("run", "long.toml")
    shell.wait_until_running(shell.known())
    command.send_signal(signal.SIGINT)
    time.sleep(0.05)
    command.send_signal(signal.SIGINT)
    answer = shell.end(command)
    assert answer.code == ExitCode.INTERRUPTED
    assert "keys are wiped" in answer.out
    assert "✓ zeroized" in answer.out
    assert "interrupted, at assurance software" in answer.out
    assert shell.ask("verify", "latest").code == ExitCode.INTERRUPTED


def test_sigterm_does_the_same_for_programs(shell: Shell) -> None:
    command = shell.start("run", "long.toml", "--json")
    shell.wait_until_running(shell.known())
    command.send_signal(signal.SIGTERM)
    answer = shell.end(command)
    assert answer.code == ExitCode.INTERRUPTED
    assert (answer.object["outcome"], answer.object["state"]) == ("interrupted", "zeroized")
    assert answer.object["zeroization"]


def test_a_detached_run_is_followed_and_ends_by_itself(shell: Shell) -> None:
    placed = shell.ask("run", "short.toml", "--detach", "--json").object
    assert placed["detached"] is True
    run = shell.wait_until_running()
    assert run["run_id"] == placed["run_id"]
    running = shell.ask("status", "--json").object["runs"][0]
    assert running["run_id"] == placed["run_id"]
    # On a busy machine the run may end while `status` starts; that it ran was seen above.
    assert (running["phase"], running["outcome"]) in {("running", None), ("ended", "completed")}
    attached = shell.ask("attach", placed["run_id"][:8], "--json")
    assert (attached.code, attached.object["outcome"]) == (ExitCode.DONE, "completed")
    assert attached.object["receipt"]["verdict"] == "good"
    log = shell.home / "runs" / placed["run_id"] / "supervisor.log"
    assert log.stat().st_mode & 0o777 == 0o600
    # The supervisor writes its last line when the record, which `attach` waits for, is complete.
    wait_for(lambda: "completed, receipt good" in log.read_text())


def test_leaving_an_attached_run_does_not_stop_it_and_stop_does(shell: Shell) -> None:
    placed = shell.ask("run", "long.toml", "--detach", "--json").object
    shell.wait_until_running()
    attached = shell.start("attach")
    assert attached.stdout is not None
    assert attached.stdout.readline()  # by now it follows the run
    attached.send_signal(signal.SIGINT)
    left = shell.end(attached)
    assert (left.code, "The run goes on." in left.out) == (ExitCode.DONE, True)
    assert status(shell, placed)["outcome"] is None
    stopped = shell.ask("stop", placed["run_id"], "--json")
    assert (stopped.code, stopped.object["outcome"]) == (ExitCode.DONE, "interrupted")
    assert stopped.object["receipt"]["verdict"] == "not-completed"
    assert shell.ask("stop", placed["run_id"]).code == ExitCode.DONE, "stopping what has ended is no error"


def test_a_run_outlives_a_killed_supervisor_and_is_settled_by_its_receipt(shell: Shell) -> None:
    shell.job("unattended", "100")  # at work for longer than a busy machine takes to ask for its status
    placed = shell.ask("run", "unattended.toml", "--detach", "--json").object
    run = shell.wait_until_running()
    os.kill(run["supervisor"]["pid"], signal.SIGKILL)
    time.sleep(0.1)
    found = {one["run_id"]: one for one in shell.ask("status", "--json").object["runs"]}
    assert found[placed["run_id"]]["phase"] == "unattended"
    answer = shell.ask("attach", placed["run_id"], "--json")
    assert (answer.code, answer.object["outcome"]) == (ExitCode.DONE, "completed")


def test_a_killed_runtime_is_lost_and_nothing_of_it_goes_on(shell: Shell) -> None:
    command = shell.start("run", "long.toml", "--json")
    run = shell.wait_until_running(shell.known())
    os.kill(run["agent"]["pid"], signal.SIGKILL)
    answer = shell.end(command)
    assert answer.code == ExitCode.RUN_FAILED
    assert (answer.object["outcome"], answer.object["receipt"]["verdict"]) == ("lost", "no-receipt")
    assert "what else stayed behind is unknown" in answer.object["receipt"]["problem"]
    wait_for(lambda: not shell.left_running(), told=lambda: str(shell.left_running()))
    refused = shell.ask("fetch", run["run_id"], "-o", "nothing", "--json")
    assert refused.code == ExitCode.VERIFICATION_FAILED
    assert not (shell.folder / "nothing").exists()


def test_a_broker_that_dies_in_the_middle_is_started_again_and_the_receipt_is_good(shell: Shell) -> None:
    shell.job("middle", "100")
    command = shell.start("run", "middle.toml", "--json")
    shell.wait_until_running(shell.known())
    serving = Embedded(Home(path=shell.home)).serving
    assert serving is not None
    os.kill(serving.process.pid, signal.SIGKILL)
    answer = shell.end(command)
    assert answer.object["outcome"] == "completed"
    assert answer.object["receipt"]["verdict"] == "good"


def test_two_runs_share_one_broker_and_the_last_one_turns_it_off(shell: Shell) -> None:
    commands, before, broker = [], shell.known(), Embedded(Home(path=shell.home))
    for _ in range(2):
        commands.append(shell.start("run", "long.toml", "--json"))
        before.add(shell.wait_until_running(before)["run_id"])
    serving = broker.serving
    assert serving is not None
    for command, then in zip(commands, (serving, None), strict=True):
        command.send_signal(signal.SIGTERM)
        assert shell.end(command).code == ExitCode.INTERRUPTED
        assert broker.serving == then


class Quiet:
    def event(self, *_event: object) -> None:
        pass

    def tick(self, *_seen: object) -> None:
        pass

    def stopping(self, times: int) -> None:
        pass


def test_a_key_revoked_after_the_launch_is_refused_by_the_gate(shell: Shell) -> None:
    """The owner revokes between minting the launch and its evidence: only the broker can refuse now."""
    assert shell.ask("seal", "short.toml", "-o", "late.sealed", "--json").code == 0
    home = Home(path=shell.home)
    identity = Identity.parse(home.owner_private.read_bytes(), None)
    folder, broker = RunFolder.create(home), Embedded(home)
    prepared = prepare(shell.folder / "late.sealed", home=home, identity=identity, folder=folder, broker=broker)
    assert broker.serving is not None
    broker.serving.client().revoke(prepared.record.package_id)
    ended = run_here(
        folder,
        prepared.launch,
        home=home,
        place=partial(place_of, home),
        broker=broker,
        watcher=Quiet(),
        interrupts=Interrupts(),
    )
    assert (ended.conclusion.outcome, ended.conclusion.code) == (Outcome.REFUSED, Code.PACKAGE_REVOKED)
    assert ended.conclusion.exit_code is ExitCode.REFUSED
    assert ended.conclusion.receipt is not None, "a refused run has a receipt too"
    assert ended.conclusion.receipt.outputs == ()
    assert broker.serving is None


def test_a_short_run_beside_a_long_one_does_not_end_the_brokers_mandate_for_it(shell: Shell) -> None:
    """A new delegation takes the old one's place, for every run of this owner that goes on."""
    job = shell.folder / "week.toml"
    job.write_text((shell.folder / "short.toml").read_text().replace('"5m"', '"168h"'))
    home, broker = Home(path=shell.home), Embedded(Home(path=shell.home))
    identity = Identity.parse(home.owner_private.read_bytes(), None)
    mandates = []
    for name in ("week", "short"):
        assert shell.ask("seal", f"{name}.toml", "-o", f"{name}-beside.sealed", "--json").code == 0
        folder = RunFolder.create(home)
        package = shell.folder / f"{name}-beside.sealed"
        prepared = prepare(package, home=home, identity=identity, folder=folder, broker=broker)
        envelope = LaunchFile.parse(prepared.launch).delegation
        mandates.append((folder, Delegation.from_envelope(envelope, identity.signing.public).not_after_us))
    (week, _), (short, until_us) = mandates
    needed_us = (week.load().max_duration_s + 3600) * 1_000_000
    assert until_us >= week.load().created_us + needed_us
    for folder in (week, short):
        folder.save(replace(folder.load(), phase=Phase.ENDED))
    broker.give_back()


def test_a_standing_broker_serves_runs_and_is_left_alone(shell: Shell) -> None:
    broker = shell.start("broker", "serve", "--runtime-bind", "127.0.0.1:0", "--json")
    try:
        assert broker.stdout is not None
        assert '"store_public":' in broker.stdout.readline(), "it keeps checkpoints, as an embedded one does"
        answer = shell.ask("run", "short.toml", "--json")
        assert answer.object["receipt"]["verdict"] == "good"
        assert broker.poll() is None
        second = shell.ask("broker", "serve", "--json")
        assert second.code == ExitCode.USAGE
    finally:
        broker.send_signal(signal.SIGTERM)
        broker.communicate(timeout=20)
    assert broker.returncode == 0
    assert not Path(shell.home / "broker" / "serving.json").exists()
