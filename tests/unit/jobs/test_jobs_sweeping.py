"""Sweeping rentals: what one owner's process left, another gives back, and none that is looked after."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from glasshouse.errors import Code, PeerError, UsageError
from glasshouse.jobs.define.wanted import Caps
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.processes import ProcessName
from glasshouse.jobs.places import rented_machine
from glasshouse.jobs.places.rent import Renter
from glasshouse.jobs.places.rental_journal import Journal, Rental, Step
from glasshouse.jobs.supervise import sweeping
from glasshouse.jobs.supervise.sweeping import Swept, elsewhere, found, sweep
from simulators.rental_world import OPTIONS, Killed, World, WorldProvider, offer

OWNER = "gh-abcdefghij-"
GONE = ProcessName(pid=2**22 + 1, started=1)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(sweeping, "provider_of", lambda _home, _name: WorldProvider(world))
    monkeypatch.setattr(sweeping, "providers_with_keys", lambda _home: ("world",))
    monkeypatch.setattr(sweeping, "tag_prefix", lambda _home: OWNER)
    monkeypatch.setattr(rented_machine, "provider_for", lambda _home, _rental: WorldProvider(world))
    return world


@pytest.fixture
def home(tmp_path: Path) -> Home:
    tmp_path.chmod(0o700)
    return Home(path=tmp_path)


def left(home: Home, world: World, number: int = 1, *, keeper: ProcessName | None = GONE, dies_at: int = 0) -> Journal:
    """Return the journal of an owner who rented and ended, or died at one of its calls."""
    rental = Rental(
        run_id=f"{number:032x}",
        provider="world",
        created_us=world.clock.now_us() + number,
        caps=Caps(usd=None, seconds=4 * 3600, boot_s=600),
        python="python3",
        keeper=keeper,
    )
    journal = Journal.create(home, rental)
    world.dies_at, world.after = len(world.calls) + dies_at if dies_at else 0, False
    renter = Renter(journal, WorldProvider(world), clock=world.clock)
    owner = f"{OWNER}{number}-"
    with contextlib.suppress(Killed):
        renter.take([offer()], OPTIONS, owner=owner, ssh_public="ssh-ed25519 AAAA")
    return journal


def test_one_damaged_record_keeps_no_other_machine_and_is_named(home: Home, world: World) -> None:
    journals = [left(home, world, number) for number in (1, 2, 3)]
    (journals[0].path / "rental.json").write_text("{")
    (home.runs / journals[1].load().run_id).mkdir(parents=True)
    (home.runs / journals[1].load().run_id / "run.json").write_text("{")
    swept = sweep(home, clock=world.clock)
    assert (swept.rentals, swept.machines) == (2, 2)
    assert world.running == ["m1"]
    assert len(swept.left) == 1
    assert str(journals[0].path) in swept.left[0]
    assert found(home).damaged == tuple(swept.left)
    # Its machine has a name of this owner's, which no journal tells of any more.
    assert [one.machine.id for one in elsewhere(home).strays] == ["m1"]
    assert sweep(home, everything=True, clock=world.clock).machines == 1
    assert world.running == []


def test_one_that_cannot_be_given_back_keeps_no_other(home: Home, world: World) -> None:
    journals = [left(home, world, number) for number in (1, 2)]
    journals[0].update(account="another")
    world.machines[0].gone_us = world.clock.now_us()  # as another account sees it
    swept = sweep(home, clock=world.clock)
    assert (swept.rentals, swept.machines, len(swept.left)) == (1, 1, 1)
    assert "another account" in swept.left[0]
    assert not journals[0].load().over
    assert journals[1].load().over


def test_a_request_that_made_nothing_is_no_machine_that_is_gone(home: Home, world: World) -> None:
    journal = left(home, world, dies_at=1)
    assert [one.step for one in journal.load().attempts] == [Step.ASKED]
    assert sweep(home, clock=world.clock) == Swept(rentals=1, machines=0)
    assert [one.step for one in journal.load().attempts] == [Step.NEVER]


def test_a_machine_of_an_attempt_that_is_over_is_a_stray(home: Home, world: World) -> None:
    journal = left(home, world)
    tag = journal.load().attempts[0].tag
    assert elsewhere(home).strays == ()
    journal.note(tag, step=Step.NEVER)
    assert [one.machine.tag for one in elsewhere(home).strays] == [tag]
    assert sweep(home, clock=world.clock) == Swept(forgotten=1)
    assert sweep(home, everything=True, clock=world.clock) == Swept(rentals=1, machines=1)
    assert world.running == []


def test_a_stray_is_gone_when_two_listings_and_its_id_say_so_and_not_before(home: Home, world: World) -> None:
    journal = left(home, world)
    journal.note(journal.load().attempts[0].tag, step=Step.NEVER)
    world.faults.lies_about_deletion = 3
    before = len(world.calls)
    assert sweep(home, everything=True, clock=world.clock).machines == 1
    assert world.running == []
    asked = [what for what, _ in world.calls[before:]]
    assert asked.count("give_back") == 4
    listings = [us for what, us in world.calls[before:] if what == "tagged"]
    assert listings[-1] - listings[-2] >= 10_000_000
    assert len(listings) >= 6
    assert asked.count("find") >= 2


def test_a_provider_that_is_away_is_said_to_be_silent_and_not_to_have_nothing(home: Home, world: World) -> None:
    world.faults.away = 1
    told = elsewhere(home)
    assert (told.strays, told.asked) == ((), ())
    assert told.silent == ("world does not answer (timeout)",)
    assert elsewhere(home).asked == ("world",)


def test_what_is_taken_over_while_a_sweep_looks_is_left_alone(
    home: Home, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = left(home, world)
    seen = found(home)
    journal.update(keeper=ProcessName.of())
    monkeypatch.setattr(sweeping, "found", lambda _home: seen)
    said: list[str] = []
    assert sweep(home, say=said.append, clock=world.clock) == Swept()
    assert world.running == ["m1"]
    assert "is looked after by process" in said[0]


def test_two_sweeps_do_not_end_one_rental_at_once(home: Home, world: World) -> None:
    journal, said = left(home, world), []
    with journal.claimed() as ours:
        assert ours
        assert sweep(home, say=said.append, clock=world.clock) == Swept()
    assert "another process" in said[0]
    assert world.running == ["m1"]

    def say(_text: str) -> None:
        assert journal.load().kept  # and who asks meanwhile is told so
        raise BrokenPipeError

    assert sweep(home, say=say, clock=world.clock).machines == 1
    assert journal.load().keeper is None


def test_a_disk_that_is_full_when_the_sweep_begins_keeps_no_machine(
    home: Home, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = left(home, world)

    def full(*_given: object) -> None:
        raise UsageError(Code.DISK_FULL, "no room to write rental.json")

    assert (journal.path / "lock").is_file()
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "save", full)
        swept = sweep(home, clock=world.clock)
    assert world.running == []
    assert (swept.rentals, len(swept.left)) == (0, 1)  # gone, and not yet noted
    assert sweep(home, clock=world.clock).machines == 1


def test_a_process_on_another_machine_is_taken_to_look_after_its_rental(home: Home, world: World) -> None:
    journal = left(home, world)
    journal.save(replace(journal.load(), keeper_host="laptop-2"))
    assert journal.load().kept
    assert sweep(home, clock=world.clock) == Swept()
    assert world.running == ["m1"]
    assert sweep(home, everything=True, clock=world.clock).machines == 1
    assert world.running == []


def test_a_process_from_before_the_machine_was_started_anew_looks_after_nothing(home: Home, world: World) -> None:
    journal = left(home, world, keeper=ProcessName.of())
    rental = journal.load()
    assert rental.keeper_host == socket.gethostname()
    assert rental.kept
    journal.save(replace(rental, keeper_boot="another"))  # its number and ticks may have come again
    assert not journal.load().kept
    assert sweep(home, clock=world.clock).machines == 1


def test_a_machine_that_stays_is_said_to_be_left_and_swept_later(home: Home, world: World) -> None:
    journal = left(home, world)
    world.faults.lies_about_deletion = 1000
    swept = sweep(home, clock=world.clock)
    assert (swept.rentals, len(swept.left)) == (0, 1)
    assert not journal.load().kept
    with pytest.raises(PeerError) as caught:
        Renter(journal, WorldProvider(world), clock=world.clock).give_back()
    assert caught.value.code is Code.RENTAL_LEFT
    world.faults.lies_about_deletion = 0
    assert sweep(home, clock=world.clock).machines == 1


def test_the_record_of_a_rental_that_came_to_nothing_goes_with_a_later_sweep(home: Home, world: World) -> None:
    failed, of_a_run, begun, going = (left(home, world, number) for number in (1, 2, 3, 4))
    (home.runs / of_a_run.load().run_id).mkdir(parents=True)
    (home.runs / of_a_run.load().run_id / "run.json").write_text("{}")
    # Decided and not asked for yet: nothing of it is rented, and its command goes on.
    begun.save(replace(begun.load(), attempts=(), keeper=ProcessName.of()))
    going.update(keeper=ProcessName.of())
    assert sweep(home, clock=world.clock).forgotten == 0, "what a sweep has ended can be looked at until the next"
    assert failed.load().over
    with failed.claimed():
        assert sweep(home, clock=world.clock).forgotten == 0
    assert sweep(home, clock=world.clock).forgotten == 1
    assert [one.exists for one in (failed, of_a_run, begun, going)] == [False, True, True, True]
