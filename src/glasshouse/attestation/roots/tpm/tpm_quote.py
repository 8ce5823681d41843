"""A TPM's quote: by a key that signs nothing but what its TPM attests, over exactly the registers that were asked for.

Source: TCG TPM 2.0 Library, Part 2, 10.12, 10.13, 11.3 and 12.2.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Mapping, Sequence

from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256

from glasshouse.attestation.refusal import check_same
from glasshouse.attestation.roots.refusing import check_listed, refused, require
from glasshouse.attestation.roots.tpm.boot_log import BootLog
from glasshouse.attestation.roots.tpm.tpm_policy import QUOTED_PCRS
from glasshouse.errors import Code, FormatError
from glasshouse.wire.canonical import Json
from glasshouse.wire.crypto import sha256

Key = ec.EllipticCurvePublicKey | rsa.RSAPublicKey

# Of a TPMT_PUBLIC: kind; algorithm of the name, SHA-256 or SHA-384; fixedTPM, fixedParent, sensitiveDataOrigin,
# userWithAuth, restricted and sign, with or without noDA; no policy; no symmetric algorithm; then of ECC: ECDSA with
# SHA-256, P-256, no derivation, the point; of RSA: RSASSA with SHA-256, 2048 bits, the usual exponent, the modulus.
_COMMON = rb"\0[\x0b\x0c]\0\x05[\0\x04]\x72\0\0\0\x10"
_ECC = re.compile(rb"\0\x23" + _COMMON + rb"\0\x18\0\x0b\0\x03\0\x10\0\x20(.{32})\0\x20(.{32})", re.DOTALL)
_RSA = re.compile(rb"\0\x01" + _COMMON + rb"\0\x14\0\x0b\x08\0\0\0\0\0\x01\0([\x80-\xff].{255})", re.DOTALL)

_HEAD = b"\xffTCG\x80\x18"  # TPM_GENERATED, TPM_ST_ATTEST_QUOTE
# Clock; resets; restarts, and whether the clock is safe; firmware's version; selection of one bank; digest.
_REST = struct.Struct(">8xI5xQ10s34s")
_LOGGED = range(10)  # what the firmware and the boot loader write to


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
    with refused(Code.HARDWARE_SIGNATURE, "the quote's signature"):
        value, rest = _sized(signature[4:])
        if isinstance(key, rsa.RSAPublicKey):
            require((signature[:4], rest) == (b"\0\x14\0\x0b", b""), "of another scheme or form than the key's")
            key.verify(value, message, padding.PKCS1v15(), SHA256())
        else:
            number, rest = _sized(rest)
            require((signature[:4], rest) == (b"\0\x18\0\x0b", b""), "of another scheme or form than the key's")
            r, s = (int.from_bytes(one, "big") if len(one) <= 32 else 0 for one in (value, number))
            key.verify(encode_dss_signature(r, s), message, ec.ECDSA(SHA256()))


def appraise_quote(
    quote: bytes,
    signature: bytes,
    *,
    key: Key,
    values: Sequence[bytes],
    log: bytes,
    accepted: Mapping[str, Sequence[bytes]],
    extra_data: bytes,
    registers: Sequence[int] = QUOTED_PCRS,
) -> dict[str, Json]:
    """Make checks 4 to 8 of a quote; return what it says beside them.

    Args:
        quote: TPMS_ATTEST.
        signature: TPMT_SIGNATURE.
        values: of the bank sha256, as the evidence has them, one for each register.
        log: the firmware's, or empty.
        accepted: values by register, of a policy.
        extra_data: that the quote has to carry.
        registers: sorted; no other may be selected.

    Raises:
        CheckFailedError: `hardware-signature`, `tpm-quote`, `reference-value-unknown`, `tpm-log` or `hardware-binding`.
    """
    check_signature(key, signature, quote)
    bits = sum(1 << register for register in registers).to_bytes(3, "little")
    with refused(Code.TPM_QUOTE, "the quote"):
        require(quote.startswith(_HEAD), "an attestation that is no quote, or that no TPM made")
        _, rest = _sized(quote[len(_HEAD) :])  # qualified name of the signer: follows from the key
        quoted_data, rest = _sized(rest)
        require(len(rest) == _REST.size, "a quote that is cut short, or bytes behind it")
        resets, firmware, selection, digest = _REST.unpack(rest)
        is_selected = selection == b"\0\0\0\1\0\x0b\3" + bits
        require(is_selected, "a selection of other registers, or of another bank than sha256")
        is_of_values = len(values) == len(registers) and digest == b"\0\x20" + sha256(b"".join(values))
        require(is_of_values, "a digest that is not of the values beside it")
    found = dict(zip(registers, values, strict=True))
    for register in sorted(map(int, accepted)):
        value = found[register].hex() if register in found else "not quoted"
        check_listed(f"register {register} of the TPM", value, map(bytes.hex, accepted[str(register)]))
    claims: dict[str, Json] = {"firmware": f"{firmware:016x}", "resets": resets}
    if log:
        claims["log_events"] = _check_log(log, found)
    check_same("12", Code.HARDWARE_BINDING, "a quote that carries something else", extra_data.hex(), quoted_data.hex())
    return claims


def _check_log(log: bytes, values: Mapping[int, bytes]) -> int:
    """Return how many events there are, which come to the values of what firmware writes to."""
    with refused(Code.TPM_LOG, "the firmware's log"):
        found = BootLog.read(log)
    replayed = found.replay()
    for register in _LOGGED:
        expected, actual = replayed.get(register, bytes(32)), values.get(register, b"")
        what = f"a log of the firmware's that comes to another value of register {register}"
        check_same("12", Code.TPM_LOG, what, expected.hex(), actual.hex())
    return len(found.events)


def _sized(data: bytes) -> tuple[bytes, bytes]:
    """Return the content of the TPM2B that data begins with, and what is behind it; raises `FormatError`."""
    end = 2 + int.from_bytes(data[:2], "big")
    require(len(data) >= end, "a structure that is cut short")
    return data[2:end], data[end:]
