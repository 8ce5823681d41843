"""Heads and receipts: what the broker countersigns, once, and what it says of a run that fell silent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from glasshouse.broker.decide.countersigning import Countersigner
from glasshouse.broker.decide.decisions import Effect
from glasshouse.errors import Code, RefusedError
from glasshouse.evidence.bundle import CountersignedReceipt, ReceiptAnswer
from glasshouse.evidence.heads import CountersignedHead, HeadSubmission
from glasshouse.evidence.receipt import RECEIPT_TYPE, Receipt
from glasshouse.handshake.delegation import Delegation, Use
from glasshouse.tamper.stage import Actor, Owner, clock_us
from glasshouse.wire import dsse
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.states import State
from simulators.local_broker import LocalBroker
from simulators.reporting import Reporter, release_to

BEFORE_RUNNING = (State.HARDENED, State.MEASURED, State.ATTESTED, State.RELEASED, State.OPENED)


@pytest.fixture
def reporter(owner: Owner) -> Reporter:
    actor = Actor.enter(owner)
    release_to(actor)
    return Reporter(actor)


def countersigned(reporter: Reporter, body: bytes) -> CountersignedHead:
    return CountersignedHead.parse(
        body, broker_public=reporter.actor.launch.broker_public, evidence_public=reporter.actor.evidence.public
    )


def test_growing_heads_are_countersigned_one_after_the_other(reporter: Reporter, owner: Owner) -> None:
    first = countersigned(reporter, reporter.send(reporter.submission()).content())
    reporter.go_on(*BEFORE_RUNNING)
    second = countersigned(reporter, reporter.send(reporter.submission()).content())
    assert (first.previous_size, second.previous_size) == (0, first.head.size)
    run = owner.client().run(reporter.actor.launch.run_id)
    assert (run["state"], run["lost"], run["outcome"]) == ("opened", False, None)
    assert Envelope.from_json(run["head"]) == second.envelope


def test_a_head_whose_answer_was_lost_gets_the_same_answer_again(reporter: Reporter) -> None:
    submission = reporter.submission()
    answer = reporter.send(submission).content()
    assert reporter.actor.post("/v1/heads", submission).content() == answer


def test_another_history_is_refused_and_changes_nothing(reporter: Reporter, owner: Owner) -> None:
    reporter.go_on(*BEFORE_RUNNING)
    kept = countersigned(reporter, reporter.send(reporter.submission()).content())
    other = Reporter(reporter.actor)
    other.go_on(*BEFORE_RUNNING, State.RUNNING)
    other.submission()
    other.confirmed = kept.head.size
    refusal = other.send(other.submission())
    assert refusal.problem().code is Code.HEAD_INCONSISTENT
    assert Envelope.from_json(owner.client().run(reporter.actor.launch.run_id)["head"]) == kept.envelope


def test_a_smaller_head_is_refused(reporter: Reporter) -> None:
    early = reporter.submission()
    reporter.go_on(*BEFORE_RUNNING)
    reporter.send(HeadSubmission(head=reporter.log.head()).encode())
    assert reporter.actor.post("/v1/heads", early).problem().code is Code.HEAD_INCONSISTENT


def test_a_head_of_a_run_that_was_never_attested_is_refused(owner: Owner, broker: LocalBroker) -> None:
    never = Reporter(Actor.enter(owner))
    assert never.send(never.submission()).problem().code is Code.RUN_UNKNOWN
    assert broker.count("releases") == 0


def test_a_head_signed_by_another_key_is_refused(reporter: Reporter) -> None:
    stranger = Reporter(replace(reporter.actor, evidence=SigningKey.generate()))
    assert stranger.send(stranger.submission()).problem().code is Code.RUN_UNKNOWN
    envelope = Envelope.parse(stranger.log.head(), max_bytes=4096)
    [(_, signature)] = envelope.signatures
    renamed = replace(envelope, signatures=((reporter.actor.evidence.key_id, signature),))
    forged = HeadSubmission(head=renamed.encode()).encode()
    assert reporter.actor.post("/v1/heads", forged).problem().code is Code.EVIDENCE_SIGNATURE


def test_two_runs_of_one_deployment_each_have_their_own_history(reporter: Reporter, owner: Owner) -> None:
    reporter.send(reporter.submission())
    second = Actor.enter(owner)
    release_to(second)
    later = Reporter(second)
    later.go_on(State.HARDENED)
    assert later.send(later.submission()).status == 200
    runs = [owner.client().run(actor.launch.run_id) for actor in (reporter.actor, second)]
    assert [(run["releases"], run["state"]) for run in runs] == [(1, "created"), (1, "hardened")]


def test_a_second_runtime_of_a_run_gets_neither_history_nor_receipt(
    reporter: Reporter, owner: Owner, broker: LocalBroker
) -> None:
    second = Actor.enter(owner, reporter.actor.launch)
    assert second.send(second.sign(second.claims(second.challenge()))).problem().code is Code.RELEASE_BUDGET
    other = Reporter(second)
    assert other.send(other.submission()).problem().code is Code.RUN_UNKNOWN
    other.end()
    other.submission()
    assert second.post("/v1/receipt", other.receipt()).problem().code is Code.RUN_UNKNOWN
    reporter.end()
    reporter.send(reporter.submission())
    assert reporter.actor.post("/v1/receipt", reporter.receipt()).status == 200
    assert broker.rows("SELECT count(receipt), count(DISTINCT run_id) FROM releases") == [(1, 1)]


@pytest.mark.parametrize("message", [b"", b"{}", b'{"head":{},"proof":[]}', b"\xff"])
def test_what_is_no_submission_is_refused(reporter: Reporter, message: bytes) -> None:
    for path in ("/v1/heads", "/v1/receipt"):
        reply = reporter.actor.post(path, message)
        assert reply.status == 400
        assert reply.problem().code in (Code.SCHEMA, Code.MESSAGE_INVALID)


def test_a_finished_run_gets_one_countersigned_receipt(reporter: Reporter, owner: Owner) -> None:
    reporter.go_on(*BEFORE_RUNNING)
    reporter.send(reporter.submission())
    reporter.end()
    reporter.send(reporter.submission())
    submission = reporter.receipt()
    content = reporter.actor.post("/v1/receipt", submission).content()
    answer = ReceiptAnswer.parse(content)
    signed = CountersignedReceipt.parse_signed(answer.countersignature, reporter.actor.launch.broker_public)
    assert answer.delegation == owner.delegation.encode()
    assert reporter.actor.post("/v1/receipt", submission).content() == content, "a lost answer is given again"
    other = reporter.receipt(finished_us=clock_us() + 5)
    assert reporter.actor.post("/v1/receipt", other).problem().code is Code.HEAD_INCONSISTENT
    run = owner.client().run(reporter.actor.launch.run_id)
    assert (run["state"], run["outcome"], run["lost"]) == ("zeroized", "interrupted", False)
    assert run["receipt_sha256"] == signed.receipt_sha256.hex()


def test_recordings_decide_nothing_and_make_nobody_known(broker: LocalBroker, reporter: Reporter) -> None:
    """What is fresh is decided on, with the lock, and gives its address the room that is kept for runs."""
    reports = Countersigner(broker.opened)
    first = reporter.submission()
    assert reports.heads(first).effect is Effect.CREDIT
    reporter.send(first)
    reporter.end()
    last = reporter.submission()
    assert reports.heads(last).effect is Effect.CREDIT
    with pytest.raises(RefusedError, match="does not extend"):
        reports.heads(HeadSubmission(head=reporter.final, proof=(bytes(32),)).encode())
    receipt = reporter.receipt()
    with pytest.raises(RefusedError, match="not countersigned"):
        reports.receipt(receipt)
    reporter.send(last)
    forged = reporter.submit(Envelope.parse(reporter.final, max_bytes=4096))
    with pytest.raises(RefusedError):
        reports.receipt(forged)
    assert reports.receipt(receipt).effect is Effect.CREDIT
    assert reporter.actor.post("/v1/receipt", receipt).status == 200
    for recorded in (reports.receipt(receipt), reports.heads(last)):
        assert recorded.effect is Effect.CHARGE
        before = broker.everything()
        assert recorded.decide().status == 200
        assert broker.everything() == before
    for recording, refused in ((first, reports.heads), (forged, reports.receipt)):
        with pytest.raises(RefusedError):
            refused(recording)


def test_a_run_that_has_not_ended_has_no_receipt_looked_at(
    broker: LocalBroker, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One recorded head is enough to have such a message read: 120 KB beside it were checked, and were parsed."""
    reports = Countersigner(broker.opened)
    reporter.send(reporter.submission())
    receipt = dsse.sign(RECEIPT_TYPE, b"[" + b"[]," * 30_000 + '"é"]'.encode(), [reporter.actor.evidence])
    submission, looked_at = reporter.submit(receipt), written_and_read(monkeypatch)
    with pytest.raises(RefusedError, match="not its end"):
        reports.receipt(submission)
    assert looked_at() == []


