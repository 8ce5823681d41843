"""What a rented machine may cost and for how long it may stay: caps hold while it boots, is looked at and trains."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal, InvalidOperation
from itertools import pairwise
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from glasshouse.errors import Code, PeerError, PlatformError, UsageError
from glasshouse.jobs.define.wanted import Caps
from glasshouse.jobs.owner.durations import SystemClock
from glasshouse.jobs.owner.home import Home, write_private
from glasshouse.jobs.owner.processes import interrupt, stoppable
from glasshouse.jobs.places import known_machines, rental_watch, rented_machine
from glasshouse.jobs.places.rental_journal import POLL_S, Journal, deadline_us
from glasshouse.jobs.places.rental_watch import RentalWatch
from glasshouse.jobs.places.rented_machine import NO_MACHINE
from glasshouse.providers.rental.start_script import READY
from glasshouse.wire.policy import Profile
from tests.simulators.rental_world import (
    CAPS,
    OPTIONS,
    OWNER,
    Faults,
    World,
    WorldProvider,
    begun,
    renter,
    take,
)


def test_what_a_machine_is_made_with_ends_it_within_the_caps(tmp_path: Path) -> None:
    world = World()
    journal = begun(tmp_path, world)
    take(journal, world)
    start = world.machines[0].start
    assert start.ends_s == int(Decimal("2.00") / Decimal("0.60") * 3600)
    assert start.ends_at_s == world.machines[0].made_us // 1_000_000 + start.ends_s
    deadline, by = deadline_us(journal.load())
    assert by == "money"
    assert deadline < start.ends_at_s * 1_000_000 - 290_000_000
    cost = journal.load().cost_usd(start.ends_at_s * 1_000_000)
    assert Decimal("1.99") < cost <= Decimal("2.00")


def test_caps_that_leave_no_time_are_refused_before_anything_is_asked_for(tmp_path: Path) -> None:
    world = World()
    journal = begun(tmp_path, world, replace(CAPS, usd=Decimal("0.05")))
    with pytest.raises(UsageError) as caught:
        take(journal, world)
    assert caught.value.code is Code.CAP_REACHED
    assert "5 minutes" in caught.value.message
    assert world.machines == []


def test_failed_machines_count_against_the_money(tmp_path: Path) -> None:
    world = World(faults=Faults(never_boots=9))
    journal = begun(tmp_path, world, Caps(usd=Decimal("0.25"), seconds=4 * 3600, boot_s=900))
    with pytest.raises(UsageError) as caught:
        take(journal, world)
    assert caught.value.code is Code.CAP_REACHED
    assert journal.load().cost_usd(world.clock.now_us()) < Decimal("0.25")
    assert world.running == []


def test_an_hours_rental_asks_at_most_150_times_and_never_faster_than_every_10_seconds(tmp_path: Path) -> None:
    world = World(boot_s=300)
    journal = begun(tmp_path, world)
    take(journal, world)
    watching = 2 * 3600 // 120  # whether it is there, and what it printed
    world.clock.sleep(3600)
    renter(journal, world).give_back()
    assert len(world.calls) + watching <= 150
    for kind in ("find", "tagged", "output"):
        asked = [us for what, us in world.calls if what == kind]
        assert all(later - earlier >= 10_000_000 for earlier, later in pairwise(asked)), kind


def until(condition: Callable[[], bool]) -> None:
    """Wait for the watch's thread, whose own waiting is real."""
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_run_is_asked_to_end_before_its_cap_and_once(tmp_path: Path) -> None:
    world = World()
    journal = begun(tmp_path, world)
    take(journal, world)
    asked: list[int] = []
    deadline, _ = deadline_us(journal.load())
    world.clock.us = deadline - 1_000_000
    with RentalWatch(journal, WorldProvider(world), lambda: asked.append(1), world.clock) as watch:
        assert watch.stopped_by == ""
        world.clock.us = deadline + 1_000_000
        until(lambda: bool(asked))
    assert asked == [1]
    assert watch.stopped_by == "money"
    assert not watch.gone.is_set()


def test_a_machine_that_its_provider_took_back_is_seen_to_be_gone_at_the_second_look(tmp_path: Path) -> None:
    world = World()
    journal = begun(tmp_path, world)
    take(journal, world)
    world.machines[0].gone_us = world.clock.now_us()
    with RentalWatch(journal, WorldProvider(world), lambda: None, world.clock) as watch:
        for _ in range(3):
            before = len(world.calls)
            world.clock.sleep(130)
            until(lambda before=before: len(world.calls) > before or watch.gone.is_set())  # type: ignore[misc]
        assert watch.gone.is_set()


