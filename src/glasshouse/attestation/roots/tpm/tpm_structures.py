"""Structures of TPM 2.0 in their one form, and the keys that they hold.

Source: TCG TPM 2.0 Library, Part 2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.errors import Code, FormatError

ALG_SHA256 = 0x000B
_NAMES = {ALG_SHA256: "sha256", 0x000C: "sha384"}
_RSA, _ECC, _NULL, _RSASSA, _ECDSA, _P256 = 0x0001, 0x0023, 0x0010, 0x0014, 0x0018, 0x0003
# fixedTPM, fixedParent, sensitiveDataOrigin, userWithAuth, restricted, sign; noDA may stand beside them.
_ATTESTING, _NO_DA = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 16 | 1 << 18, 1 << 10


class TpmReader:
    """Takes big-endian fields from a structure; raises `FormatError` where it ends early or late."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, length: int) -> bytes:
        """Return the next bytes."""
        self._at += length
        if self._at > len(self._data):
            raise FormatError(Code.SCHEMA, "a structure that is cut short")
        return self._data[self._at - length : self._at]

    def number(self, length: int) -> int:
        """Return an unsigned number of so many bytes."""
        return int.from_bytes(self.take(length), "big")

    def sized(self) -> bytes:
        """Return the content of a TPM2B."""
        return self.take(self.number(2))

    def want(self, *numbers: int) -> None:
        """Take 16-bit numbers that have to be these."""
        if any(self.number(2) != number for number in numbers):
            raise FormatError(Code.SCHEMA, "an algorithm that is not accepted")

    def end(self) -> None:
        """Nothing is left."""
        if self._at != len(self._data):
            raise FormatError(Code.SCHEMA, "bytes behind a structure")


@contextmanager
def refused(code: Code, what: str) -> Iterator[None]:
    """Turn what a reader raises into a refusal of check 12."""
    try:
        yield
    except FormatError as error:
        raise CheckFailedError("12", code, f"{what}: {error.message}") from None
    except ValueError as error:
        raise CheckFailedError("12", code, f"{what}: {error}") from None


Key = ec.EllipticCurvePublicKey | rsa.RSAPublicKey


def attesting_key(public: bytes) -> Key:
    """Return the key of a TPMT_PUBLIC that can sign nothing but what its TPM attests.

    Raises:
        CheckFailedError: `tpm-key`, for attributes too: a key without `restricted` signs attestations made at home.
    """
    with refused(Code.TPM_KEY, "the attestation key"):
        reader = TpmReader(public)
        kind, name_algorithm, attributes = reader.number(2), reader.number(2), reader.number(4)
        if name_algorithm not in _NAMES:
            raise FormatError(Code.SCHEMA, "a name that is of neither SHA-256 nor SHA-384")
        if attributes & ~_NO_DA != _ATTESTING:
            raise FormatError(
                Code.SCHEMA, f"attributes {attributes:#x}, not those of a restricted signing key, {_ATTESTING:#x}"
            )
        reader.want(0)  # no authorization policy
        reader.want(_NULL)  # no symmetric algorithm
        key: Key
        if kind == _ECC:
            reader.want(_ECDSA, ALG_SHA256, _P256, _NULL)
            x, y = reader.sized(), reader.sized()
            key = ec.EllipticCurvePublicNumbers(
                int.from_bytes(x, "big"), int.from_bytes(y, "big"), ec.SECP256R1()
            ).public_key()
            canonical = len(x) == len(y) == 32
        else:
            reader.want(_RSASSA, ALG_SHA256, 2048, 0, 0)  # the exponent is the usual one
            modulus = reader.sized()
            key = rsa.RSAPublicNumbers(65537, int.from_bytes(modulus, "big")).public_key()
            canonical = kind == _RSA and len(modulus) == 256 and modulus[0] >= 0x80 and modulus[-1] % 2 == 1
        reader.end()
        if not canonical:
            raise FormatError(Code.SCHEMA, "a key of another kind or size than ECC P-256 or RSA-2048")
    return key


def check_ak(public: bytes) -> bytes:
    """Check an attestation key and return its name.

    Args:
        public: TPMT_PUBLIC.

    Raises:
        CheckFailedError: `tpm-key`.
    """
    attesting_key(public)
    algorithm = public[2:4]
    return algorithm + hashlib.new(_NAMES[int.from_bytes(algorithm, "big")], public).digest()


def check_signature(key: Key, signature: bytes, message: bytes) -> None:
    """A TPMT_SIGNATURE of the scheme that the key has.

    Raises:
        CheckFailedError: `hardware-signature`.
    """
    with refused(Code.HARDWARE_SIGNATURE, "the quote's signature"):
        reader = TpmReader(signature)
        try:
            if isinstance(key, rsa.RSAPublicKey):
                reader.want(_RSASSA, ALG_SHA256)
                value = reader.sized()
                reader.end()
                key.verify(value, message, padding.PKCS1v15(), SHA256())
            else:
                reader.want(_ECDSA, ALG_SHA256)
                r, s = reader.sized(), reader.sized()
                reader.end()
                if len(r) > 32 or len(s) > 32:
                    raise FormatError(Code.SCHEMA, "a number of more bytes than the curve has")
                pair = int.from_bytes(r, "big"), int.from_bytes(s, "big")
                key.verify(encode_dss_signature(*pair), message, ec.ECDSA(SHA256()))
        except InvalidSignature:
            raise FormatError(Code.SCHEMA, "the attestation key did not sign this") from None
