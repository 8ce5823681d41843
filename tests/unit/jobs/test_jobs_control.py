"""A run is looked at, stopped or given up by another process than its supervisor, which may be gone."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from glasshouse.errors import PlatformError, UsageError
from glasshouse.jobs.owner.processes import ProcessName
from glasshouse.jobs.owner.rundir import Phase, RunFolder
from glasshouse.jobs.supervise import attach, control
from simulators.owner_side import OwnersWorld

NOBODY = ProcessName(pid=2**22 - 1, started=1)


@pytest.fixture
def world() -> OwnersWorld:
    return OwnersWorld()


@pytest.fixture
def folder(world: OwnersWorld, tmp_path: Path) -> RunFolder:
    return world.settle(tmp_path)


def test_a_run_whose_processes_are_all_gone_is_lost(world: OwnersWorld, folder: RunFolder) -> None:
    folder.update(phase=Phase.RUNNING, supervisor=NOBODY, agent=NOBODY)
    found = control.look(folder, world.home)
    assert (found.doing, found.record.outcome, found.record.verdict) == ("ended", "lost", "no-receipt")
    assert control.looks(world.home)[0].record.outcome == "lost"
    assert not attach.stop(folder, world.home)


def test_a_run_that_ended_without_its_supervisor_is_settled_by_its_receipt(
    world: OwnersWorld, folder: RunFolder
) -> None:
    folder.update(phase=Phase.RUNNING, supervisor=NOBODY, agent=NOBODY)
    world.tell(folder, world.run())
    found = control.look(folder, world.home)
    assert (found.record.outcome, found.record.verdict, found.record.exit_code) == ("completed", "good", 0)


def test_a_run_whose_supervisor_alone_died_is_unattended_and_can_be_stopped(
    world: OwnersWorld, folder: RunFolder
) -> None:
    agent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        folder.update(phase=Phase.RUNNING, supervisor=NOBODY, agent=ProcessName.of(agent.pid))
        assert control.look(folder, world.home).doing == "unattended"
        assert attach.stop(folder, world.home)
        agent.wait(10)
    finally:
        agent.kill()
        agent.communicate()
    assert agent.returncode == -signal.SIGTERM
    assert control.look(folder, world.home).record.outcome == "lost"


def test_a_run_that_is_given_up_is_lost_and_never_said_to_have_left_nothing(
    world: OwnersWorld, folder: RunFolder
) -> None:
    waiting = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        folder.update(phase=Phase.RUNNING, supervisor=ProcessName.of(waiting.pid))
        with pytest.raises(UsageError, match="on this machine"):
            control.give_up(folder, world.home)
        folder.update(place="lab", placed=True)
        assert control.give_up(folder, world.home)
        assert waiting.wait(10) == -signal.SIGKILL
    finally:
        waiting.kill()
        waiting.wait()
    record = folder.load()
    assert (record.outcome, record.verdict, record.code) == ("lost", "no-receipt", "place-unreachable")
    said = control.concluded(folder, world.home, record).problem
    assert "lab could not be reached: whether a runtime is there still" in said
    assert "machine sweep lab" in said
    assert not control.give_up(folder, world.home)
    world.tell(folder, world.run())  # a sweep brought it
    assert control.concluded(folder, world.home, record).verdict == "good"


def test_a_run_whose_supervisor_does_not_end_is_not_given_up(
    world: OwnersWorld, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_KILLED_S", 0.1)
    monkeypatch.setattr(ProcessName, "send", lambda _name, _signal: True)  # it hangs in the kernel
    folder.update(phase=Phase.RUNNING, supervisor=ProcessName.of(), place="lab", placed=True)
    with pytest.raises(PlatformError, match="was killed and does not end"):
        control.give_up(folder, world.home)
    assert folder.load().phase is Phase.RUNNING
