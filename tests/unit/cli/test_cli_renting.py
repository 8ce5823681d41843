"""A command that rents gives its machine back, whatever becomes of its terminal and whatever signals come."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from glasshouse.cli.app import run
from glasshouse.cli.show import steps
from glasshouse.cli.show.output import CommandOutput
from glasshouse.cli.show.steps import StepPrinter, cost_words
from glasshouse.errors import Code, PeerError, UsageError
from glasshouse.jobs.define.wanted import Caps
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.processes import Interrupts, ProcessName, handled, interrupt, stoppable
from glasshouse.jobs.owner.rundir import Phase, RunFolder
from glasshouse.jobs.places import accounts, rent, rental_watch, rented_machine
from glasshouse.jobs.places.known_machines import _to_rented
from glasshouse.jobs.places.rent import Renter
from glasshouse.jobs.places.rental_journal import Journal, Step
from glasshouse.jobs.places.rental_watch import watched
from glasshouse.jobs.places.rented_machine import hand_over, return_left
from glasshouse.jobs.supervise import run_request
from glasshouse.jobs.supervise.control import detach
from glasshouse.jobs.supervise.run_request import Renting, RunRequest
from glasshouse.jobs.supervise.supervision import run_here
from glasshouse.providers.place.base import Place
from glasshouse.wire.policy import Profile
from simulators.owner_side import OwnersWorld
from tests.simulators.rental_world import OPTIONS, World, WorldProvider

GONE = ProcessName(pid=2**22 - 1, started=1)


class Closed(CommandOutput):
    """A terminal that was closed after the preview."""

    def say(self, *_what: Any, **_how: Any) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    warn = say


class Signalled(WorldProvider):
    """Signals come to the command while it is answered that a machine is ended."""

    signals: tuple[signal.Signals, ...] = ()

    def give_back(self, machine: str) -> None:
        for one in self.signals:
            os.kill(os.getpid(), one)
        super().give_back(machine)


class Rents:
    """A command that rents from a world with its own time."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.owner, self.world = OwnersWorld(), World()
        self.folder = self.owner.settle(tmp_path)
        self.home = self.owner.home
        self.provider = Signalled(self.world)
        caps = Caps(usd=Decimal(2), seconds=4 * 3600, boot_s=600)
        self.machine = replace(rented_machine.NO_MACHINE, options=OPTIONS, caps=caps)
        (tmp_path / "package").write_bytes(b"sealed")
        self.package = tmp_path / "package"
        for module in (rented_machine, rent, rental_watch):
            monkeypatch.setattr(module, "SystemClock", lambda: self.world.clock)
        for module in (rented_machine, rental_watch):
            monkeypatch.setattr(module, "provider_for", lambda *_of: self.provider)
        monkeypatch.setattr(rented_machine, "make_bundle", lambda path: path.write_bytes(b"bundle"))
        monkeypatch.setattr(rented_machine, "take", self.take)
        monkeypatch.setattr(run_request, "log_in", lambda *_of, **_how: [object()])

    def take(self, _home: object, journal: Journal, *_rest: object, say: Callable[[str], None], **_of: object) -> None:
        taking = Renter(journal, self.provider, clock=self.world.clock, say=say)
        taking.take(self.provider.offers(OPTIONS), OPTIONS, owner="gh-abcdefghij-", ssh_public="ssh-ed25519 AAAA")

    def renting(self) -> Renting:
        asked = RunRequest(what=self.package, job=None, on=("world",))
        return Renting(
            request=asked,
            profile=Profile.STANDARD,
            machine=self.machine,
            provider=self.provider,
            offers=self.provider.offers(OPTIONS),
        )

    def rented(self, output: CommandOutput) -> Any:
        return self.renting().rented(StepPrinter(output, yes=True), self.home, self.folder, self.package)

    @property
    def journal(self) -> Journal:
        return Journal.of(self.home, self.folder.run_id)


@pytest.fixture
def supervisor() -> Iterator[ProcessName]:
    process = subprocess.Popen(["sleep", "600"])
    yield ProcessName.of(process.pid)
    process.kill()
    process.wait()


@pytest.fixture
def rents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rents:
    return Rents(tmp_path, monkeypatch)


def failing(fails: bool) -> AbstractContextManager[object]:
    return pytest.raises(UsageError, match="the run failed") if fails else contextlib.nullcontext()


def end(fails: bool) -> None:
    if fails:
        raise UsageError(Code.USAGE, "the run failed")


