"""Heads on their way to the broker, and what becomes of a run whose broker does not answer."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

import pytest

from glasshouse.errors import Code, GlasshouseError, PeerError, RefusedError, RunError
from glasshouse.evidence.events import EventType
from glasshouse.evidence.heads import CountersignedHead, Head, HeadSubmission, countersign
from glasshouse.evidence.log import EventLog
from glasshouse.runtime.gate import head_keeper
from glasshouse.runtime.gate.head_keeper import HeadKeeper
from glasshouse.runtime.loop import Loop
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.states import Outcome, State


class Broker:
    """Countersigns as the real one does, answers when told to, and can be made to lie."""

    def __init__(self, loop: Loop, run_id: str, evidence_public: bytes) -> None:
        self.key = SigningKey.generate()
        self.last: CountersignedHead | None = None
        self.submissions: list[HeadSubmission] = []
        self.away = self.deaf = self.fenced = False
        self.signs_with = self.key
        self._loop, self._run_id, self._evidence_public = loop, run_id, evidence_public

    def begin(self, path: str, body: bytes, done: Callable[[Any], None], **_: Any) -> Any:
        assert path == "/v1/heads"
        submission = HeadSubmission.parse(body)
        self.submissions.append(submission)
        call = _Call(self._answer(submission))
        self._loop.after(0, lambda: call.abandoned or done(call))
        return call

    def _answer(self, submission: HeadSubmission) -> bytes | GlasshouseError:
        if self.away:
            return PeerError(Code.BROKER_UNREACHABLE, "away")
        if self.fenced and _state(submission, self._evidence_public) not in ENDING:
            return RefusedError(Code.LINE_SUPERSEDED, "another leg was released")
        try:
            found = countersign(
                submission.head,
                submission.proof,
                run_id=self._run_id,
                previous=self.last,
                evidence_public=self._evidence_public,
                broker_key=self.signs_with,
                now_us=time.time_ns() // 1000,
            )
        except RefusedError as refusal:
            return refusal
        self.last = found
        return PeerError(Code.BROKER_UNREACHABLE, "lost") if self.deaf else found.encode()


ENDING = (State.ZEROIZING, State.ZEROIZED)


def _state(submission: HeadSubmission, evidence_public: bytes) -> State:
    return Head.parse_signed(submission.head, evidence_public).state


class _Call:
    def __init__(self, answer: bytes | GlasshouseError) -> None:
        self._answer = answer
        self.abandoned = False

    def body(self) -> bytes:
        if isinstance(self._answer, GlasshouseError):
            raise self._answer
        return self._answer

    def abandon(self) -> None:
        self.abandoned = True


class Desk:
    """A run's log and its keeper."""

    def __init__(
        self,
        *,
        lease_s: float = 60.0,
        deaf: bool = False,
        forger: SigningKey | None = None,
        leg: bool = False,
        released_s_ago: float = 0.0,
    ) -> None:
        self.loop, run_id, key = Loop(), secrets.token_hex(16), SigningKey.generate()
        self.log = EventLog(
            run_id=run_id, evidence_key=key, clock_us=lambda: time.time_ns() // 1000, sink=lambda _line: None
        )
        self.broker = Broker(self.loop, run_id, key.public)
        self.broker.deaf = deaf
        self.broker.signs_with = forger or self.broker.key
        self.kept: list[bytes] = []
        self.troubles: list[Code] = []
        self.keeper = HeadKeeper(
            self.loop,
            self.broker,  # type: ignore[arg-type]
            self.log,
            broker_public=self.broker.key.public,
            evidence_public=key.public,
            countersigned=self.kept.append,
            trouble=self.troubles.append,
            lease_s=lease_s,
            since_s=self.loop.now_s() - released_s_ago,
            leg=leg,
        )

    def settle(self, seconds: float = 0.02) -> None:
        self.loop.sleep(seconds)

    def go(self, state: State) -> None:
        self.log.transition(state)
        self.keeper.publish()

    def end(self) -> None:
        self.log.transition(State.ZEROIZING)
        self.log.transition(State.ZEROIZED, outcome=Outcome.FAILED, code=Code.INTERNAL)


def test_each_transition_is_countersigned() -> None:
    desk = Desk()
    desk.settle()
    desk.go(State.HARDENED)
    desk.settle()
    desk.go(State.MEASURED)
    desk.settle()
    assert desk.keeper.last is not None
    assert (desk.keeper.last.head.size, desk.keeper.last.head.state) == (3, State.MEASURED)
    assert len(desk.kept) == 3
    assert desk.troubles == []


def test_transitions_in_a_row_are_one_head_in_flight_and_then_the_newest() -> None:
    desk = Desk()
    for state in (State.HARDENED, State.MEASURED, State.ATTESTED):
        desk.go(state)
    desk.settle()
    assert [len(submission.proof) > 0 for submission in desk.broker.submissions] == [False, True]
    assert desk.keeper.last is not None
    assert desk.keeper.last.head.state is State.ATTESTED


def test_a_head_whose_answer_was_lost_is_sent_again_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_keeper, "_FIRST_RETRY_S", 0.05)
    desk = Desk(deaf=True)
    desk.settle()
    desk.go(State.HARDENED)
    desk.broker.deaf = False
    assert desk.loop.run_until(lambda: desk.keeper.last is not None and desk.keeper.last.head.size == 2, within_s=10)
    first, second, third = desk.broker.submissions
    assert first == second
    assert third != second
    assert desk.troubles == [Code.BROKER_UNREACHABLE]


