"""A machine of a group waits for the others: asking the same again, believing nothing, and not for ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from glasshouse.errors import Code, GlasshouseError, PeerError, RefusedError
from glasshouse.handshake.launch import LaunchFile
from glasshouse.handshake.records import check_4_release_request, check_release_request
from glasshouse.runtime.gate import attest
from glasshouse.runtime.gate.broker_client import PendingError
from glasshouse.wire.crypto import sha256
from simulators.key_release_world import NOW_US, World

RELEASE = b"the release"
AWAY = PeerError(Code.BROKER_UNREACHABLE, "no answer in time")


class Clock:
    """A loop in which waiting takes no time of ours."""

    def __init__(self) -> None:
        self.time_s = 100.0
        self.naps: list[float] = []
        self.pending_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.time_s += seconds


class Gate:
    """Answers as a story says; its last answer again and again."""

    def __init__(self, answers: Sequence[bytes | GlasshouseError]) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[str, bytes]] = []

    def post(self, path: str, body: bytes) -> bytes:
        self.asked.append((path, body))
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, GlasshouseError):
            raise answer
        return answer


def answered(world: World, *answers: bytes | GlasshouseError) -> tuple[Callable[[], bytes], Gate, Clock]:
    gate, clock = Gate(answers), Clock()

    def ask() -> bytes:
        launch: LaunchFile = world.launch_file()
        answer, clock.pending_s = attest._answer(clock, gate, launch, world.challenge, b"evidence", world.evidence_key)  # type: ignore[arg-type]
        return answer

    return ask, gate, clock


def test_it_asks_the_same_until_there_is_a_release() -> None:
    world = World.in_group()
    ask, gate, clock = answered(world, PendingError(), PendingError(), PendingError(), RELEASE)
    assert ask() == RELEASE
    assert gate.asked[0] == ("/v1/evidence", b"evidence")
    asked = gate.asked[1:]
    assert len(asked) == 3
    assert len(set(asked)) == 1
    path, message = asked[0]
    assert path == "/v1/release"
    request, envelope = check_release_request(message)
    check_4_release_request(envelope, evidence_public=world.evidence_key.public)
    assert (request.nonce, request.evidence_sha256) == (world.challenge.nonce, sha256(b"evidence"))
    assert clock.naps == sorted(clock.naps)
    assert max(clock.naps) <= 1.0
    assert clock.pending_s == clock.time_s - clock.naps[-1], "the gate had not released when it was asked before"


def test_a_broker_that_is_away_for_a_while_is_asked_again() -> None:
    ask, gate, _ = answered(World.in_group(), PendingError(), AWAY, PendingError(), AWAY, RELEASE)
    assert ask() == RELEASE
    assert [path for path, _ in gate.asked] == ["/v1/evidence"] + 4 * ["/v1/release"]


def test_a_refusal_is_final() -> None:
    ask, gate, _ = answered(World.in_group(), PendingError(), RefusedError(Code.RANK_REFUSED, "no"))
    with pytest.raises(RefusedError) as caught:
        ask()
    assert caught.value.code is Code.RANK_REFUSED
    assert len(gate.asked) == 2


@dataclass
class Exchange:
    """What `attest` sent, and what became of it."""

    world: World
    challenges: Gate
    evidence: Gate
    clock: Clock = field(default_factory=Clock)
    made: list[bytes] = field(default_factory=list)
    since_s: float = 0.0

    def post(self, path: str, body: bytes) -> bytes:
        return {"/v1/challenge": self.challenges, "/v1/evidence": self.evidence}[path].post(path, body)


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Exchange]:
    """Run `attest` where evidence, and challenge requests before they are answered, are met as told."""

    def run(evidence: Sequence[bytes | GlasshouseError], challenges: Sequence[GlasshouseError] = ()) -> Exchange:
        world = World()
        met = Exchange(world, Gate([*challenges, world.challenge.encode()]), Gate(evidence))
        monkeypatch.setattr(attest, "now_us", lambda: NOW_US)
        monkeypatch.setattr(attest, "evidence_message", lambda *_, **__: b"evidence %d" % len(met.made))
        monkeypatch.setattr(attest, "check_release", lambda answer, *_, **__: answer)
        found = attest.attest(
            loop=met.clock,  # type: ignore[arg-type]
            gate=met,  # type: ignore[arg-type]
            launch=world.launch_file(),
            manifest=SimpleNamespace(sha256=bytes(32), floor=None),  # type: ignore[arg-type]
            evidence_key=world.evidence_key,
            attester=lambda _challenge, _now_us: (None, {}),  # type: ignore[arg-type,return-value]
            sent=lambda evidence, _hardware: met.made.append(evidence),
        )
        assert found[:2] == (met.made[-1], RELEASE)
        met.since_s = found[2]
        return met

    return run


USED = RefusedError(Code.NONCE_REPLAYED, "used")
SWEPT = RefusedError(Code.NONCE_UNKNOWN, "unknown")
OVER = RefusedError(Code.NONCE_EXPIRED, "over")


def test_evidence_for_a_challenge_that_is_used_or_over_is_made_anew_for_another(
    exchange: Callable[..., Exchange],
) -> None:
    """A reader on the way may have sent a copy first, or held it back."""
    met = exchange([USED, SWEPT, OVER, RELEASE])
    assert [body for _, body in met.evidence.asked] == met.made
    assert len(set(met.challenges.asked)) == len(met.made) == 4, "a challenge of its own each time"


def test_evidence_whose_answer_was_lost_is_sent_again_for_the_same_challenge(
    exchange: Callable[..., Exchange],
) -> None:
    """A launch may have few challenges open, and each that nothing arrived for stays so for two minutes."""
    met = exchange([AWAY] * 6 + [RELEASE])
    assert met.evidence.asked == [("/v1/evidence", b"evidence 0")] * 7
    assert len(met.challenges.asked) == len(met.made) == 1
    assert met.since_s == 100.0 < met.clock.time_s, "the lease runs from when it was sent first"


def test_evidence_that_arrived_although_its_answer_was_lost_is_made_anew(exchange: Callable[..., Exchange]) -> None:
    met = exchange([AWAY, AWAY, USED, AWAY, RELEASE])
    assert [body[-1:] for _, body in met.evidence.asked] == [b"0", b"0", b"0", b"1", b"1"]
    assert len(met.challenges.asked) == 2


def test_a_challenge_whose_answer_was_lost_is_asked_for_again_in_the_same_words(
    exchange: Callable[..., Exchange],
) -> None:
    """It is one challenge then, however many answers get lost: a launch may hold few of them."""
    met = exchange([USED, RELEASE], [AWAY, AWAY, AWAY])
    assert [met.challenges.asked.count(one) for one in dict.fromkeys(met.challenges.asked)] == [4, 1]


@pytest.mark.parametrize("refusal", [USED, AWAY, RefusedError(Code.MEASUREMENT_UNKNOWN, "no")])
def test_a_refusal_of_the_exchange_is_final_at_last(
    exchange: Callable[..., Exchange], refusal: GlasshouseError
) -> None:
    with pytest.raises(type(refusal)) as caught:
        exchange([refusal])
    assert caught.value.code is refusal.code


@pytest.mark.parametrize("last", [PendingError(), AWAY])
def test_it_does_not_wait_for_ever_whatever_the_broker_says(last: PeerError) -> None:
    """The lifetime of its challenge and half a minute, by its own clock: no deadline of the broker's is believed."""
    world = World.in_group()
    ask, _, clock = answered(world, PendingError(), last)
    with pytest.raises(PeerError) as caught:
        ask()
    assert caught.value.code is last.code
    lifetime_s = (world.challenge.expires_us - world.challenge.issued_us) / 1e6
    assert lifetime_s + 30 < sum(clock.naps) < lifetime_s + 35


