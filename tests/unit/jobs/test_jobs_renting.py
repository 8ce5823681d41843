"""An owner rents and gives back, whatever fails in between; a clock of the test's own tells the time."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import pytest

from glasshouse.errors import Code, GlasshouseError, PeerError, PlatformError, UsageError
from glasshouse.jobs.owner.home import Home, write_private
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.places.rent import Renter
from glasshouse.jobs.places.rental_journal import POLL_S, Attempt, Journal, Rental, Step
from glasshouse.jobs.places.rented_machine import NO_MACHINE, begin
from glasshouse.providers.rental.provider import Offer, Start
from tests.simulators.rental_world import (
    HOST_KEY,
    OPTIONS,
    OWNER,
    Faults,
    Killed,
    World,
    WorldProvider,
    begun,
    offer,
    renter,
    take,
)


def test_a_machine_is_rented_pinned_and_given_back_with_proof_and_bill(tmp_path: Path) -> None:
    world = World()
    journal = begun(tmp_path, world)
    up = take(journal, world)
    assert (up.step, up.machine, up.host, up.host_key) == (Step.UP, "m1", "127.0.0.1", HOST_KEY)
    assert journal.known_hosts.read_text() == f"{OWNER}c0ffee00-1 {HOST_KEY}\n"
    assert journal.known_hosts.stat().st_mode & 0o777 == 0o600
    world.clock.sleep(3600)
    renter(journal, world).give_back()
    rental = journal.load()
    assert world.running == []
    assert rental.over
    assert rental.attempts[0].bill_usd == world.machines[0].offer.usd_per_hour * (3600 + 45) / 3600
    assert rental.cost_usd(world.clock.now_us()) >= rental.attempts[0].bill_usd
    assert not journal.known_hosts.exists()
    # Gone by id and in two listings, some time apart.
    given = next(us for what, us in world.calls if what == "give_back")
    listings = [us for what, us in world.calls if what == "tagged" and us >= given]
    assert len(listings) >= 2
    assert listings[-1] - listings[0] >= 20_000_000


CALLS = ("rent", "find", "output", "give_back", "tagged", "bill")


def whole(journal: Journal, world: World) -> None:
    take(journal, world)
    world.clock.sleep(60)
    renter(journal, world).give_back()


def swept(journal: Journal, world: World) -> None:
    """What a later process does that finds the journal."""
    renter(journal, world).give_back()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "faults",
    [
        Faults(),
        Faults(lost_answers=1, listed_after_s=60),
        Faults(stops_at_boot=1),
        Faults(lies_about_deletion=1, stale_s=60),
    ],
    ids=["plain", "lost-answer", "first-stops", "lies"],
)
def test_an_owner_killed_at_any_call_leaves_nothing_after_a_sweep(tmp_path: Path, faults: Faults, after: bool) -> None:
    deaths = 0
    for number in range(1, 200):
        folder = tmp_path / str(number)
        folder.mkdir()
        world = World(faults=replace(faults), dies_at=number, after=after)
        journal = begun(folder, world)
        try:
            whole(journal, world)
        except Killed:
            deaths += 1
        if len(world.calls) < number:
            break
        swept(journal, world)
        assert world.running == [], (number, world.calls)
        assert journal.load().over
    assert deaths >= (2 if after else 8)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_owner_killed_at_any_journalled_step_leaves_nothing_after_a_sweep(
    tmp_path: Path, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, number, deaths = Journal.save, 0, 0
    while True:
        number += 1
        folder = tmp_path / str(number)
        folder.mkdir()
        world, left = World(faults=Faults(lost_answers=1, listed_after_s=60)), number
        journal = begun(folder, world)

        def save(self: Journal, rental: Rental, number: int = number) -> Rental:
            nonlocal left
            left -= 1
            if left == 0 and not after:
                raise Killed
            real(self, rental)
            if left == 0:
                raise Killed
            return rental

        monkeypatch.setattr(Journal, "save", save)
        try:
            whole(journal, world)
        except Killed:
            deaths += 1
        monkeypatch.setattr(Journal, "save", real)
        if left > 0:
            break
        swept(journal, world)
        assert world.running == [], number
        assert journal.load().over
    assert deaths >= 5


def test_a_lost_answer_is_looked_for_until_the_listing_must_have_it(tmp_path: Path) -> None:
    world = World(faults=Faults(lost_answers=1, listed_after_s=60))
    journal = begun(tmp_path, world)
    up = take(journal, world)
    assert up.machine == "m1"
    assert [one.id for one in world.machines] == ["m1"]
    asked = [us for what, us in world.calls if what == "tagged"]
    assert all(later - earlier >= POLL_S * 1e6 for earlier, later in pairwise(asked))


def test_a_lost_answer_without_a_machine_is_over_only_when_the_listing_has_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()

    def lost(self: WorldProvider, chosen: object, start: object) -> str:
        from glasshouse.providers.rental.provider import UncertainError

        raise UncertainError("world", "the connection ended")

    monkeypatch.setattr(WorldProvider, "rent", lost)
    journal = begun(tmp_path, world)
    begun_us = world.clock.now_us()
    with pytest.raises(PlatformError) as caught:
        take(journal, world)
    assert caught.value.code is Code.NO_OFFER
    assert [one.step for one in journal.load().attempts] == [Step.NEVER, Step.NEVER]
    assert world.clock.now_us() - begun_us >= 2 * WorldProvider.settles_s * 1e6


def test_a_provider_that_is_away_after_a_lost_answer_leaves_it_open_and_says_so(tmp_path: Path) -> None:
    world = World(faults=Faults(lost_answers=1))
    journal = begun(tmp_path, world)

    def dies(_self: WorldProvider, _prefix: str) -> list[object]:
        raise PeerError(Code.PROVIDER_UNREACHABLE, "world does not answer (timeout)")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorldProvider, "tagged", dies)
        with pytest.raises(PeerError):
            take(journal, world)
        with pytest.raises(PeerError) as caught:
            renter(journal, world).give_back()
    assert caught.value.code is Code.RENTAL_LEFT
    assert "sweep" in caught.value.hint
    assert journal.load().attempts[0].step is Step.ASKED
    swept(journal, world)
    assert world.running == []


@pytest.mark.parametrize(
    ("faults", "says"),
    [
        (Faults(never_boots=1), "was not up within 600 s"),
        (Faults(stops_at_boot=1), "stopped before it was up: no such image"),
    ],
)
def test_one_that_does_not_come_up_is_given_back_and_the_next_offer_is_taken(
    tmp_path: Path, faults: Faults, says: str
) -> None:
    world = World(faults=faults)
    journal = begun(tmp_path, world)
    up = take(journal, world)
    assert (up.machine, up.offer.id) == ("m2", "larger")
    first = journal.load().attempts[0]
    assert first.step is Step.GONE
    assert says in first.why
    assert world.running == ["m2"]


@pytest.mark.parametrize(
    ("faults", "code", "says"),
    [
        (Faults(gone_offers=9), Code.NO_OFFER, "was taken by someone else"),
        (Faults(never_boots=9), Code.BOOT_FAILED, "was not up within"),
        (Faults(no_sshd=True), Code.BOOT_FAILED, "its image has no sshd"),
        (Faults(no_host_key=True), Code.BOOT_FAILED, "was not up within"),
        (Faults(dearer=Decimal("0.95")), Code.BOOT_FAILED, "costs 0.950 $ an hour, and 0.600 were shown"),
    ],
)
def test_where_none_can_be_had_the_reasons_are_named_and_nothing_is_left(
    tmp_path: Path, faults: Faults, code: Code, says: str
) -> None:
    world = World(faults=faults)
    journal = begun(tmp_path, world)
    with pytest.raises(PlatformError) as caught:
        take(journal, world)
    assert caught.value.code is code
    assert says in caught.value.message
    assert world.running == []
    assert journal.load().over


def test_a_machine_without_a_printed_host_key_is_taken_only_by_the_owners_word(tmp_path: Path) -> None:
    world = World(faults=Faults(no_host_key=True))
    journal = begun(tmp_path, world)
    up = take(journal, world, accept=True)
    assert up.host_key is None
    assert up.up_us is not None


def test_one_that_is_listed_for_ever_after_it_was_given_back_is_said_to_be_left(tmp_path: Path) -> None:
    world = World(faults=Faults(lies_about_deletion=1000))
    journal = begun(tmp_path, world)
    take(journal, world)
    with pytest.raises(PeerError) as caught:
        renter(journal, world).give_back()
    assert caught.value.code is Code.RENTAL_LEFT
    assert "m1" in caught.value.message
    assert "0.60 $ an hour" in caught.value.message
    assert journal.load().attempts[0].step is Step.RETURNING
    world.faults.lies_about_deletion = 0
    swept(journal, world)
    assert world.running == []


def test_a_provider_that_is_away_for_minutes_is_asked_again_while_a_machine_is_given_back(tmp_path: Path) -> None:
    world = World()
    journal = begun(tmp_path, world)
    take(journal, world)
    world.faults.away = 20
    renter(journal, world).give_back()
    assert world.running == []


def test_an_account_that_is_refused_ends_at_once_and_nothing_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()

    def refused(self: WorldProvider, chosen: object, start: object) -> str:
        raise UsageError(Code.PROVIDER_MONEY, "world says that the account has no money for it")

    monkeypatch.setattr(WorldProvider, "rent", refused)
    journal = begun(tmp_path, world)
    with pytest.raises(UsageError) as caught:
        take(journal, world)
    assert caught.value.code is Code.PROVIDER_MONEY
    assert [one.step for one in journal.load().attempts] == [Step.NEVER]


@pytest.mark.parametrize("problem", [BrokenPipeError(), OSError(5, "the terminal has gone")])
def test_a_reader_who_has_gone_keeps_no_machine(tmp_path: Path, problem: OSError) -> None:
    world = World(faults=Faults(lost_answers=1))
    journal = begun(tmp_path, world)

    def gone(_text: str) -> None:
        raise problem

    provider = WorldProvider(world)
    spoken = Renter(journal, provider, clock=world.clock, say=gone)
    spoken.take(provider.offers(OPTIONS), OPTIONS, owner=OWNER, ssh_public="ssh-ed25519 AAAA")
    spoken.give_back()
    assert world.running == []
    assert journal.load().over


def test_a_lost_answer_is_looked_for_from_the_moment_of_its_loss_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(faults=Faults(lost_answers=1, listed_after_s=3600 + 80))
    journal = begun(tmp_path, world)
    real = WorldProvider.rent

    def slow(self: WorldProvider, chosen: Offer, start: Start) -> str:
        try:
            return real(self, chosen, start)
        finally:
            world.clock.sleep(3600)  # an answer that took so long, or a clock that was set

    monkeypatch.setattr(WorldProvider, "rent", slow)
    up = take(journal, world)
    assert (up.machine, len(world.machines)) == ("m1", 1)
    renter(journal, world).give_back()
    assert world.running == []


def test_two_machines_of_one_request_are_both_given_back(tmp_path: Path) -> None:
    world = World()
    journal = begun(tmp_path, world)
    take(journal, world)
    world.machines.append(replace(world.machines[0], id="m2"))
    renter(journal, world).give_back()
    assert world.running == []
    assert journal.load().over


@pytest.mark.parametrize("known_after_s", [0.0, 75.0])
def test_what_a_refusal_made_is_not_used_and_given_back_also_where_it_appears_later(
    tmp_path: Path, known_after_s: float
) -> None:
    world = World(faults=Faults(refused_and_made=1, known_after_s=known_after_s))
    journal = begun(tmp_path, world)
    up = take(journal, world)
    assert (up.machine, world.running) == ("m2", ["m2"])
    first = journal.load().attempts[0]
    assert (first.machine, first.step) == ("m1", Step.GONE)
    assert "refused and made m1" in first.why


@pytest.mark.parametrize("lost", [False, True], ids=["made", "asked"])
def test_another_account_that_does_not_find_a_machine_says_nothing_of_it(tmp_path: Path, lost: bool) -> None:
    world = World(dies_at=2 if lost else 0, after=True)
    journal = begun(tmp_path, world)
    journal.update(account=f"own of {journal.load().run_id}")
    with contextlib.suppress(Killed):
        take(journal, world)
    (machine,) = world.running
    before = journal.load()
    with pytest.raises(PeerError) as caught:
        Renter(journal, WorldProvider(world, "other"), clock=world.clock).give_back()
    assert caught.value.code is Code.RENTAL_LEFT
    assert "another account" in caught.value.message
    assert [one.step for one in journal.load().attempts] == [one.step for one in before.attempts]
    assert world.running == [machine]
    # A new key of the same account is another one too, and finds it.
    Renter(journal, WorldProvider(world, "own again"), clock=world.clock).give_back()
    assert world.running == []
    assert journal.load().over


def test_a_journal_says_by_which_account_and_address_it_is_rented_and_not_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    home, key = Home(path=tmp_path), "0123456789abcdef-a-key"
    for name in ("VAST_API_KEY", "VAST_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("glasshouse.jobs.places.accounts._taken", {})
    (tmp_path / "any.pyz").write_bytes(b"")
    machine = replace(NO_MACHINE, bundle=tmp_path / "any.pyz")
    said = []
    for given, url in ((key, None), (key, None), (key, "https://127.0.0.1:9"), (key + "2", None)):
        home.accounts.mkdir(mode=0o700, exist_ok=True)
        write_private(home.accounts / "vast", given.encode())
        if url is None:
            monkeypatch.delenv("VAST_URL", raising=False)
        else:
            monkeypatch.setenv("VAST_URL", url)
        journal = begin(home, RunFolder(tmp_path / "runs" / ("c0ffee00" * 4)), "vast", machine)
        assert key not in (journal.path / "rental.json").read_text()
        said.append(journal.load().account)
    assert all(said)
    assert said[0] == said[1]
    assert len(set(said)) == 3


@pytest.mark.parametrize("step", [Step.MADE, Step.RETURNING])
def test_a_disk_without_room_keeps_no_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: Step) -> None:
    world = World(faults=Faults(lost_answers=1))
    journal = begun(tmp_path, world)
    real = Journal.note

    def full(self: Journal, tag: str, **changes: object) -> Attempt:
        if changes.get("step") in (step, Step.RETURNING):
            raise UsageError(Code.DISK_FULL, "no room to write rental.json")
        return real(self, tag, **changes)

    if step is Step.RETURNING:
        take(journal, world)
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "note", full)
        if step is Step.MADE:
            with pytest.raises(UsageError):
                take(journal, world)
        renter(journal, world).give_back()
    assert len(world.machines) == 1
    assert world.running == []
    assert journal.load().over


def test_a_machine_that_runs_and_has_no_price_is_given_back(tmp_path: Path) -> None:
    world = World(faults=Faults(unpriced=1))
    journal = begun(tmp_path, world)
    up = take(journal, world)
    assert up.machine == "m2"
    assert "lists no price of m1" in journal.load().attempts[0].why
    assert world.running == ["m2"]


def test_a_journal_comes_back_as_it_was_written_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    world = World()
    journal = begun(tmp_path, world)
    take(journal, world)
    renter(journal, world).give_back()
    rental = journal.load()
    assert Rental.from_json(rental.to_json()) == rental
    record = journal.path / "rental.json"
    record.write_text(record.read_text().replace('"0.60"', '"cheap"'))
    with pytest.raises(GlasshouseError) as caught:
        journal.load()
    assert "gh-" in caught.value.hint
    assert offer().usd_per_hour == Decimal("0.60")
