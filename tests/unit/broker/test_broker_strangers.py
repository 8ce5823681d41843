"""The messages that `make bench-gate` throws at a broker: each is refused, for little work."""

from __future__ import annotations

import base64
import sys
from types import SimpleNamespace

import pytest

from benchmarks.gate_load import _head, hostile, hostile_evidence, hostile_receipt, unsigned_receipts
from glasshouse.attestation.evidence import MAX_EVIDENCE_BYTES, Evidence
from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.kinds import MAX_BLOBS
from glasshouse.attestation.verify import check_1_message
from glasshouse.broker.http.bounded import MAX_HEADER_BYTES
from glasshouse.errors import Code
from glasshouse.evidence.bundle import MAX_SUBMISSION_BYTES, ReceiptSubmission
from glasshouse.evidence.receipt import MAX_RECEIPT_BYTES
from glasshouse.tamper.stage import Actor, Owner
from glasshouse.wire import canonical, dsse
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

    assert 25_000 < len(message) <= MAX_EVIDENCE_BYTES
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
        assert 30_000 < len(body) <= MAX_EVIDENCE_BYTES
        answer = raw(broker, _head(path, len(body), lines) + body)
        assert problem(answer).code is Code.EVIDENCE_SIGNATURE
    assert parsed == []
    head = _head(path, len(body), lines)
    assert MAX_HEADER_BYTES - 64 < len(head) <= MAX_HEADER_BYTES
    assert len(check_1_message(body).evidence.hardware) == MAX_BLOBS, "nothing else is wrong with it"


MOST_PARSED_BYTES = 8192


def test_of_a_receipt_that_nobody_signed_little_is_parsed_and_nothing_before_its_head_is_a_runs_end(
    broker: LocalBroker, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of a megabyte beside a recorded head was parsed and written again: twice what dear evidence cost."""
    actor = Actor.enter(owner)
    release_to(actor)
    reporter = Reporter(actor)
    reporter.send(reporter.submission())
    early = reporter.final
    reporter.end()
    reporter.send(reporter.submission())
    parsed, decoded = looked_into(monkeypatch)
    messages = unsigned_receipts(actor.evidence.key_id, reporter.final)

    def beside(head: bytes, size: int) -> bytes:
        return ReceiptSubmission(receipt=b'{"payload":"' + b"A" * size, head=head).encode()

    codes = (Code.EVIDENCE_SIGNATURE, Code.MESSAGE_INVALID, Code.MESSAGE_INVALID, Code.SCHEMA)
    others = (
        (beside(early, 200_000), Code.HEAD_INCONSISTENT),
        (beside(reporter.final, 250_000), Code.MESSAGE_TOO_LARGE),
    )
    for body, code in (*((one.body, code) for one, code in zip(messages, codes, strict=True)), *others):
        assert 190_000 < len(body) <= MAX_SUBMISSION_BYTES
        assert actor.post("/v1/receipt", body).problem().code is code
    assert max(parsed) <= MOST_PARSED_BYTES
    (largest,) = (size for size in decoded if size > MOST_PARSED_BYTES)
    assert MAX_RECEIPT_BYTES - 512 < largest < MAX_RECEIPT_BYTES
    assert actor.post("/v1/receipt", reporter.receipt()).status == 200
    decoded.clear()
    assert actor.post("/v1/receipt", messages[0].body).problem().code is Code.HEAD_INCONSISTENT
    assert max(decoded) <= MOST_PARSED_BYTES, "a run has one receipt: of another not even the signature is checked"


def looked_into(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """Return lists that fill with the lengths of what is parsed as JSON and of what is decoded from base64."""
    parsed, decoded = [0], [0]
    decode = canonical._DECODER.decode

    class Decoder:
        def decode(self, text: str) -> object:
            parsed.append(len(text))
            return decode(text)

    def b64decode(text: str, **options: bool) -> bytes:
        decoded.append(len(text))
        return base64.b64decode(text, **options)

    monkeypatch.setattr(canonical, "_DECODER", Decoder())
    monkeypatch.setattr(dsse, "base64", SimpleNamespace(b64decode=b64decode, b64encode=base64.b64encode))
    return parsed, decoded


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