@pytest.mark.parametrize("world", [World(), World.in_group(machine=0, machines=1)])
def test_who_has_nobody_to_wait_for_is_not_made_to(world: World) -> None:
    ask, gate, _ = answered(world, PendingError())
    with pytest.raises(PeerError) as caught:
        ask()
    assert caught.value.code is Code.BROKER_PROTOCOL
    assert len(gate.asked) == 1


def test_a_challenge_that_was_over_before_its_answer_arrived_is_not_asked_for_again() -> None:
    """The machine was suspended between request and answer: the same request is refused for good."""
    world, clock = World.in_group(), Clock()
    gate = Gate([AWAY, RefusedError(Code.NONCE_EXPIRED, "a challenge that has expired")])
    with pytest.raises(RefusedError):
        attest.attest(
            loop=clock,  # type: ignore[arg-type]
            gate=gate,  # type: ignore[arg-type]
            launch=world.launch_file(),
            manifest=None,  # type: ignore[arg-type]
            evidence_key=world.evidence_key,
            attester=lambda challenge, now_us: pytest.fail("there is no challenge"),
            sent=lambda evidence, hardware: None,
        )
    lost, again, *others = [body for _, body in gate.asked]
    assert lost == again, "nothing was answered"
    assert len({again, *others}) == 1 + len(others) > 2, "and then another request each time"