def test_while_the_broker_is_away_nothing_piles_up() -> None:
    desk = Desk()
    desk.settle()
    desk.broker.away = True
    for state in (State.HARDENED, State.MEASURED, State.ATTESTED, State.RELEASED):
        desk.go(state)
        desk.settle()
    assert len({submission.head for submission in desk.broker.submissions}) == 2
    desk.broker.away = False
    desk.end()
    assert desk.keeper.finish(5)
    assert desk.keeper.last is not None
    assert desk.keeper.last.head.state is State.ZEROIZED


def test_a_lease_without_contact_ends_the_run() -> None:
    desk = Desk(lease_s=0.3)
    desk.settle()
    desk.broker.away = True
    with pytest.raises(RunError) as caught:
        desk.loop.run_until(lambda: False, within_s=20)
    assert caught.value.code is Code.LEASE_LOST


def test_a_release_that_was_held_back_has_less_of_its_lease_left() -> None:
    desk = Desk(lease_s=60.0, deaf=True, released_s_ago=60.0)
    with pytest.raises(RunError) as caught:
        desk.loop.run_until(lambda: False, within_s=20)
    assert caught.value.code is Code.LEASE_LOST


def test_a_quiet_run_keeps_its_lease_by_heads_that_are_new() -> None:
    desk = Desk(lease_s=0.6)
    assert desk.loop.run_until(lambda: len(desk.broker.submissions) >= 5, within_s=20), "one for each third of a lease"
    desk.settle()
    sent = [submission.head for submission in desk.broker.submissions]
    assert len(sent) == len(set(sent))
    assert desk.keeper.last is not None
    assert desk.keeper.last.head.size == desk.log.size


def test_an_answer_that_was_held_back_renews_the_lease_from_when_it_was_asked_for() -> None:
    desk = Desk(lease_s=60.0)
    desk.settle()
    leases: list[float] = []
    after, begin = desk.loop.after, desk.broker.begin

    def noted(delay_s: float, handler: Callable[[], None]) -> Any:
        if handler == desk.keeper._lease_lost:
            leases.append(delay_s)
        return after(delay_s, handler)

    desk.loop.after = noted  # type: ignore[method-assign]
    held: list[Callable[[], None]] = []

    def hold(path: str, body: bytes, done: Callable[[Any], None]) -> Any:
        return begin(path, body, lambda call: held.append(lambda: done(call)))

    desk.broker.begin = hold  # type: ignore[method-assign,assignment]
    desk.go(State.HARDENED)
    desk.settle(0.3)
    desk.broker.begin = begin  # type: ignore[method-assign]
    desk.keeper._interval_s = 0.2
    [answer] = held
    answer()
    assert leases[0] <= 60.0 - 0.3
    # And the broker is asked again at once, for a head that is new.
    assert desk.loop.run_until(lambda: desk.keeper.last is not None and desk.keeper.last.head.size == 3, within_s=10)
    assert len(leases) == 2


def test_a_countersignature_by_another_key_is_no_contact() -> None:
    desk = Desk(lease_s=0.3, forger=SigningKey.generate())
    with pytest.raises(RunError) as caught:
        desk.loop.run_until(lambda: False, within_s=20)
    assert caught.value.code is Code.LEASE_LOST
    assert desk.keeper.last is None
    assert Code.BROKER_UNTRUSTED in desk.troubles
    assert desk.kept == []


def test_an_old_countersignature_is_not_taken_for_a_new_one() -> None:
    desk = Desk()
    desk.settle()
    old = desk.kept[0]
    desk.broker.begin = lambda _path, _body, done, **_: _replay(desk, old, done)  # type: ignore[method-assign]
    desk.go(State.HARDENED)
    desk.settle()
    assert desk.keeper.last is not None
    assert desk.keeper.last.head.size == 1
    assert desk.troubles == [Code.BROKER_PROTOCOL]


def _replay(desk: Desk, old: bytes, done: Callable[[Any], None]) -> _Call:
    call = _Call(old)
    desk.loop.after(0, lambda: done(call))
    return call


def test_a_leg_that_was_fenced_off_ends_at_once_and_its_end_is_countersigned() -> None:
    desk = Desk(leg=True)
    desk.settle()
    desk.broker.fenced = True
    desk.go(State.HARDENED)
    with pytest.raises(RefusedError) as caught:
        desk.settle()
    assert caught.value.code is Code.LINE_SUPERSEDED
    desk.end()
    assert desk.keeper.finish(5)


def test_one_that_hears_of_it_only_as_it_ends_is_countersigned_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_keeper, "_FIRST_RETRY_S", 0.01)
    desk = Desk(leg=True)
    desk.settle()
    desk.broker.fenced = desk.broker.away = True
    desk.go(State.HARDENED)
    desk.settle()
    desk.keeper.rest()
    desk.broker.away = False
    desk.end()
    assert desk.keeper.finish(5)


def test_a_run_of_no_line_is_not_ended_by_such_an_answer_which_any_hop_can_give() -> None:
    desk = Desk()
    desk.settle()
    desk.broker.fenced = True
    desk.go(State.HARDENED)
    desk.settle()
    assert desk.troubles == [Code.LINE_SUPERSEDED]
    desk.broker.fenced = False
    desk.end()
    assert desk.keeper.finish(5)


def test_at_the_end_a_broker_that_refuses_is_asked_a_few_times_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_keeper, "_FIRST_RETRY_S", 0.05)
    desk = Desk()
    desk.settle()
    desk.broker.signs_with = SigningKey.generate()
    desk.end()
    assert not desk.keeper.finish(3600)
    assert len(desk.broker.submissions) == 1 + 3


def test_at_the_end_a_broker_that_is_away_is_waited_for_so_long_and_no_longer() -> None:
    desk = Desk()
    desk.settle()
    desk.broker.away = True
    desk.end()
    assert not desk.keeper.finish(0.2)
    with pytest.raises(GlasshouseError):
        desk.log.append(EventType.NOTICE, {"code": "late", "value": None})
