"""NVIDIA's certificates: that a chain leads to a pinned root, and what OCSP says of it.

Signatures are pure functions of bytes, so each is checked once and kept; dates are judged each time.
Source: RFC 5280, RFC 6960; spec/hardware-evidence.md, section 7.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from itertools import pairwise

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA384, Hash
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509 import ocsp
from cryptography.x509.oid import ExtendedKeyUsageOID

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.collateral import Pack, check_current
from glasshouse.errors import Code, FormatError
from glasshouse.wire.crypto import sha256

_ECDSA_SHA384 = bytes.fromhex("300a06082a8648ce3d040303")
_FOREVER_US = 2**53 - 1
_UNDERSTOOD = (x509.BasicConstraints, x509.ExtendedKeyUsage, x509.KeyUsage)
# What the library raises of certificates and answers that are none, each its own.
_UNUSABLE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    InvalidSignature,
    x509.DuplicateExtension,
    x509.ExtensionNotFound,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Validity:
    """When something counts, µs since 1970."""

    not_before_us: int
    not_after_us: int  # exclusive

    def within(self, other: Validity) -> Validity:
        """Return when both count."""
        return Validity(
            not_before_us=max(self.not_before_us, other.not_before_us),
            not_after_us=min(self.not_after_us, other.not_after_us),
        )

    def has(self, now_us: int) -> bool:
        """Return whether it counts now."""
        return self.not_before_us <= now_us < self.not_after_us


@lru_cache(maxsize=512)
def certificate_of(der: bytes) -> x509.Certificate:
    """Parse a certificate of the form that all of NVIDIA's have; raises `FormatError`."""
    try:
        found = x509.load_der_x509_certificate(der)
        # What is read later is parsed here, for the library parses late.
        _ = found.not_valid_before_utc, found.not_valid_after_utc
        understood = all(type(each.value) in _UNDERSTOOD for each in found.extensions if each.critical)
        if not understood or found.version is not x509.Version.v3:
            raise FormatError(Code.SCHEMA, "a certificate with what is critical and unknown")
        # No signature covers the end, of which the library takes a second form: bits that are said not to be used.
        signature = found.signature
        if not der.endswith(
            found.tbs_certificate_bytes + _ECDSA_SHA384 + bytes([3, len(signature) + 1, 0]) + signature
        ):
            raise FormatError(Code.SCHEMA, "a certificate whose end has another form")
    except _UNUSABLE as error:
        raise FormatError(Code.SCHEMA, f"no certificate: {error}") from None
    return found


