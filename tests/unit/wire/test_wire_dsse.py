"""Envelopes: one spelling, exactly the expected signers, and a type that cannot be exchanged."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import pytest

from glasshouse.errors import Code, FormatError
from glasshouse.wire import dsse
from glasshouse.wire.canonical import encode
from glasshouse.wire.crypto import SigningKey, key_id, verify_signature

ALICE, BOB, MALLORY = (SigningKey(letter * 32) for letter in (b"a", b"b", b"m"))
KIND, OTHER = "application/vnd.example+json", "application/vnd.other+json"
PAYLOAD = b'{"a":1}'


def refusal(envelope: dsse.Envelope, kind: str, *publics: bytes) -> Code:
    with pytest.raises(FormatError) as caught:
        envelope.verify(kind, *publics)
    return caught.value.code


def parse_refusal(value: Any) -> Code:
    with pytest.raises(FormatError) as caught:
        dsse.Envelope.parse(encode(value), max_bytes=10_000)
    return caught.value.code


def test_the_example_of_the_dsse_specification() -> None:
    expected = b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    assert dsse.pae("http://example.com/HelloWorld", b"hello world") == expected


def test_what_was_signed_is_returned_to_whoever_knows_the_key() -> None:
    envelope = dsse.sign(KIND, PAYLOAD, [ALICE])
    assert dsse.Envelope.parse(envelope.encode(), max_bytes=10_000) == envelope
    assert envelope.verify(KIND, ALICE.public) == PAYLOAD


def test_an_envelope_of_one_type_is_not_one_of_another() -> None:
    envelope = dsse.sign(KIND, PAYLOAD, [ALICE])
    assert refusal(envelope, OTHER, ALICE.public) is Code.WRONG_TYPE
    assert refusal(replace(envelope, payload_type=OTHER), OTHER, ALICE.public) is Code.SIGNATURE


def test_type_and_payload_cannot_trade_bytes() -> None:
    one = dsse.pae("type", b"1 x")
    assert one != dsse.pae("type 3", b"1 x"[2:])
    envelope = dsse.sign("a", b"b c", [ALICE])
    assert refusal(replace(envelope, payload_type="a b", payload=b"c"), "a b", ALICE.public) is Code.SIGNATURE


def test_exactly_the_expected_keys_must_have_signed() -> None:
    both = dsse.sign(KIND, PAYLOAD, [BOB, ALICE])
    assert both.verify(KIND, ALICE.public, BOB.public) == PAYLOAD
    for publics in ([], [ALICE.public], [ALICE.public, MALLORY.public], [ALICE.public, BOB.public, MALLORY.public]):
        assert refusal(both, KIND, *publics) is Code.SIGNATURE
    lone = dsse.sign(KIND, PAYLOAD, [ALICE])
    assert refusal(lone, KIND, ALICE.public, BOB.public) is Code.SIGNATURE
    assert refusal(lone, KIND) is Code.SIGNATURE


def test_a_signature_under_another_keys_name() -> None:
    forged = dsse.sign(KIND, PAYLOAD, [MALLORY])
    posing = replace(forged, signatures=((ALICE.key_id, forged.signatures[0][1]),))
    assert refusal(posing, KIND, ALICE.public) is Code.SIGNATURE


def test_every_flipped_bit_of_payload_and_signature_is_seen() -> None:
    envelope = dsse.sign(KIND, PAYLOAD, [ALICE])
    name, signature = envelope.signatures[0]
    for at in range(len(PAYLOAD) * 8):
        changed = bytearray(PAYLOAD)
        changed[at // 8] ^= 1 << at % 8
        assert refusal(replace(envelope, payload=bytes(changed)), KIND, ALICE.public) is Code.SIGNATURE
    for at in range(64 * 8):
        changed = bytearray(signature)
        changed[at // 8] ^= 1 << at % 8
        assert refusal(replace(envelope, signatures=((name, bytes(changed)),)), KIND, ALICE.public) is Code.SIGNATURE


def document(**changes: Any) -> dict[str, Any]:
    return {**dsse.sign(KIND, PAYLOAD, [ALICE]).to_json(), **changes}


def test_signatures_that_are_missing_repeated_unsorted_or_too_many() -> None:
    one, two = dsse.sign(KIND, PAYLOAD, [ALICE, BOB]).to_json()["signatures"]
    for signatures in ([], [one, one], [two, one], [one] * 5):
        assert parse_refusal(document(signatures=signatures)) is Code.SCHEMA


@pytest.mark.parametrize(
    "text",
    ["eyJhIjoxfQ", "eyJhIjoxfQ=", "eyJhIjoxfR==", "eyJh\nIjoxfQ==", "eyJhIjoxfQ== ", "eyJh-joxfQ==", "é", 5, None],
)
def test_base64_has_one_spelling(text: Any) -> None:
    assert parse_refusal(document(payload=text)) is Code.SCHEMA


@pytest.mark.parametrize("size", [0, 63, 65])
def test_a_signature_is_64_bytes(size: int) -> None:
    signature = {"keyid": ALICE.key_id, "sig": base64.b64encode(bytes(size)).decode()}
    assert parse_refusal(document(signatures=[signature])) is Code.SCHEMA


def test_nothing_may_be_added_or_left_out() -> None:
    assert parse_refusal(document(extra=1)) is Code.SCHEMA
    for name in document():
        assert parse_refusal({key: value for key, value in document().items() if key != name}) is Code.SCHEMA
    crowded = {**document()["signatures"][0], "cert": "x"}
    assert parse_refusal(document(signatures=[crowded])) is Code.SCHEMA


def test_size_and_form_are_checked_before_anything_else() -> None:
    data = dsse.sign(KIND, PAYLOAD, [ALICE]).encode()
    for wrong, code in ((data + b"\n", Code.NOT_CANONICAL), (data[:-1], Code.SCHEMA), (b"[]", Code.SCHEMA)):
        with pytest.raises(FormatError) as caught:
            dsse.Envelope.parse(wrong, max_bytes=10_000)
        assert caught.value.code is code
    with pytest.raises(FormatError) as caught:
        dsse.Envelope.parse(data, max_bytes=len(data) - 1)
    assert caught.value.code is Code.TOO_LARGE


def test_the_ed25519_example_of_rfc_8032_section_7_1() -> None:
    key = SigningKey(bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"))
    assert key.public.hex() == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert key.sign(b"").hex() == (
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
        "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
    )
    assert SigningKey(key.seed()).public == key.public


def test_a_signature_with_its_scalar_beyond_the_order_is_refused() -> None:
    """S + L satisfies the equation too: a second valid-looking signature without the key (RFC 8032 section 5.1.7)."""
    order = 2**252 + 27742317777372353535851937790883648493
    envelope = dsse.sign(KIND, PAYLOAD, [ALICE])
    name, signature = envelope.signatures[0]
    scalar = int.from_bytes(signature[32:], "little") + order
    twin = signature[:32] + scalar.to_bytes(32, "little")
    assert refusal(replace(envelope, signatures=((name, twin),)), KIND, ALICE.public) is Code.SIGNATURE


def test_a_public_key_that_is_no_point_verifies_nothing() -> None:
    envelope = dsse.sign(KIND, PAYLOAD, [ALICE])
    for public in (b"\xff" * 32, b"", bytes(31)):
        posing = replace(envelope, signatures=((key_id(public), envelope.signatures[0][1]),))
        assert refusal(posing, KIND, public) is Code.SIGNATURE


def test_a_key_does_not_print_itself() -> None:
    assert ALICE.seed().hex() not in repr(ALICE)
    assert ALICE.key_id in repr(ALICE)
    assert len(ALICE.key_id) == 32
    assert SigningKey.generate().public != SigningKey.generate().public


@pytest.mark.parametrize(
    "public",
    [
        "0100000000000000000000000000000000000000000000000000000000000000",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "0000000000000000000000000000000000000000000000000000000000000000",
        "0000000000000000000000000000000000000000000000000000000000000080",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    ],
)
def test_a_key_under_which_anyone_can_sign_verifies_nothing(public: str) -> None:
    key, identity = bytes.fromhex(public), b"\x01" + bytes(31)
    for number in range(40):  # without a private key one of these fits a message in eight at least
        for point in (identity, key):
            with pytest.raises(FormatError) as refused:
                verify_signature(key, point + bytes(32), b"message %d" % number)
            assert refused.value.code is Code.SIGNATURE
