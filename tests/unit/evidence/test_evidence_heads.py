"""The broker's countersignature: no two histories, no step back, the same answer for a lost one."""

from __future__ import annotations

import pytest

from glasshouse.errors import Code, FormatError, RefusedError
from glasshouse.evidence.events import EventType
from glasshouse.evidence.heads import MAX_HEAD_BYTES, CountersignedHead, Head, HeadSubmission, claimed_head, countersign
from glasshouse.evidence.log import EventLog
from glasshouse.wire import dsse
from glasshouse.wire.canonical import encode
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.states import Outcome, State

EVIDENCE = SigningKey(b"e" * 32)
BROKER = SigningKey(b"b" * 32)
STRANGER = SigningKey(b"s" * 32)
RUN = "ab" * 16


class Gate:
    """The broker's memory of one run."""

    def __init__(self) -> None:
        self.last: CountersignedHead | None = None
        self.now_us = 10_000

    def submit(self, head: bytes, proof: list[bytes], *, run_id: str = RUN) -> CountersignedHead:
        self.now_us += 1000
        self.last = countersign(
            head,
            proof,
            run_id=run_id,
            previous=self.last,
            evidence_public=EVIDENCE.public,
            broker_key=BROKER,
            now_us=self.now_us,
        )
        return self.last

    def refuses(self, head: bytes, proof: list[bytes], *, run_id: str = RUN) -> Code:
        before = self.last
        with pytest.raises(RefusedError) as caught:
            self.submit(head, proof, run_id=run_id)
        assert self.last is before
        return caught.value.code


def new_log(run_id: str = RUN, key: SigningKey = EVIDENCE) -> EventLog:
    return EventLog(run_id=run_id, evidence_key=key, clock_us=lambda: 5000, sink=lambda line: None)


def note(log: EventLog, value: int = 0) -> None:
    log.append(EventType.NOTICE, {"code": "hello", "value": value})


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def log() -> EventLog:
    return new_log()


def test_heads_of_a_growing_log_are_countersigned_one_after_the_other(gate: Gate, log: EventLog) -> None:
    old = 0
    for number in range(20):
        note(log, number)
        found = gate.submit(log.head(), log.consistency(old, log.size))
        assert (found.previous_size, found.head.size, found.head.sequence) == (old, number + 2, number)
        old = found.head.size
        again = CountersignedHead.parse(found.encode(), broker_public=BROKER.public, evidence_public=EVIDENCE.public)
        assert again == found


def test_heads_kept_while_the_broker_was_away_may_be_skipped(gate: Gate, log: EventLog) -> None:
    first = gate.submit(log.head(), [])
    for _ in range(5):
        note(log)
        log.head()
    note(log)
    assert gate.submit(log.head(), log.consistency(first.head.size, log.size)).head.sequence == 6


def test_a_lost_answer_is_given_again_byte_for_byte(gate: Gate, log: EventLog) -> None:
    note(log)
    head = log.head()
    first = gate.submit(head, [])
    assert gate.submit(head, []).encode() == first.encode()
    note(log)
    second_head, proof = log.head(), log.consistency(2, log.size)
    second = gate.submit(second_head, proof)
    assert gate.submit(second_head, proof).encode() == second.encode()


def test_rolling_back_to_an_earlier_head(gate: Gate, log: EventLog) -> None:
    early = log.head()
    gate.submit(early, [])
    note(log)
    gate.submit(log.head(), log.consistency(1, log.size))
    assert gate.refuses(early, []) is Code.HEAD_INCONSISTENT


def test_a_second_history_of_the_same_run(gate: Gate, log: EventLog) -> None:
    note(log, 1)
    gate.submit(log.head(), [])
    other = new_log()
    other.head()
    note(other, 2)
    note(other, 3)
    head = other.head()
    assert gate.refuses(head, other.consistency(2, other.size)) is Code.HEAD_INCONSISTENT
    assert gate.refuses(head, []) is Code.HEAD_INCONSISTENT


def test_another_head_of_the_same_size(gate: Gate, log: EventLog) -> None:
    gate.submit(log.head(), [])
    assert gate.refuses(log.head(), []) is Code.HEAD_INCONSISTENT


def test_a_head_of_another_run_or_by_another_key(gate: Gate, log: EventLog) -> None:
    assert gate.refuses(new_log(run_id="cd" * 16).head(), []) is Code.HEAD_INCONSISTENT
    assert gate.refuses(log.head(), [], run_id="cd" * 16) is Code.HEAD_INCONSISTENT
    assert gate.refuses(new_log(key=STRANGER).head(), []) is Code.EVIDENCE_SIGNATURE