def test_a_receipt_that_its_runs_key_did_not_sign_is_neither_written_again_nor_read(
    broker: LocalBroker, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = Countersigner(broker.opened)
    reporter.end()
    reporter.send(reporter.submission())
    unsigned = ((reporter.actor.evidence.key_id, bytes(64)),)
    forged = reporter.submit(Envelope(payload_type=RECEIPT_TYPE, payload=b"x" * 90_000, signatures=unsigned))
    looked_at = written_and_read(monkeypatch)
    with pytest.raises(RefusedError) as caught:
        reports.receipt(forged)
    assert caught.value.code is Code.EVIDENCE_SIGNATURE
    assert looked_at() == []
    assert reports.receipt(reporter.receipt()).effect is Effect.CREDIT, "nobody but its key can spoil a run's receipt"


def written_and_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Return what tells the lengths of long envelopes that are written, and of long payloads that are read."""
    lengths: list[int] = []
    write, read = Envelope.encode, Receipt.parse

    def written(envelope: Envelope) -> bytes:
        lengths.append(len(envelope.payload))
        return write(envelope)

    def read_on(payload: bytes) -> Receipt:
        lengths.append(len(payload))
        return read(payload)

    monkeypatch.setattr(Envelope, "encode", written)
    monkeypatch.setattr(Receipt, "parse", read_on)
    return lambda: [length for length in lengths if length > 8192]


def test_a_runs_key_has_one_receipt_looked_at(broker: LocalBroker, reporter: Reporter) -> None:
    """With as many outputs as it may have, it costs the broker as much as several other messages."""
    reports = Countersigner(broker.opened)
    reporter.end()
    reporter.send(reporter.submission())
    with pytest.raises(RefusedError, match="not an object"):
        reports.receipt(reporter.submit(dsse.sign(RECEIPT_TYPE, b"[]", [reporter.actor.evidence])))
    with pytest.raises(RefusedError, match="whose first was refused"):
        reports.receipt(reporter.receipt())


def test_a_receipt_before_its_final_head_was_countersigned_is_refused(reporter: Reporter) -> None:
    reporter.send(reporter.submission())
    reporter.end()
    reporter.submission()
    assert reporter.actor.post("/v1/receipt", reporter.receipt()).problem().code is Code.HEAD_INCONSISTENT


def test_a_receipt_is_not_countersigned_without_a_delegation_to_do_so(
    broker: LocalBroker, owner: Owner, reporter: Reporter
) -> None:
    reporter.end()
    reporter.send(reporter.submission())
    owner_key = owner.signing
    submission = reporter.receipt()
    weaker = Delegation(
        broker_public=broker.broker_public,
        uses=frozenset({Use.RELEASE}),
        not_before_us=0,
        not_after_us=clock_us() + 10**9,
    ).sign(owner_key)
    owner.client().put_delegation(weaker, owner_key.public)
    assert reporter.actor.post("/v1/receipt", submission).problem().code is Code.CHAIN_DELEGATION
    owner.client().put_delegation(owner.delegation, owner_key.public)
    assert reporter.actor.post("/v1/receipt", submission).status == 200
    owner.client().put_delegation(weaker, owner_key.public)
    assert reporter.actor.post("/v1/receipt", submission).problem().code is Code.CHAIN_DELEGATION


@pytest.mark.parametrize("way", ["narrowed", "ended"])
def test_heads_are_countersigned_only_as_long_as_the_owner_delegates_it(
    broker: LocalBroker, owner: Owner, reporter: Reporter, way: str
) -> None:
    first = reporter.submission()
    assert reporter.send(first).status == 200
    changes: dict[str, Any] = (
        {"uses": frozenset({Use.RELEASE})} if way == "narrowed" else {"not_after_us": broker.clock_us() + 30_000_000}
    )
    now = Delegation.from_envelope(owner.delegation, owner.signing.public)
    owner.client().put_delegation(replace(now, **changes).sign(owner.signing), owner.signing.public)
    broker.advance(31)
    contact = broker.rows("SELECT contact_us, head_size FROM releases")
    reporter.go_on(State.HARDENED)
    for submission in (reporter.submission(), first):
        reply = reporter.send(submission)
        assert (reply.status, reply.problem().code) == (403, Code.CHAIN_DELEGATION)
    assert broker.rows("SELECT contact_us, head_size FROM releases") == contact
    owner.client().put_delegation(owner.delegation, owner.signing.public)
    assert reporter.send(reporter.submission()).status == 200


def test_a_run_that_is_silent_for_longer_than_its_lease_is_lost_until_it_speaks(
    broker: LocalBroker, owner: Owner, reporter: Reporter
) -> None:
    run_id = reporter.actor.launch.run_id
    reporter.send(reporter.submission())
    broker.advance(590)
    assert owner.client().run(run_id)["lost"] is False
    broker.advance(20)
    lost = owner.client().run(run_id)
    assert (lost["lost"], lost["outcome"]) == (True, "lost")
    assert reporter.send(HeadSubmission(head=reporter.final).encode()).status == 200
    assert owner.client().run(run_id)["lost"] is True, "a head repeated by whoever recorded it is no sign of life"
    reporter.go_on(State.HARDENED)
    reporter.send(reporter.submission())
    assert owner.client().run(run_id)["lost"] is False


def test_a_run_that_was_released_and_never_spoke_is_lost_too(broker: LocalBroker, owner: Owner) -> None:
    actor = Actor.enter(owner)
    assert owner.client().run(actor.launch.run_id)["state"] is None
    release_to(actor)
    broker.advance(601)
    assert owner.client().run(actor.launch.run_id)["outcome"] == "lost"


def test_a_finished_run_is_never_lost(broker: LocalBroker, owner: Owner, reporter: Reporter) -> None:
    reporter.end()
    reporter.send(reporter.submission())
    assert reporter.actor.post("/v1/receipt", reporter.receipt()).status == 200
    broker.advance(3000)
    assert owner.client().run(reporter.actor.launch.run_id)["lost"] is False
