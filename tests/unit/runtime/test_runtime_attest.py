"""A machine of a group waits for the others: asking the same again, believing nothing, and not for ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from glasshouse.errors import Code, GlasshouseError, PeerError, RefusedError
from glasshouse.handshake.group_rules import check_4_release_request, check_release_request
from glasshouse.handshake.launch import LaunchFile
from glasshouse.runtime import attest
from glasshouse.runtime.gate import PendingError
from glasshouse.wire.kdf import sha256
from simulators.key_release_world import NOW_US, World

RELEASE = b"the release"
AWAY = PeerError(Code.BROKER_UNREACHABLE, "no answer in time")


class Clock:
    """A loop in which waiting takes no time of ours."""

    def __init__(self) -> None:
        self.time_s = 100.0
        self.naps: list[float] = []

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
        return attest._answer(clock, gate, launch, world.challenge, b"evidence", world.evidence_key)  # type: ignore[arg-type]

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


def attested(
    monkeypatch: pytest.MonkeyPatch, evidence: Sequence[object], *challenges: bytes | GlasshouseError
) -> tuple[object, Gate, Clock]:
    """Run `attest` where challenge requests and pieces of evidence are answered as told."""
    world, clock, left = World(), Clock(), list(evidence)

    def once(*_arguments: object) -> object:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, GlasshouseError):
            raise answer
        return answer

    monkeypatch.setattr(attest, "_once", once)
    monkeypatch.setattr(attest, "now_us", lambda: NOW_US)
    gate, launch = Gate([*challenges, world.challenge.encode()]), world.launch_file()
    unused: dict[str, object] = dict.fromkeys(("manifest", "evidence_key", "claims", "sent"))
    found = attest.attest(loop=clock, gate=gate, launch=launch, **unused)  # type: ignore[arg-type]
    return found, gate, clock


USED = RefusedError(Code.NONCE_REPLAYED, "used")


def test_evidence_that_a_reader_sent_first_is_made_anew_for_another_challenge(monkeypatch: pytest.MonkeyPatch) -> None:
    swept = RefusedError(Code.NONCE_UNKNOWN, "unknown")
    found, gate, clock = attested(monkeypatch, [USED, swept, USED, RELEASE])
    assert found == RELEASE
    assert len(clock.naps) == 3
    assert len(set(gate.asked)) == 4, "a challenge of its own each time"


def test_a_challenge_whose_answer_was_lost_is_asked_for_again_in_the_same_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is one challenge then, however many answers get lost: a launch may hold few of them."""
    found, gate, _ = attested(monkeypatch, [AWAY, RELEASE], AWAY, AWAY, AWAY)
    assert found == RELEASE
    assert [gate.asked.count(one) for one in dict.fromkeys(gate.asked)] == [4, 1]


@pytest.mark.parametrize("refusal", [USED, RefusedError(Code.MEASUREMENT_UNKNOWN, "no")])
def test_a_refusal_of_the_exchange_is_final_at_last(monkeypatch: pytest.MonkeyPatch, refusal: RefusedError) -> None:
    with pytest.raises(RefusedError) as caught:
        attested(monkeypatch, [refusal])
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
