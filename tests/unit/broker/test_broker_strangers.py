"""The messages that `make bench-gate` throws at a broker: each is refused, for little work."""

from __future__ import annotations

import sys

import pytest

from benchmarks.gate_load import _head, hostile, hostile_evidence, hostile_receipt
from glasshouse.attestation.evidence import MAX_EVIDENCE_BYTES, MAX_HARDWARE_ITEMS, Evidence
from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.verify import check_1_message
from glasshouse.broker.listen import MAX_HEADER_BYTES
from glasshouse.errors import Code
from glasshouse.evidence.countersignature import MAX_SUBMISSION_BYTES
from glasshouse.tamper.stage import Actor, Owner
from simulators.local_broker import LocalBroker
from simulators.reporting import Reporter, release_to
from tools.raw_http import problem, raw

MOST_CALLS = 5000


HOSTILE = [message.body for message in hostile()]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_a_hostile_message_is_refused_for_little_work(number: int) -> None:
    """Calls are counted, not seconds: a message of as many zeros as fit cost a hundred thousand of them."""
    message, calls = HOSTILE[number], 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    assert 100_000 < len(message) <= MAX_EVIDENCE_BYTES
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        with pytest.raises(CheckFailedError) as caught:
            check_1_message(message)
    finally:
        sys.setprofile(before)
    assert (caught.value.check, caught.value.code) == ("1", Code.MESSAGE_INVALID)
    assert calls < MOST_CALLS


def test_of_evidence_that_nobody_signed_nothing_is_parsed_however_well_it_is_formed(
    broker: LocalBroker, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty-four GPUs, sixteen reports and a head of 16 KB cost three times what the broker's bar was measured with."""
    actor = Actor.enter(owner)
    messages = hostile_evidence(actor.claims(actor.challenge()), actor.launch.key().key_id)
    parsed: list[bytes] = []
    parse = Evidence.parse
    monkeypatch.setattr(Evidence, "parse", lambda payload: parsed.append(payload) or parse(payload))
    for path, body, lines in messages:
        assert 120_000 < len(body) <= MAX_EVIDENCE_BYTES
        answer = raw(broker, _head(path, len(body), lines) + body)
        assert problem(answer).code is Code.EVIDENCE_SIGNATURE
    assert parsed == []
    head = _head(path, len(body), lines)
    assert MAX_HEADER_BYTES - 64 < len(head) <= MAX_HEADER_BYTES
    assert len(check_1_message(body).evidence.hardware) == MAX_HARDWARE_ITEMS, "nothing else is wrong with it"


def test_a_hostile_runs_receipt_is_refused_after_its_outputs_and_a_second_is_not_looked_at(
    broker: LocalBroker, owner: Owner
) -> None:
    actor = Actor.enter(owner)
    release_to(actor)
    reporter = Reporter(actor)
    reporter.end()
    reporter.send(reporter.submission())
    path, message, _ = hostile_receipt(actor.evidence, reporter.final)
    assert 150_000 < len(message) <= MAX_SUBMISSION_BYTES
    for reason in (Code.MESSAGE_INVALID, Code.HEAD_INCONSISTENT, Code.HEAD_INCONSISTENT):
        assert actor.post(path, message).problem().code is reason
    assert broker.rows("SELECT count(receipt) FROM releases") == [(0,)]
