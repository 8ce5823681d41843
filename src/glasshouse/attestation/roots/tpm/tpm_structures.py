"""Keys and signatures of TPM 2.0, each in its one form.

Source: TCG TPM 2.0 Library, Part 2, 11.3 and 12.2.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.errors import Code, FormatError

Key = ec.EllipticCurvePublicKey | rsa.RSAPublicKey

# Of a TPMT_PUBLIC: kind; algorithm of the name, SHA-256 or SHA-384; fixedTPM, fixedParent, sensitiveDataOrigin,
# userWithAuth, restricted and sign, with or without noDA; no policy; no symmetric algorithm; then of ECC: ECDSA with
# SHA-256, P-256, no derivation, the point; of RSA: RSASSA with SHA-256, 2048 bits, the usual exponent, the modulus.
_COMMON = rb"\0[\x0b\x0c]\0\x05[\0\x04]\x72\0\0\0\x10"
_ECC = re.compile(rb"\0\x23" + _COMMON + rb"\0\x18\0\x0b\0\x03\0\x10\0\x20(.{32})\0\x20(.{32})", re.DOTALL)
_RSA = re.compile(rb"\0\x01" + _COMMON + rb"\0\x14\0\x0b\x08\0\0\0\0\0\x01\0([\x80-\xff].{255})", re.DOTALL)


@contextmanager
def refused(code: Code, what: str) -> Iterator[None]:
    """Turn what a reader raises into a refusal of check 12."""
    try:
        yield
    except FormatError as error:
        raise CheckFailedError("12", code, f"{what}: {error.message}") from None
    except ValueError as error:
        raise CheckFailedError("12", code, f"{what}: {error}") from None


def sized(data: bytes) -> tuple[bytes, bytes]:
    """Return the content of the TPM2B that data begins with, and what is behind it; raises `FormatError`."""
    end = 2 + int.from_bytes(data[:2], "big")
    if len(data) < end:
        raise FormatError(Code.SCHEMA, "a structure that is cut short")
    return data[2:end], data[end:]


def attesting_key(public: bytes) -> Key:
    """Return the key of a TPMT_PUBLIC that can sign nothing but what its TPM attests.

    Raises:
        CheckFailedError: `tpm-key`, for attributes too: a key without `restricted` signs attestations made at home.
    """
    with refused(Code.TPM_KEY, "the attestation key"):
        if found := _ECC.fullmatch(public):
            x, y = (int.from_bytes(number, "big") for number in found.groups())
            return ec.EllipticCurvePublicNumbers(x, y, ec.SECP256R1()).public_key()
        if (found := _RSA.fullmatch(public)) and public[-1] & 1:
            return rsa.RSAPublicNumbers(65537, int.from_bytes(found[1], "big")).public_key()
        raise FormatError(
            Code.SCHEMA,
            "not a restricted signing key of ECC P-256 with ECDSA-SHA-256 or RSA-2048 with RSASSA-SHA-256: "
            f"attributes {public[4:8].hex()}, where 00050072 or 00050472 are wanted",
        )


def check_ak(public: bytes) -> bytes:
    """Check an attestation key and return its name.

    Args:
        public: TPMT_PUBLIC.

    Raises:
        CheckFailedError: `tpm-key`.
    """
    attesting_key(public)
    return public[2:4] + hashlib.new("sha256" if public[3] == 0x0B else "sha384", public).digest()


def check_signature(key: Key, signature: bytes, message: bytes) -> None:
    """A TPMT_SIGNATURE of the scheme that the key has; raises `CheckFailedError`, `hardware-signature`."""
    is_rsa = isinstance(key, rsa.RSAPublicKey)
    with refused(Code.HARDWARE_SIGNATURE, "the quote's signature"):
        value, rest = sized(signature[4:])
        number, rest = (b"", rest) if is_rsa else sized(rest)
        if signature[:4] != (b"\0\x14\0\x0b" if is_rsa else b"\0\x18\0\x0b") or rest:
            raise FormatError(Code.SCHEMA, "of another scheme or form than the key's")
        try:
            if isinstance(key, rsa.RSAPublicKey):
                key.verify(value, message, padding.PKCS1v15(), SHA256())
            else:
                r, s = (int.from_bytes(one, "big") if len(one) <= 32 else 0 for one in (value, number))
                key.verify(encode_dss_signature(r, s), message, ec.ECDSA(SHA256()))
        except InvalidSignature:
            raise FormatError(Code.SCHEMA, "the attestation key did not sign this") from None
