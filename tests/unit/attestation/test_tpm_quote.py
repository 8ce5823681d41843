"""A quote of the right key is refused for each thing that it does not say, and in each form that is not its one."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.tpm.tpm_quote import appraise_quote
from glasshouse.errors import Code
from glasshouse.wire.crypto import sha256

ECC = ec.generate_private_key(ec.SECP256R1())
RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
VALUES = [sha256(bytes([register])) for register in range(2)]
SELECTED = b"\0\0\0\1\0\x0b\3\3\0\0"
ECDSA, RSASSA = b"\0\x18\0\x0b", b"\0\x14\0\x0b"
RUN = sha256(b"this run")


def sized(data: bytes) -> bytes:
    return struct.pack(">H", len(data)) + data


def quote(*, head: bytes = b"\xffTCG\x80\x18", selection: bytes = SELECTED, values: list[bytes] = VALUES) -> bytes:
    digest = sized(sha256(b"".join(values)))
    return head + sized(b"its signer") + sized(RUN) + bytes(25) + selection + digest


def signed(message: bytes, *, scheme: bytes = ECDSA, size: int = 32, behind: bytes = b"") -> bytes:
    numbers = decode_dss_signature(ECC.sign(message, ec.ECDSA(SHA256())))
    return scheme + b"".join(sized(number.to_bytes(size, "big")) for number in numbers) + behind


def signed_by_rsa(message: bytes, *, scheme: bytes = RSASSA, behind: bytes = b"") -> bytes:
    return scheme + sized(RSA.sign(message, padding.PKCS1v15(), SHA256())) + behind


def appraise(message: bytes, signature: bytes | None = None, **changed: Any) -> None:
    given = {"key": ECC.public_key(), "values": VALUES, "accepted": {"1": VALUES[1:]}, "extra_data": RUN} | changed
    appraise_quote(message, signature or signed(message), log=b"", registers=(0, 1), **given)


def test_a_good_one_is_accepted_of_either_key() -> None:
    appraise(quote())
    appraise(quote(), signed_by_rsa(quote()), key=RSA.public_key())


@pytest.mark.parametrize(
    "message",
    [
        b"",
        quote(head=b"\xffTCG\x80\x17"),  # what a TPM certifies, and does not quote
        quote(head=b"\0TCG\x80\x18"),  # signed at home
        quote(selection=b"\0\0\0\1\0\x0b\3\1\0\0"),
        quote(selection=b"\0\0\0\1\0\x0b\3\7\0\0"),
        quote(selection=b"\0\0\0\1\0\4\3\3\0\0"),  # SHA-1
        quote(selection=SELECTED[3:] + b"\0\0\0"),
        quote(values=VALUES[:1]),
        quote(values=VALUES[::-1]),
        quote()[:-1],
        quote() + b"\0",
        b"\xffTCG\x80\x18\xff\xff" + quote()[8:],  # a name that goes on behind its end
    ],
)  # fmt: skip
def test_a_quote_that_says_something_else(message: bytes) -> None:
    with pytest.raises(CheckFailedError) as refused:
        appraise(message)
    assert refused.value.code is Code.TPM_QUOTE


def test_values_are_one_for_each_register() -> None:
    """One digest is over all, so that the same bytes could be cut in another way."""
    joined = b"".join(VALUES)
    for values in ([joined], [joined[:1], joined[1:40], joined[40:]]):
        with pytest.raises(CheckFailedError) as refused:
            appraise(quote(), values=values)
        assert refused.value.code is Code.TPM_QUOTE


@pytest.mark.parametrize(
    ("accepted", "shown"), [({"1": VALUES[:1]}, VALUES[1].hex()), ({"1": VALUES[1:], "7": VALUES}, "not quoted")]
)
def test_a_refusal_names_the_register(accepted: dict[str, list[bytes]], shown: str) -> None:
    with pytest.raises(CheckFailedError, match=f"register {max(accepted)} of the TPM") as refused:
        appraise(quote(), accepted=accepted)
    assert (refused.value.code, refused.value.actual) == (Code.REFERENCE_VALUE, shown)


@pytest.mark.parametrize(
    ("key", "signature"),
    [
        (ECC, lambda: signed(quote(), scheme=RSASSA)),
        (ECC, lambda: signed(quote(), scheme=b"\0\x18\0\x0c")),
        (ECC, lambda: signed(quote(), behind=b"\0")),
        (ECC, lambda: signed(quote(), size=33)),
        (ECC, lambda: signed(quote())[:-1]),
        (ECC, lambda: signed(quote() + b"\0")),
        (ECC, lambda: signed_by_rsa(quote())),
        (RSA, lambda: signed_by_rsa(quote(), scheme=ECDSA)),
        (RSA, lambda: signed_by_rsa(quote(), scheme=b"\0\x16\0\x0b")),
        (RSA, lambda: signed_by_rsa(quote(), behind=b"\0")),
        (RSA, lambda: signed_by_rsa(quote() + b"\0")),
        (RSA, lambda: signed(quote())),
    ],
)  # fmt: skip
def test_a_signature_has_one_form(key: Any, signature: Callable[[], bytes]) -> None:
    with pytest.raises(CheckFailedError) as refused:
        appraise(quote(), signature(), key=key.public_key())
    assert refused.value.code is Code.HARDWARE_SIGNATURE


def test_another_runs_is_refused() -> None:
    with pytest.raises(CheckFailedError) as refused:
        appraise(quote(), extra_data=sha256(b"another run"))
    assert refused.value.code is Code.HARDWARE_BINDING
