"""Second parts of bodies: who keeps a place while they arrive, and who loses it to whom."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from glasshouse.broker.http import intake, rests
from glasshouse.broker.http.intake import Intake
from glasshouse.broker.http.rests import RESTS_OF_LAUNCH, Rests
from glasshouse.errors import Code, PeerError

SIZE = 400 * 1024


@dataclass
class Line:
    """A connection that brings what the story says."""

    came: int = 0
    is_cut: bool = False

    def arrived(self) -> int:
        return self.came

    def cut(self) -> None:
        self.is_cut = True


@dataclass
class Gate:
    """The places, at a time of the story's."""

    now_s: float = 0.0
    charged: list[str] = field(default_factory=list)
    stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.rests = Rests(lambda address, _seconds: self.charged.append(address), lambda: self.now_s)

    def begin(self, address: str, *, came: int = 0, of: str = "launch", size: int = SIZE) -> Line:
        line = Line(came)
        self.stack.enter_context(self.rests.place(line, address=address, of=of, size=size))
        return line


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    with made.stack:
        yield made


def test_a_replayer_who_begins_a_hundred_a_second_ends_no_honest_body(gate: Gate) -> None:
    """From the same address, and with some bytes each time; the runtime is far away, and its bytes come in bursts."""
    for _ in range(2 * RESTS_OF_LAUNCH):
        gate.begin("shared", came=1000)
        gate.now_s += 0.01
    honest = gate.begin("shared", came=6_000)
    while honest.came < SIZE:
        for _ in range(10):
            gate.now_s += 0.01
            gate.begin("shared", came=1000)
        assert not honest.is_cut
        honest.came += 28_000


def test_a_replayer_elsewhere_takes_only_its_own_places(gate: Gate) -> None:
    """However fast it sends, and though nothing of the honest body is here yet."""
    honest = gate.begin("honest")
    elsewhere = []
    for _ in range(3 * RESTS_OF_LAUNCH):
        gate.now_s += 0.01
        elsewhere.append(gate.begin("elsewhere", came=SIZE - 1))
    assert not honest.is_cut
    assert sum(not line.is_cut for line in elsewhere) == RESTS_OF_LAUNCH - 1


def test_what_was_sent_at_once_and_then_held_back_gives_way(gate: Gate) -> None:
    held = [gate.begin(f"replayer {number}", came=SIZE - 1) for number in range(RESTS_OF_LAUNCH)]
    gate.now_s += 5.0
    held[0].came = SIZE  # one that goes on
    honest = gate.begin("honest", came=50_000)
    gate.begin("another replayer")
    gate.begin("another replayer")
    assert not honest.is_cut
    assert sum(line.is_cut for line in held) == 2


def test_what_is_whole_is_left_and_what_lost_its_place_is_not_decided_on(gate: Gate) -> None:
    lines = [Line() for _ in range(RESTS_OF_LAUNCH)]
    places = [gate.stack.enter_context(gate.rests.place(line, address="a", of="launch", size=SIZE)) for line in lines]
    for place in places[1:]:
        place.whole()
    gate.begin("a", came=SIZE)
    assert [line.is_cut for line in lines] == [True] + [False] * (RESTS_OF_LAUNCH - 1)
    with pytest.raises(PeerError):
        places[0].whole()


def test_of_an_address_and_of_all_only_what_will_not_arrive_in_time_gives_way(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rests, "REST_BYTES_OF_ADDRESS", 2 * SIZE)
    monkeypatch.setattr(rests, "MOST_REST_BYTES", 3 * SIZE)
    begun = [gate.begin(address, of=address + str(number)) for number, address in enumerate(("a", "a", "b"))]
    gate.now_s += 1.0
    for line in begun:
        line.came = SIZE // 5
    for address in ("a", "c"):
        with pytest.raises(PeerError) as busy:
            gate.begin(address, of="another")
        assert busy.value.code is Code.BROKER_UNREACHABLE
    gate.now_s += 2.0
    begun[1].came = SIZE
    gate.begin("a", of="another")
    gate.begin("c", of="another")
    assert [line.is_cut for line in begun] == [True, False, True]


def test_slow_second_parts_do_not_use_up_the_requests_that_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "MOST_REQUESTS", 1)
    monkeypatch.setattr(rests, "START_S", -1.0)
    desk = Intake()
    try:
        with desk.request("a"):
            with pytest.raises(PeerError), desk.request("b"):
                pass
            with desk.rests.place(slow := Line(), address="a", of="launch", size=SIZE), desk.request("b"):
                assert slow.is_cut
    finally:
        desk.close()


def test_who_sent_what_was_signed_is_not_charged(gate: Gate) -> None:
    for is_signed in (True, False):
        with gate.rests.place(Line(), address=f"signed: {is_signed}", of="launch", size=SIZE) as place:
            place.whole()
            if is_signed:
                place.signed()
    assert gate.charged == ["signed: False"]
