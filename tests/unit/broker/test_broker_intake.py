"""What strangers send is read off the deciding thread, within bounds, and the cheap and well-behaved first."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from glasshouse.broker.decide.decisions import Effect
from glasshouse.broker.http import intake
from glasshouse.broker.http.connections import address_of
from glasshouse.broker.http.intake import Intake, Pace, Shares
from glasshouse.errors import Code, FormatError, PeerError

HONEST, STRANGER, NEW = "192.0.2.1", "203.0.113.9", "192.0.2.7"


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def shares(clock: Clock) -> Shares:
    return Shares(clock)


@pytest.fixture
def desk(shares: Shares) -> Iterator[Intake]:
    made = Intake(shares)
    yield made
    made.close()


def refuse() -> None:
    raise FormatError(Code.MESSAGE_INVALID, "no")


def test_an_address_that_costs_too_much_for_nothing_waits_until_it_has_paid(shares: Shares, clock: Clock) -> None:
    assert shares.rank(STRANGER) == 1
    shares.charge(STRANGER, intake.BURST_S + 0.1)
    assert shares.rank(STRANGER) == 2
    assert shares.rank(HONEST) == 1
    clock.now_s += 0.2 / intake.SHARE
    assert shares.rank(STRANGER) == 1


def test_an_address_is_known_for_a_while_by_what_was_authentic(shares: Shares, clock: Clock) -> None:
    shares.credit(HONEST)
    assert shares.rank(HONEST) == 0
    shares.charge(HONEST, 1.0)
    assert shares.rank(HONEST) == 2, "which is no licence"
    clock.now_s += intake.KNOWN_FOR_S + 1
    assert shares.rank(HONEST) == 1


def test_going_through_addresses_costs_no_memory(shares: Shares, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "MOST_ADDRESSES", 10)
    for number in range(100):
        shares.charge(f"203.0.113.{number}", 1.0)
        shares.credit(f"203.0.113.{number}")
    assert len(shares._spent) == len(shares._known) == 10


def in_order(desk: Intake, *reads: tuple[str, str, int]) -> list[str]:
    """Submit messages, named, of an address and size, while the thread is held up; return the order of reading."""
    order: list[str] = []
    gate = threading.Event()

    async def run() -> None:
        held = asyncio.ensure_future(desk.read(lambda: gate.wait(10), address="first", size=0))
        await asyncio.sleep(0.01)
        tasks = [
            asyncio.ensure_future(desk.read(lambda name=name: order.append(name), address=address, size=size))
            for name, address, size in reads
        ]
        await asyncio.sleep(0.01)
        gate.set()
        await asyncio.gather(held, *tasks)

    asyncio.run(run())
    return order


def test_known_addresses_go_first_and_small_messages_before_large_ones(desk: Intake, shares: Shares) -> None:
    shares.credit(HONEST)
    shares.charge(STRANGER, 1.0)
    order = in_order(
        desk,
        ("flood", STRANGER, 124_000),
        ("head behind the flood's address", STRANGER, 1_500),
        ("large", NEW, 124_000),
        ("evidence", NEW, 6_000),
        ("head", HONEST, 1_500),
    )
    assert order == ["head", "evidence", "large", "head behind the flood's address", "flood"]


def test_of_an_address_beyond_its_share_few_messages_wait(desk: Intake, shares: Shares) -> None:
    shares.charge(STRANGER, 1.0)
    gate = threading.Event()

    async def run() -> None:
        tasks = [
            asyncio.ensure_future(desk.read(lambda: gate.wait(10), address=STRANGER, size=1))
            for _ in range(intake.LATE_OF_ADDRESS)
        ]
        await asyncio.sleep(0)
        with pytest.raises(PeerError) as caught:
            await desk.read(refuse, address=STRANGER, size=1)
        assert caught.value.code is Code.BROKER_UNREACHABLE
        other = asyncio.ensure_future(desk.read(lambda: "read", address=HONEST, size=1))
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*tasks)
        assert await other == "read"
        assert await desk.read(lambda: "read", address=STRANGER, size=1) == "read"

    asyncio.run(run())


def test_the_late_of_one_address_leave_room_for_the_late_of_another_and_of_all_for_the_rest(
    desk: Intake, shares: Shares
) -> None:
    """A machine room behind one NAT was turned away because a stranger's messages waited."""
    many = [f"203.0.113.{number}" for number in range(intake.MOST_LATE // intake.LATE_OF_ADDRESS)]
    for address in (*many, NEW):
        shares.charge(address, 1.0)
    gate = threading.Event()

    async def run() -> None:
        def waiting(address: str) -> asyncio.Future[object]:
            return asyncio.ensure_future(desk.read(lambda: gate.wait(10), address=address, size=1))

        tasks = [waiting(many[0]) for _ in range(intake.LATE_OF_ADDRESS)]
        await asyncio.sleep(0)
        tasks.append(waiting(NEW))
        await asyncio.sleep(0)
        assert not tasks[-1].done(), "it waits, and is not turned away"
        tasks += [waiting(address) for address in many[1:] for _ in range(intake.LATE_OF_ADDRESS - 1)]
        tasks += [waiting(address) for address in many[1:]][: len(many) - 2]
        await asyncio.sleep(0)
        with pytest.raises(PeerError):
            await desk.read(refuse, address=NEW, size=1)
        tasks.append(waiting(HONEST))
        gate.set()
        await asyncio.gather(*tasks)
        assert await desk.read(lambda: "read", address=NEW, size=1) == "read"
        assert not desk._late, "who waits no more is not remembered"

    asyncio.run(run())


def test_what_an_honest_runtime_repeats_is_neither_charged_nor_remembered(desk: Intake, shares: Shares) -> None:
    async def again() -> object:
        return await desk.read(lambda: 7, address=NEW, size=1, effect=lambda _: Effect.NOTHING)

    assert asyncio.run(again()) == 7
    assert (shares._owed(NEW), shares.rank(NEW)) == (0, 1)


def test_once_a_second_is_kept_and_faster_is_not() -> None:
    now_us = [10**15]
    pace = Pace(lambda: now_us[0])
    for late_us in (0, 300_000, -300_000, 0) * 5:
        now_us[0] += 1_000_000
        now_us[0] += late_us
        assert pace.kept("a")
    kept = [pace.kept("b") for _ in range(10)]
    assert kept == [True] * 3 + [False] * 7
    for _ in range(40):
        now_us[0] += 100_000
        kept.append(pace.kept("b"))
    assert sum(kept) == 3 + 4
    now_us[0] -= 3_600 * 1_000_000
    assert pace.kept("a"), "a clock that is set back takes nothing away"


def test_what_comes_to_nothing_is_charged_and_what_is_authentic_is_remembered(desk: Intake, shares: Shares) -> None:
    async def once(read: Callable[[], object], address: str) -> object:
        return await desk.read(read, address=address, size=1)

    async def again() -> object:
        return await desk.read(lambda: 7, address=NEW, size=1, effect=lambda _: Effect.CHARGE)

    assert asyncio.run(again()) == 7
    assert shares._owed(NEW) > 0
    assert shares.rank(NEW) == 1, "who plays a recording is not known by it"
    with pytest.raises(FormatError):
        asyncio.run(once(refuse, STRANGER))
    assert asyncio.run(once(lambda: 7, HONEST)) == 7
    assert shares._owed(STRANGER) > 0
    assert shares._owed(HONEST) == 0
    assert (shares.rank(HONEST), shares.rank(STRANGER)) == (0, 1)


def test_room_is_kept_for_addresses_that_are_known(desk: Intake, shares: Shares) -> None:
    shares.credit(HONEST)
    with ExitStack() as stack:
        for _ in range(intake.MOST_REQUESTS):
            stack.enter_context(desk.request(STRANGER))
        with pytest.raises(PeerError):
            stack.enter_context(desk.request(STRANGER))
        for _ in range(intake.RESERVED_REQUESTS):
            stack.enter_context(desk.request(HONEST))
        with pytest.raises(PeerError):
            stack.enter_context(desk.request(HONEST))
    with desk.request(STRANGER):
        pass


@pytest.mark.parametrize(
    ("host", "address"),
    [
        (None, ""),
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("not:an:address", "not:an:address"),
    ],
)
def test_one_party_has_one_address_whatever_it_numbers_itself(host: str | None, address: str) -> None:
    assert address_of(host) == address
