"""The messages that `make bench-gate` throws at a broker: each is refused, for little work."""

from __future__ import annotations

import sys

import pytest

from benchmarks.gate_load import hostile, hostile_receipt
from glasshouse.attestation.evidence import MAX_EVIDENCE_BYTES
from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.verify import check_1_message
from glasshouse.errors import Code
from glasshouse.evidence.countersignature import MAX_SUBMISSION_BYTES
from glasshouse.tamper.stage import Actor, Owner
from simulators.local_broker import LocalBroker
from simulators.reporting import Reporter, release_to

MOST_CALLS = 5000


HOSTILE = [body for _, body in hostile()]


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


def test_a_hostile_runs_receipt_is_refused_after_its_outputs_and_a_second_is_not_looked_at(
    broker: LocalBroker, owner: Owner
) -> None:
    actor = Actor.enter(owner)
    release_to(actor)
    reporter = Reporter(actor)
    reporter.end()
    reporter.send(reporter.submission())
    path, message = hostile_receipt(actor.evidence, reporter.final)
    assert 150_000 < len(message) <= MAX_SUBMISSION_BYTES
    for reason in (Code.MESSAGE_INVALID, Code.HEAD_INCONSISTENT, Code.HEAD_INCONSISTENT):
        assert actor.post(path, message).problem().code is reason
    assert broker.rows("SELECT count(receipt) FROM releases") == [(0,)]
