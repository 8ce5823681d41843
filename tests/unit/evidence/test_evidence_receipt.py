"""Receipts: what they may say, who must sign them, and the broker's single countersignature."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf import json_format
from in_toto_attestation.v1.statement import Statement
from in_toto_attestation.v1.statement_pb2 import Statement as StatementProto

from glasshouse.errors import Code, FormatError, RefusedError
from glasshouse.evidence.bundle import (
    Bundle,
    CountersignedReceipt,
    ReceiptAnswer,
    ReceiptSubmission,
    SignedReceiptRefusedError,
    countersign_receipt,
)
from glasshouse.evidence.events import ProbeResult
from glasshouse.evidence.heads import claimed_head
from glasshouse.evidence.receipt import PREDICATE_TYPE, PROBES, RECEIPT_TYPE, STATEMENT_TYPE, Output, Probe, Receipt
from glasshouse.wire import dsse
from glasshouse.wire.canonical import encode
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.states import Outcome, State
from simulators.world import World, envelope

WORLD = World()
RUN = WORLD.run()
HEADS = RUN.heads
REFUSED = World().run(attested=False, reach=State.MEASURED, outcome=Outcome.REFUSED, code=Code.MEASUREMENT_UNKNOWN)


def countersign(receipt: Envelope, **changes: Any) -> CountersignedReceipt:
    about: dict[str, Any] = {
        "final": HEADS[-1],
        "previous": None,
        "evidence_public": WORLD.evidence_key.public,
        "broker_key": WORLD.broker,
        "now_us": WORLD.now_us,
    }
    return countersign_receipt(receipt.encode(), **{**about, **changes})


def signed(receipt: Receipt) -> Envelope:
    return dsse.sign(RECEIPT_TYPE, receipt.encode(), [WORLD.evidence_key])


def refusal(receipt: Envelope, **changes: Any) -> Code:
    with pytest.raises(RefusedError) as caught:
        countersign(receipt, **changes)
    return caught.value.code


def test_a_receipt_is_an_in_toto_statement_about_the_sealed_files() -> None:
    statement = RUN.receipt.to_json()
    assert statement["_type"] == STATEMENT_TYPE == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == PREDICATE_TYPE
    assert [(one["name"], set(one["digest"])) for one in statement["subject"]] == [
        ("outputs/0000.sealed", {"sha256"}),
        ("outputs/0001.sealed", {"sha256"}),
    ]
    assert Receipt.from_json(statement) == RUN.receipt


@pytest.mark.parametrize("attested", [True, False])
def test_a_run_that_gave_nothing_back_is_about_its_package(attested: bool) -> None:
    story: dict[str, Any] = {
        "outcome": Outcome.REFUSED,
        "code": Code.KEY_COMMITMENT,
        "reach": State.MEASURED,
        "attested": attested,
    }
    receipt = World().run(**story).receipt
    statement = receipt.to_json()
    manifest = {"digest": {"sha256": receipt.manifest_sha256.hex()}, "name": "manifest"}
    assert statement["subject"] == [manifest]
    assert Receipt.from_json(statement) == receipt
    for other in ([], [manifest, manifest], [{**manifest, "digest": {"sha256": "00" * 32}}]):
        with pytest.raises(FormatError):
            Receipt.from_json({**statement, "subject": other})
    outputs = RUN.receipt.to_json()
    with pytest.raises(FormatError, match="subject"):
        Receipt.from_json({**outputs, "subject": [manifest, *outputs["subject"]]})


def test_tools_of_in_toto_take_every_receipt_for_a_statement() -> None:
    refused = World().run(outcome=Outcome.REFUSED, code=Code.KEY_COMMITMENT, reach=State.RELEASED)
    for run in (RUN, refused):
        value = json_format.ParseDict(run.receipt.to_json(), StatementProto())
        Statement.copy_from_pb(value).validate()


def test_it_says_that_the_last_wipe_is_not_in_it() -> None:
    predicate = RUN.receipt.to_json()["predicate"]
    assert predicate["not_covered"] == ["evidence-key-wipe"]
    silent = {**RUN.receipt.to_json(), "predicate": {**predicate, "not_covered": []}}
    with pytest.raises(FormatError, match="not_covered"):
        Receipt.from_json(silent)


def test_a_files_plaintext_digest_is_never_in_it() -> None:
    weights, file = RUN.receipt.outputs
    for wrong in (replace_of(weights, plain_hmac=None), replace_of(file, plain_hmac=bytes(32))):
        with pytest.raises(FormatError, match="beside weights"):
            Output(**wrong)


def replace_of(output: Output, **changes: Any) -> dict[str, Any]:
    return {name: changes.get(name, getattr(output, name)) for name in Output.__slots__}


@pytest.mark.parametrize(
    "change",
    [
        {"outcome": Outcome.LOST, "code": Code.LEASE_LOST},
        {"outcome": Outcome.FAILED},
        {"outcome": Outcome.RESIDUE, "code": Code.RESIDUE_FOUND},
        {"code": Code.WORKER_FAILED},
        {"work": None},
        {"zeroization": ()},
        {"zeroization": (Probe(probe="swap", result=ProbeResult.FOUND),)},
        {"zeroization": (Probe(probe="swap", result=ProbeResult.CLEAN),) * 2},
        {"assurance": None},
        {"ear_sha256": None},
        {"ear_sha256": None, "assurance": None},
        {"evidence_sha256": None},
        {"finished_us": 1},
        {"lifecycle_us": {"total": 1}},
        {"outputs": RUN.receipt.outputs[::-1]},
        {"outputs": RUN.receipt.outputs[1:]},
    ],
    ids=str,
)
def test_a_receipt_that_contradicts_itself_cannot_be_made(change: dict[str, Any]) -> None:
    with pytest.raises(FormatError) as caught:
        replace(RUN.receipt, **change)
    assert caught.value.code is Code.SCHEMA


@pytest.mark.parametrize("change", [{"outputs": RUN.receipt.outputs}, {"work": RUN.receipt.work}], ids=str)
def test_a_run_that_was_given_no_key_has_no_outputs(change: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match="had no key"):
        replace(REFUSED.receipt, **change)


def test_a_probe_that_found_something_makes_it_residue() -> None:
    found = (Probe(probe="swap", result=ProbeResult.FOUND),)
    receipt = replace(RUN.receipt, zeroization=found, outcome=Outcome.RESIDUE, code=Code.RESIDUE_FOUND)
    assert Receipt.from_json(receipt.to_json()) == receipt


def test_the_launch_key_signs_exactly_where_no_attestation_result_vouches() -> None:
    with pytest.raises(ValueError, match="launch key"):
        RUN.receipt.sign(WORLD.evidence_key, WORLD.launch_key)
    with pytest.raises(ValueError, match="launch key"):
        REFUSED.receipt.sign(WORLD.evidence_key)
    with pytest.raises(ValueError, match="another evidence key"):
        RUN.receipt.sign(WORLD.key("stranger"))
    names = [name for name, _ in REFUSED.bundle.receipt.signatures]
    assert names == sorted([WORLD.evidence_key.key_id, WORLD.launch_key.key_id])


def test_a_receipt_with_a_signer_too_many_or_too_few_is_not_believed() -> None:
    keys = {"evidence_public": WORLD.evidence_key.public}
    lone = dsse.sign(RECEIPT_TYPE, REFUSED.bundle.receipt.payload, [WORLD.evidence_key])
    crowded = dsse.sign(RECEIPT_TYPE, RUN.bundle.receipt.payload, [WORLD.evidence_key, WORLD.launch_key])
    for data, launch in ((lone, None), (lone, WORLD.launch_key.public), (crowded, None)):
        with pytest.raises(FormatError) as caught:
            Receipt.from_envelope(data, **keys, launch_public=launch)
        assert caught.value.code is Code.SIGNATURE
    # Signed by both, as if there were no EAR, while it names one.
    with pytest.raises(FormatError) as caught:
        Receipt.from_envelope(crowded, **keys, launch_public=WORLD.launch_key.public)
    assert caught.value.code is Code.SIGNATURE


def test_the_broker_countersigns_once_and_repeats_itself() -> None:
    receipt = RUN.bundle.receipt
    first = countersign(receipt)
    assert CountersignedReceipt.parse_signed(first.encode(), WORLD.broker.public) == first
    assert countersign(receipt, previous=first, now_us=WORLD.now_us + 10**9) is first
    second = signed(replace(RUN.receipt, segments=2))
    assert refusal(second, previous=first) is Code.HEAD_INCONSISTENT


def test_the_broker_closes_no_run_that_has_not_ended() -> None:
    assert refusal(RUN.bundle.receipt, final=HEADS[-2]) is Code.HEAD_INCONSISTENT


@pytest.mark.parametrize("change", [{"log_root": bytes(32)}, {"log_size": 1}, {"run_id": "00" * 16}], ids=str)
def test_the_broker_closes_no_run_with_the_receipt_of_another(change: dict[str, Any]) -> None:
    receipt = signed(replace(RUN.receipt, **change))
    assert refusal(receipt) is Code.HEAD_INCONSISTENT


def test_the_broker_believes_only_the_attested_key() -> None:
    receipt = RUN.bundle.receipt
    assert refusal(receipt, evidence_public=WORLD.key("other").public) is Code.EVIDENCE_SIGNATURE
    assert refusal(REFUSED.bundle.receipt) is Code.EVIDENCE_SIGNATURE
    assert refusal(dsse.sign("text/plain", receipt.payload, [WORLD.evidence_key])) is Code.MESSAGE_INVALID
    for payload, code in ((b"{}", Code.MESSAGE_INVALID), (b" " * (1 << 18), Code.MESSAGE_TOO_LARGE)):
        assert refusal(dsse.sign(RECEIPT_TYPE, payload, [WORLD.evidence_key])) is code


def test_the_countersigning_time_is_not_before_the_final_heads() -> None:
    assert countersign(RUN.bundle.receipt, now_us=1).time_us == HEADS[-1].time_us


def test_the_messages_travel_unchanged() -> None:
    submission = ReceiptSubmission(receipt=RUN.bundle.receipt.encode(), head=RUN.final_head)
    assert ReceiptSubmission.parse(submission.encode()) == submission
    assert claimed_head(submission.head).run_id == RUN.receipt.run_id
    assert RUN.bundle.countersignature
    answer = ReceiptAnswer(
        countersignature=RUN.bundle.countersignature.encode(), delegation=RUN.bundle.delegation.encode()
    )
    assert ReceiptAnswer.parse(answer.encode()) == answer
    for parse in (ReceiptSubmission.parse, ReceiptAnswer.parse, Bundle.parse):
        with pytest.raises(FormatError):
            parse(b"{}")


def test_a_receipt_with_every_output_it_may_have_passes_the_gates_limit() -> None:
    outputs = tuple(replace(RUN.receipt.outputs[0], sequence=number) for number in range(400))
    probes = tuple(Probe(probe=name, result=ProbeResult.CLEAN, detail="," * 200) for name in PROBES)
    largest = replace(RUN.receipt, outputs=outputs, zeroization=probes)
    assert len(ReceiptSubmission(receipt=signed(largest).encode(), head=RUN.final_head).encode()) <= 256 * 1024
    assert countersign(signed(largest)).run_id == largest.run_id
    with pytest.raises(FormatError, match="too many outputs"):
        replace(RUN.receipt, outputs=(*outputs, replace(outputs[0], sequence=400)))


BOMBS = {
    "lists": b"[" + b"[]," * 30_000 + b'"x"]',
    "chains": b"[" + b"[[[[[[[[[[[[[[]]]]]]]]]]]]]]," * 3_000 + '"é"]'.encode(),
    "names": "{{{}}}".format(",".join(f'"é{number:05d}":0' for number in range(5_900))).encode(),
    "text": b'"' + "é".encode() * 45_000 + b'"',
}


@pytest.mark.parametrize("payload", BOMBS.values(), ids=BOMBS)
def test_what_its_own_key_signed_is_bounded_before_it_is_parsed(payload: bytes) -> None:
    """One letter that is not ASCII sent ninety kilobytes through Python, piece by piece."""
    receipt, calls = dsse.sign(RECEIPT_TYPE, payload, [WORLD.evidence_key]), 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        with pytest.raises(SignedReceiptRefusedError):
            countersign(receipt)
    finally:
        sys.setprofile(before)
    assert calls < 300


def test_a_bundle_is_the_same_after_a_round_trip_and_knows_its_head() -> None:
    for run, countersigned in ((RUN, True), (REFUSED, False)):
        assert Bundle.parse(run.data) == run.bundle
        assert Bundle.parse(run.data).encode() == run.data
        assert run.bundle.head_is_countersigned is countersigned
    with pytest.raises(FormatError) as caught:
        replace(RUN.bundle, head=RUN.bundle.receipt)
    assert caught.value.code is Code.WRONG_TYPE


def test_a_part_that_is_absent_rather_than_null_is_not_a_bundle() -> None:
    parts = dict.fromkeys(("manifest", "evidence", "ear", "countersignature"))
    whole = {
        **parts,
        "kind": "https://glasshouse.dev/receipt-bundle/v1",
        "delegation": RUN.bundle.delegation.to_json(),
        "token": RUN.bundle.token,
        "head": envelope(RUN.final_head).to_json(),
        "receipt": RUN.bundle.receipt.to_json(),
    }
    assert Bundle.parse(encode(whole)).ear is None
    for name in whole:
        with pytest.raises(FormatError) as caught:
            Bundle.parse(encode({key: value for key, value in whole.items() if key != name}))
        assert caught.value.code is Code.SCHEMA