def test_a_provider_that_is_away_does_not_end_a_run(tmp_path: Path) -> None:
    world = World()
    journal = begun(tmp_path, world)
    take(journal, world)
    world.faults.away = 1000
    with RentalWatch(journal, WorldProvider(world), lambda: None, world.clock) as watch:
        for _ in range(3):
            before = len(world.calls)
            world.clock.sleep(130)
            until(lambda before=before: len(world.calls) > before)  # type: ignore[misc]
        assert not watch.gone.is_set()


def test_a_machine_whose_run_goes_on_at_the_cap_is_given_back_though_its_provider_was_away(tmp_path: Path) -> None:
    """Its host says for ever that the run has not ended, and does not hear that it shall."""
    world = World()
    journal = begun(tmp_path, world)
    take(journal, world)
    deadline, _ = deadline_us(journal.load())

    def broken() -> None:
        raise RuntimeError

    world.clock.us = deadline + 1_000_000
    with RentalWatch(journal, WorldProvider(world), broken, world.clock) as watch:
        until(lambda: bool(watch.stopped_by))
        assert world.running == ["m1"]
        world.faults.away = 2
        world.clock.us = deadline + 301_000_000
        while not watch.gone.is_set():
            before = len(world.calls)
            until(lambda before=before: len(world.calls) > before or watch.gone.is_set())  # type: ignore[misc]
            assert watch.is_alive()
            world.clock.sleep(POLL_S + 1)
    assert world.running == []
    assert [what for what, _ in world.calls].count("give_back") == 3
    assert cost_at_most(journal, world, "2.05")
    renter(journal, world).give_back()
    assert journal.load().over


def cost_at_most(journal: Journal, world: World, dollars: str) -> bool:
    return journal.load().cost_usd(world.clock.now_us()) <= Decimal(dollars)


def test_a_defect_of_ours_is_said_to_leave_the_machine_and_no_run_is_ended_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    journal = begun(tmp_path, world)
    take(journal, world)

    def broken(self: WorldProvider, *_given: object) -> None:
        world.calls.append(("find", world.clock.now_us()))
        raise InvalidOperation("a number of 10^9 digits, which is not to be shown")

    with monkeypatch.context() as patch:
        patch.setattr(WorldProvider, "find", broken)
        with RentalWatch(journal, WorldProvider(world), lambda: None, world.clock) as watch:
            for _ in range(3):
                before = len(world.calls)
                world.clock.sleep(130)
                until(lambda before=before: len(world.calls) > before)  # type: ignore[misc]
            assert watch.is_alive()
            assert not watch.gone.is_set()
        patch.setattr(WorldProvider, "give_back", broken)
        with pytest.raises(PeerError) as caught:
            renter(journal, world).give_back()
    assert caught.value.code is Code.RENTAL_LEFT
    assert "InvalidOperation" in caught.value.message
    assert "digits" not in caught.value.message
    renter(journal, world).give_back()
    assert world.running == []


def test_a_machine_that_boots_beyond_the_money_is_ended_by_the_cap_and_not_by_its_boot_deadline(tmp_path: Path) -> None:
    world = World(faults=Faults(never_boots=9))
    journal = begun(tmp_path, world, Caps(usd=Decimal("0.30"), seconds=4 * 3600, boot_s=3 * 3600))
    with pytest.raises(UsageError) as caught:
        take(journal, world)
    assert caught.value.code is Code.CAP_REACHED
    assert "money" in caught.value.message
    assert journal.load().stopped_by == "money"
    renter(journal, world).give_back()  # as the command does that fails
    assert world.running == []
    assert cost_at_most(journal, world, "0.30")