def test_a_first_head_brings_no_proof_and_a_later_one_the_right_one(gate: Gate, log: EventLog) -> None:
    assert gate.refuses(log.head(), [bytes(32)]) is Code.HEAD_INCONSISTENT
    gate.submit(log.head(), [])
    note(log)
    head = log.head()
    assert gate.refuses(head, [bytes(32)]) is Code.HEAD_INCONSISTENT


def test_the_end_of_a_run_is_the_end_of_its_heads(gate: Gate, log: EventLog) -> None:
    log.transition(State.ZEROIZING, code=Code.INTERRUPTED)
    log.transition(State.ZEROIZED, outcome=Outcome.INTERRUPTED, code=Code.INTERRUPTED)
    final = gate.submit(log.head(), []).head
    for state in State:
        later = Head(
            run_id=RUN, sequence=9, size=final.size + 1, root=bytes(32), state=state, time_us=final.time_us + 1
        )
        assert gate.refuses(later.sign(EVIDENCE).encode(), []) is Code.HEAD_INCONSISTENT


def test_state_time_and_sequence_do_not_go_back(gate: Gate, log: EventLog) -> None:
    log.transition(State.HARDENED)
    log.head()
    last = gate.submit(log.head(), []).head
    note(log)
    honest = Head.parse_signed(log.head(), EVIDENCE.public)
    proof = log.consistency(last.size, log.size)
    for lie in ({"state": "created"}, {"time_us": last.time_us - 1}, {"sequence": last.sequence}):
        head = Head.from_json({**honest.to_json(), **lie})
        assert gate.refuses(head.sign(EVIDENCE).encode(), proof) is Code.HEAD_INCONSISTENT
    gate.submit(honest.sign(EVIDENCE).encode(), proof)


def test_the_brokers_time_does_not_go_back_with_its_clock(gate: Gate, log: EventLog) -> None:
    first = gate.submit(log.head(), [])
    note(log)
    gate.now_us = 0
    assert gate.submit(log.head(), log.consistency(1, log.size)).time_us == first.time_us


@pytest.mark.parametrize("data", [b"", b"{}", b"null", b"[]", b"\xff"])
def test_what_is_no_head_is_message_invalid(gate: Gate, data: bytes) -> None:
    assert gate.refuses(data, []) is Code.MESSAGE_INVALID


def test_a_head_that_is_too_large(gate: Gate) -> None:
    assert gate.refuses(b" " * (MAX_HEAD_BYTES + 1), []) is Code.MESSAGE_TOO_LARGE


def test_something_else_signed_by_the_evidence_key_is_no_head(gate: Gate, log: EventLog) -> None:
    payload = dsse.Envelope.parse(log.head(), max_bytes=MAX_HEAD_BYTES).payload
    other = dsse.sign("application/vnd.in-toto+json", payload, [EVIDENCE]).encode()
    assert gate.refuses(other, []) is Code.MESSAGE_INVALID


def test_a_countersigned_head_needs_both_signatures(gate: Gate, log: EventLog) -> None:
    data = gate.submit(log.head(), []).encode()
    for broker, evidence in ((STRANGER, EVIDENCE), (BROKER, STRANGER)):
        with pytest.raises(FormatError) as caught:
            CountersignedHead.parse(data, broker_public=broker.public, evidence_public=evidence.public)
        assert caught.value.code is Code.SIGNATURE


def test_a_submission_travels_unchanged_and_says_which_run_it_claims(log: EventLog) -> None:
    note(log)
    log.head()
    note(log)
    submission = HeadSubmission(head=log.head(), proof=tuple(log.consistency(1, log.size)))
    assert HeadSubmission.parse(submission.encode()) == submission
    assert claimed_head(submission.head).run_id == RUN


@pytest.mark.parametrize("proof", [["AA"], ["A" * 44], [1], ["!" * 43], ["A" * 43] * 65, "x"])
def test_a_submission_with_a_proof_of_anything_but_hashes(log: EventLog, proof: object) -> None:
    head = dsse.Envelope.parse(log.head(), max_bytes=MAX_HEAD_BYTES).to_json()
    with pytest.raises(FormatError):
        HeadSubmission.parse(encode({"head": head, "proof": proof}))