def key_of(certificate: x509.Certificate) -> ec.EllipticCurvePublicKey:
    """Return its key; raises `FormatError` where that is not of P-384."""
    try:
        key = certificate.public_key()
    except _UNUSABLE as error:
        raise FormatError(Code.SCHEMA, f"a key that cannot be used: {error}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise FormatError(Code.SCHEMA, "a key that is not of P-384")
    return key


def check_chain(chain: Sequence[bytes], root: bytes) -> Validity:
    """A chain leads to this root, and its first key signs what is no certificate.

    Args:
        chain: DER, from the end to what the root signed.

    Returns:
        When every certificate counts, the root too.

    Raises:
        FormatError: whatever does not hold.
    """
    for below, (child, parent) in enumerate(pairwise([*chain, root])):
        _check_issued(child, parent, below)
    leaf = certificate_of(chain[0])
    try:
        usage = leaf.extensions.get_extension_for_class(x509.KeyUsage).value
    except x509.ExtensionNotFound:
        raise FormatError(Code.SCHEMA, "a certificate that does not say what for") from None
    purposes = [each for each in leaf.extensions if isinstance(each.value, x509.ExtendedKeyUsage)]
    if not usage.digital_signature or usage.key_cert_sign or purposes or _path_length(leaf) is not None:
        raise FormatError(Code.SCHEMA, "a certificate for another use than to sign")
    validity = validity_of(chain[0])
    for each in (*chain[1:], root):
        validity = validity.within(validity_of(each))
    return validity


@lru_cache(maxsize=512)
def validity_of(der: bytes) -> Validity:
    """Return when a certificate counts; raises `FormatError`."""
    certificate = certificate_of(der)
    return Validity(
        not_before_us=_us(certificate.not_valid_before_utc), not_after_us=_us(certificate.not_valid_after_utc)
    )


@lru_cache(maxsize=1024)
def _check_issued(der: bytes, issuer_der: bytes, below: int) -> None:
    certificate, issuer = certificate_of(der), certificate_of(issuer_der)
    key_of(issuer)
    length = _path_length(issuer)
    try:
        may_sign = issuer.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
        if (
            length is None
            or length < below
            or not may_sign
            or not isinstance(certificate.signature_hash_algorithm, SHA384)
        ):
            raise FormatError(Code.SCHEMA, "a certificate whose issuer may not issue it so")
        certificate.verify_directly_issued_by(issuer)
    except _UNUSABLE:
        raise FormatError(Code.SCHEMA, "a certificate that the next one did not issue") from None


def _path_length(certificate: x509.Certificate) -> float | None:
    """Return how many authorities may be below one; None of what is no authority."""
    for each in certificate.extensions:
        if isinstance(each.value, x509.BasicConstraints) and each.value.ca:
            return float("inf") if each.value.path_length is None else each.value.path_length
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """What a responder signed."""

    status: ocsp.OCSPCertStatus
    issued_us: int
    expires_us: int
    responder: Validity


def check_not_revoked(
    chain: Sequence[bytes], root: bytes, places: Sequence[int], *, pack: Pack, now_us: int, max_age_s: int
) -> int:
    """OCSP calls certificates of a chain good: a hold is a revocation, and a nonce is not used.

    Args:
        places: of those that are asked about.

    Returns:
        When the first answer ends, µs, exclusive.

    Raises:
        CheckFailedError: `collateral-missing`, `collateral-invalid`, `collateral-expired` or `hardware-revoked`.
    """
    end_us = _FOREVER_US
    whole = [*chain, root]
    for place in places:
        name = ocsp_name(whole[place])
        try:
            answer = _answer(pack.named(name), whole[place], whole[place + 1])
        except FormatError as error:
            raise CheckFailedError("12", Code.COLLATERAL_INVALID, f"{name}: {error.message}") from None
        check_current(
            name, issued_us=answer.issued_us, expires_us=answer.expires_us, now_us=now_us, max_age_s=max_age_s
        )
        if not answer.responder.has(now_us):
            raise CheckFailedError(
                "12", Code.COLLATERAL_EXPIRED, f"{name}: its responder's certificate is not of this time"
            )
        if answer.status is not ocsp.OCSPCertStatus.GOOD:
            raise CheckFailedError(
                "12",
                Code.HARDWARE_REVOKED,
                f"{name}: NVIDIA does not call this certificate good",
                expected="good",
                actual=answer.status.name.lower(),
            )
        end_us = min(end_us, answer.expires_us, answer.issued_us + max_age_s * 1_000_000, answer.responder.not_after_us)
    return end_us


def ocsp_name(der: bytes) -> str:
    """Return the name of the item of a pack that has OCSP's answer about this certificate."""
    return f"nvidia/ocsp/{sha256(der)[:16].hex()}"


@lru_cache(maxsize=512)
def _answer(data: bytes, der: bytes, issuer_der: bytes) -> _Answer:
    try:
        response = ocsp.load_der_ocsp_response(data)
        if response.response_status is not ocsp.OCSPResponseStatus.SUCCESSFUL or len(response.certificates) != 1:
            raise FormatError(Code.SCHEMA, "no answer with the certificate of its responder")
        responder = response.certificates[0].public_bytes(Encoding.DER)
        _check_responder(response, responder, issuer_der)
        _check_about(response, certificate_of(der), certificate_of(issuer_der))
        if response.next_update_utc is None:
            raise FormatError(Code.SCHEMA, "an answer without an end")
        return _Answer(
            status=response.certificate_status,
            issued_us=_us(response.this_update_utc),
            expires_us=_us(response.next_update_utc),
            responder=validity_of(responder),
        )
    except _UNUSABLE as error:
        raise FormatError(Code.SCHEMA, f"no answer of OCSP: {error}") from None


def _check_responder(response: ocsp.OCSPResponse, responder_der: bytes, issuer_der: bytes) -> None:
    """The certificate's own issuer let the responder answer, and that signed this (RFC 6960, 4.2.2.2)."""
    responder = certificate_of(responder_der)
    _check_issued(responder_der, issuer_der, 0)
    purposes = responder.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    if ExtendedKeyUsageOID.OCSP_SIGNING not in purposes or _path_length(responder) is not None:
        raise FormatError(Code.SCHEMA, "a responder that may not answer")
    if not isinstance(response.signature_hash_algorithm, SHA384) or any(each.critical for each in response.extensions):
        raise FormatError(Code.SCHEMA, "an answer of another form")
    key_of(responder).verify(response.signature, response.tbs_response_bytes, ec.ECDSA(SHA384()))


def _check_about(response: ocsp.OCSPResponse, certificate: x509.Certificate, issuer: x509.Certificate) -> None:
    """It is the one answer, about this certificate, named by the digests that NVIDIA asks with."""
    name, key = Hash(SHA384()), Hash(SHA384())
    name.update(issuer.subject.public_bytes())
    key.update(key_of(issuer).public_bytes(Encoding.X962, PublicFormat.UncompressedPoint))
    asked = (name.finalize(), key.finalize(), certificate.serial_number)
    if not isinstance(response.hash_algorithm, SHA384) or asked != (
        response.issuer_name_hash,
        response.issuer_key_hash,
        response.serial_number,
    ):
        raise FormatError(Code.SCHEMA, "an answer about another certificate")


def _us(moment: datetime) -> int:
    return min(max(int(moment.timestamp()), 0) * 1_000_000, _FOREVER_US)