@pytest.mark.parametrize(("boots_in_s", "given_up_after_s"), [(40, 600), (590, 650)])
def test_booting_and_logging_in_share_one_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boots_in_s: float, given_up_after_s: float
) -> None:
    world = World(boot_s=boots_in_s)
    journal, home = begun(tmp_path, world), Home(path=tmp_path)
    write_private(journal.key, private_key())

    class Refusing:
        name = "world:c0ffee00"

        def check(self) -> None:
            raise PeerError(Code.PLACE_UNREACHABLE, "connection refused")

    monkeypatch.setattr(rental_watch, "provider_for", lambda *_of: WorldProvider(world))
    monkeypatch.setattr(rented_machine, "tag_prefix", lambda _home: OWNER)
    monkeypatch.setattr(known_machines, "place_of", lambda *_of: Refusing())
    machine, provider = replace(NO_MACHINE, options=OPTIONS, caps=CAPS), WorldProvider(world)
    rented_machine.take(home, journal, provider, provider.offers(OPTIONS), machine, clock=world.clock)
    with pytest.raises(PlatformError) as caught:
        known_machines.log_in(home, journal, profile=Profile.STANDARD, interrupt=interrupt, clock=world.clock)
    assert caught.value.code is Code.BOOT_FAILED
    (attempt,) = journal.load().attempts
    assert 0 <= (world.clock.now_us() - attempt.asked_us) / 1e6 - given_up_after_s <= 4 * POLL_S


def test_a_machine_that_is_up_and_silent_is_ended_by_the_cap_while_it_is_logged_in_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host takes the login and says nothing: what waits for it hears of the cap by a signal."""
    world = World()
    journal, home = begun(tmp_path, world), Home(path=tmp_path)
    write_private(journal.key, private_key())

    class Silent:
        name = "world:c0ffee00"

        def check(self) -> None:
            deadline, _ = deadline_us(journal.load())
            world.clock.us = deadline + 1_000_000
            time.sleep(50)

    monkeypatch.setattr(rental_watch, "provider_for", lambda *_of: WorldProvider(world))
    monkeypatch.setattr(rented_machine, "tag_prefix", lambda _home: OWNER)
    monkeypatch.setattr(known_machines, "place_of", lambda *_of: Silent())
    machine = replace(NO_MACHINE, options=OPTIONS, caps=CAPS)
    provider = WorldProvider(world)
    rented_machine.take(home, journal, provider, provider.offers(OPTIONS), machine, clock=world.clock)
    with pytest.raises(KeyboardInterrupt), stoppable():
        known_machines.log_in(home, journal, profile=Profile.STANDARD, interrupt=interrupt, clock=world.clock)
    assert journal.load().stopped_by == "money"


def private_key() -> bytes:
    openssh = serialization.PrivateFormat.OpenSSH
    return Ed25519PrivateKey.generate().private_bytes(serialization.Encoding.PEM, openssh, serialization.NoEncryption())


@pytest.mark.parametrize("hours", [-10, 10])
def test_a_clock_that_is_set_moves_no_cap_of_a_process_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    world, before_us = World(), SystemClock().now_us()
    world.clock.us = before_us
    journal = begun(tmp_path, world)
    take(journal, world)
    right_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: right_ns() + hours * 3_600_000_000_000)
    monkeypatch.setattr(time, "time", lambda: right_ns() / 1e9 + hours * 3600)
    assert abs(SystemClock().now_us() - before_us) < 600_000_000
    with RentalWatch(journal, WorldProvider(world), lambda: None, SystemClock()) as watch:
        watch.join(1.5)  # of three looks
    assert watch.stopped_by == ""
    assert world.running == ["m1"]


def test_a_machine_that_slept_has_used_up_its_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    before_us, real = SystemClock().now_us(), time.clock_gettime_ns
    slept = getattr(time, "CLOCK_BOOTTIME", None)
    monkeypatch.setattr(
        time, "clock_gettime_ns", lambda which: real(which) + (7_200_000_000_000 if which == slept else 0)
    )
    assert SystemClock().now_us() - before_us >= 7_200_000_000 or slept is None


def test_a_machine_that_was_started_anew_has_lost_the_run_though_its_provider_says_that_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    journal = begun(tmp_path, world)
    nonce, provider = take(journal, world).nonce, WorldProvider(world)
    printed = f"{provider.output('m1')}{READY} {nonce} ssh-ed25519 {'B' * 68}\n"
    monkeypatch.setattr(provider, "output", lambda _machine: printed)
    with RentalWatch(journal, provider, lambda: None, world.clock) as watch:
        for _ in range(3):
            before = len(world.calls)
            world.clock.sleep(130)
            until(lambda before=before: len(world.calls) > before or watch.gone.is_set())  # type: ignore[misc]
        until(watch.gone.is_set)
    assert world.running == ["m1"]