@pytest.mark.parametrize("fails", [False, True], ids=["ended", "failed"])
def test_a_terminal_that_was_closed_leaves_no_machine_rented(
    rents: Rents, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "_agree", lambda *_of, **_how: None)
    with failing(fails), rents.rented(Closed(as_json=False)):
        end(fails)
    assert rents.world.running == []
    assert rents.journal.load().over


@pytest.mark.parametrize("fails", [False, True], ids=["ended", "failed"])
def test_what_a_machine_came_to_is_told_also_of_a_run_that_failed(
    rents: Rents, fails: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(steps, "_agree", lambda *_of, **_how: None)
    with failing(fails), rents.rented(CommandOutput(as_json=False)):
        end(fails)
    told = " ".join("".join(capfd.readouterr()).split())
    assert "is gone, by id and in two listings; 0.0" in told
    assert "$ by its price" in told


@pytest.mark.parametrize("fails", [False, True], ids=["ended", "failed"])
def test_signals_while_a_machine_is_given_back_do_not_leave_it(rents: Rents, fails: bool) -> None:
    rents.provider.signals = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGTERM)
    with failing(fails), rents.rented(CommandOutput(as_json=True)):
        end(fails)
    assert rents.world.running == []


def test_a_second_ctrl_c_leaves_it_and_says_so(rents: Rents, capfd: pytest.CaptureFixture[str]) -> None:
    rents.provider.signals = (signal.SIGINT, signal.SIGINT)
    with pytest.raises(PeerError) as left, rents.rented(CommandOutput(as_json=True)):
        pass
    assert left.value.code is Code.RENTAL_LEFT
    assert "glasshouse sweep" in left.value.hint
    assert "Ctrl-C again leaves it" in capfd.readouterr().err
    assert rents.world.running == ["m1"]


def test_a_machine_that_a_supervisor_has_taken_on_is_not_given_back_by_the_command(
    rents: Rents, supervisor: ProcessName
) -> None:
    with failing(True), rents.rented(CommandOutput(as_json=True)):
        hand_over(rents.home, rents.folder, supervisor)
        end(True)
    assert rents.world.running == ["m1"]
    assert rents.journal.load().keeper == supervisor


def test_a_supervisor_that_cannot_be_handed_the_machine_ends_before_it_has_begun(rents: Rents) -> None:
    def full(_supervisor: ProcessName) -> None:
        raise UsageError(Code.DISK_FULL, "no room")

    with pytest.raises(UsageError, match="no room"):
        detach(rents.folder, b"{}", home=rents.home, hand_over=full)
    supervisor = rents.folder.load().supervisor
    assert supervisor is not None
    os.waitpid(supervisor.pid, 0)
    assert "no launch file" in rents.folder.supervisor_log.read_text()
    assert rents.folder.load().phase is Phase.PREPARING


def test_a_signal_before_the_run_begins_stops_it_as_one_during_it_does(rents: Rents) -> None:
    """As between the blocks of a command that has a machine: nothing is started there."""
    interrupts = Interrupts()
    with handled(interrupts):
        os.kill(os.getpid(), signal.SIGTERM)
    places: list[Place] = []

    class Untouched:
        name = rents.folder.load().place

        def run(self, *_of: object, **_how: object) -> Any:
            class Handle:
                def remove(self, *_of: object) -> None:
                    pass

                def close(self) -> None:
                    pass

            return Handle()

        def close(self) -> None:
            pass

    place: Any = Untouched()
    places.append(place)
    broker: Any = type("B", (), {"give_back": lambda _self: True, "serving": None})()
    with pytest.raises(UsageError) as caught:
        run_here(
            rents.folder,
            b"{}",
            home=rents.home,
            broker=broker,
            watcher=Any,  # type: ignore[arg-type]
            place=lambda name: pytest.fail(name),
            places=places,
            interrupts=interrupts,
        )
    assert caught.value.code is Code.INTERRUPTED


def test_a_machine_whose_keeper_was_ended_by_a_command_is_given_back_by_it(
    rents: Rents, supervisor: ProcessName
) -> None:
    with rents.rented(CommandOutput(as_json=True)):
        hand_over(rents.home, rents.folder, supervisor)
    return_left(StepPrinter(CommandOutput(as_json=True)), rents.home, rents.folder)
    assert rents.world.running == ["m1"], "its keeper lives"
    hand_over(rents.home, rents.folder, GONE)
    return_left(StepPrinter(CommandOutput(as_json=True)), rents.home, rents.folder)
    assert rents.world.running == []
    return_left(StepPrinter(CommandOutput(as_json=True)), rents.home, RunFolder(rents.home.runs / ("d" * 32)))


