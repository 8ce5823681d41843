"""HPKE: opens for one key in one context, and for nothing else."""

from __future__ import annotations

import pytest

from glasshouse.errors import Code, FormatError
from glasshouse.wire.crypto import (
    _X25519_ORDER_8,
    HPKE_OVERHEAD_BYTES,
    HPKE_PRIVATE_BYTES,
    HPKE_PUBLIC_BYTES,
    RecipientKey,
    check_recipient,
    hpke_seal,
    key_id,
)

ALICE = RecipientKey(bytes(range(96)))
BOB = RecipientKey(bytes(range(1, 97)))
SECRET, INFO = b"a package key of 32 bytes.......", b"run 7"


def refused(sealed: bytes, *, key: RecipientKey = ALICE, info: bytes = INFO) -> None:
    with pytest.raises(FormatError) as caught:
        key.open(sealed, info=info)
    assert caught.value.code is Code.SIGNATURE


@pytest.fixture(scope="module")
def sealed() -> bytes:
    return hpke_seal(SECRET, recipient=ALICE.public, info=INFO)


def test_what_was_sealed_opens_for_its_recipient(sealed: bytes) -> None:
    assert ALICE.open(sealed, info=INFO) == SECRET
    assert len(sealed) == len(SECRET) + HPKE_OVERHEAD_BYTES
    assert hpke_seal(SECRET, recipient=ALICE.public, info=INFO) != sealed


FIELD = 2**255 - 19


@pytest.mark.parametrize(
    "half",
    [
        (int.from_bytes(ALICE.public[1184:], "little") | 1 << 255).to_bytes(32, "little"),
        FIELD.to_bytes(32, "little"),
        (FIELD + 9).to_bytes(32, "little"),
        bytes(32),
        (FIELD - 1).to_bytes(32, "little"),
        _X25519_ORDER_8[0].to_bytes(32, "little"),
        _X25519_ORDER_8[1].to_bytes(32, "little"),
    ],
    ids=["highest bit", "zero again", "nine again", "zero", "minus one", "order 8", "order 8 too"],
)
def test_a_public_key_has_one_encoding_and_something_can_be_sealed_to_it(half: bytes) -> None:
    """X25519 ignores the highest bit and counts modulo the field: another name of it, another release."""
    check_recipient(ALICE.public)
    key = ALICE.public[:1184] + half
    for check in (check_recipient, lambda public: hpke_seal(SECRET, recipient=public, info=INFO)):
        with pytest.raises(FormatError) as caught:
            check(key)
        assert caught.value.code is Code.SCHEMA


def test_a_public_key_whose_lattice_half_is_beyond_the_modulus_is_none() -> None:
    with pytest.raises(FormatError):
        check_recipient(b"\xff" * 1152 + ALICE.public[1152:])


def test_another_recipient_or_another_context(sealed: bytes) -> None:
    refused(sealed, key=BOB)
    for info in (b"", b"run 8", INFO + b"\x00", INFO[:-1]):
        refused(sealed, info=info)


def test_changed_cut_and_lengthened_messages(sealed: bytes) -> None:
    for at in (0, 500, 1087, 1088, 1119, 1120, len(sealed) - 17, len(sealed) - 1):
        changed = bytearray(sealed)
        changed[at] ^= 1
        refused(bytes(changed))
    for wrong in (
        b"",
        sealed[:1],
        sealed[:1119],
        sealed[:1120],
        sealed[:1135],
        sealed[:-1],
        sealed + b"\x00",
        sealed * 2,
    ):
        refused(wrong)


def test_private_keys_come_back_from_their_bytes(sealed: bytes) -> None:
    again = RecipientKey(ALICE.private())
    assert again.public == ALICE.public
    assert again.open(sealed, info=INFO) == SECRET
    assert len(ALICE.public) == HPKE_PUBLIC_BYTES == 1216
    assert len(ALICE.private()) == HPKE_PRIVATE_BYTES == 96
    fresh = RecipientKey.generate()
    assert fresh.open(hpke_seal(b"", recipient=fresh.public, info=b""), info=b"") == b""


@pytest.mark.parametrize("size", [0, 95, 97, 32])
def test_a_private_key_has_one_length(size: int) -> None:
    with pytest.raises(ValueError, match="96 bytes"):
        RecipientKey(bytes(size))


@pytest.mark.parametrize(
    "public", [b"", b"x", bytes(1215), bytes(1217), b"\xff" * 1216, ALICE.public[:-32] + bytes(32)], ids=len
)
def test_what_is_no_public_key_is_not_sealed_to(public: bytes) -> None:
    with pytest.raises(FormatError) as caught:
        hpke_seal(SECRET, recipient=public, info=INFO)
    assert caught.value.code is Code.SCHEMA


def test_a_key_does_not_print_itself() -> None:
    assert repr(ALICE) == f"RecipientKey({key_id(ALICE.public)})"
    assert key_id(ALICE.public) != key_id(BOB.public)