def test_a_command_that_rents_holds_the_claim_and_one_that_ends_a_supervisor_goes_past_a_claim(rents: Rents) -> None:
    with rents.rented(CommandOutput(as_json=True)):
        with rents.journal.claimed() as ours:
            assert not ours
        hand_over(rents.home, rents.folder, GONE)
    with rents.journal.claimed() as ours:
        assert ours
        return_left(StepPrinter(CommandOutput(as_json=True)), rents.home, rents.folder)
    assert rents.world.running == ["m1"], "the process that has claimed it gives it back"
    return_left(StepPrinter(CommandOutput(as_json=True)), rents.home, rents.folder)
    assert rents.world.running == []


def test_a_bill_of_some_machines_is_not_said_to_be_that_of_all(rents: Rents) -> None:
    with rents.rented(CommandOutput(as_json=True)):
        pass
    rental = rents.journal.load()
    assert ", billed " in cost_words(rental)
    (one,) = rental.attempts
    other = replace(one, tag="gh-abcdefghij-2", machine="m2", bill_usd=None)
    assert "billed" not in cost_words(replace(rental, attempts=(one, other)))
    made_nothing = replace(other, step=Step.NEVER)
    assert ", billed " in cost_words(replace(rental, attempts=(one, made_nothing)))


def test_a_cap_that_is_reached_while_a_machine_is_sent_to_ends_the_sending(
    rents: Rents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that reads nothing is not waited for: what waits for it hears of the cap by a signal."""
    rents.world.clock.us = int(time.time() * 1e6)
    with rents.rented(CommandOutput(as_json=True)):
        monkeypatch.setattr(rental_watch, "deadline_us", lambda _rental: (0, "money"))
        with (
            pytest.raises(KeyboardInterrupt),
            stoppable(),
            watched(rents.home, rents.folder.run_id, interrupt),
        ):
            time.sleep(50)
    assert rents.journal.load().stopped_by == "money"
    assert rents.world.running == []


def test_no_process_that_is_started_inherits_the_key_of_an_account(
    rents: Rents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", "canary-4711")
    monkeypatch.setattr(accounts, "_taken", {})
    assert run(["--version"]) == 0
    assert "RUNPOD_API_KEY" not in os.environ
    assert "runpod" in accounts.providers_with_keys(rents.home)
    assert "RUNPOD_API_KEY" not in accounts.handed_on(keys=False)
    assert accounts.handed_on(keys=True)["RUNPOD_API_KEY"] == "canary-4711"


@pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no ssh here")
@pytest.mark.parametrize("home", ["a user", "100%", "%h at 5%d", "it's $HOME", "~"])
def test_a_home_with_marks_of_sshs_in_its_name_has_its_key_found(rents: Rents, home: str) -> None:
    with rents.rented(CommandOutput(as_json=True)):
        up = rents.journal.load().up
        assert up is not None
        way = _to_rented(Journal(Path(f"/home/{home}/rentals/1")), up)
    asked = ["ssh", "-v", *way.options, "-o", "LogLevel=VERBOSE", "-o", "ProxyCommand=false", "host"]
    reads = subprocess.run(asked, capture_output=True, text=True, check=False).stderr
    resolved = subprocess.run(["ssh", "-G", *way.options, "host"], capture_output=True, text=True, check=True).stdout
    assert f"userknownhostsfile /home/{home}/rentals/1/known_hosts\n" in resolved
    assert f"identity file /home/{home}/rentals/1/key type" in reads


@pytest.mark.parametrize("home", ['a "home"', "back\\slash", "${HOME}", "two\nlines"])
def test_a_home_that_ssh_cannot_be_given_is_refused_before_money_is_spent(
    rents: Rents, tmp_path: Path, home: str
) -> None:
    rents.home = Home(path=tmp_path / home, project=rents.home.project)
    rents.home.path.mkdir(mode=0o700)
    with (
        pytest.raises(UsageError, match="ssh cannot be given a file in") as caught,
        rents.rented(CommandOutput(as_json=True)),
    ):
        pass
    assert "GLASSHOUSE_HOME" in caught.value.hint
    assert rents.world.machines == []
