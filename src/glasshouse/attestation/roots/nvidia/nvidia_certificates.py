"""NVIDIA's certificates: that a chain leads to a pinned root, and what OCSP says of it.

Signatures are functions of bytes, so each is checked once and kept; dates are judged each time.
Source: RFC 5280, RFC 6960; spec/hardware-evidence.md, section 7.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from hashlib import sha384
from itertools import pairwise

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509 import ocsp
from cryptography.x509.oid import ExtendedKeyUsageOID, SignatureAlgorithmOID

from glasshouse.attestation.refusal import utc
from glasshouse.attestation.roots.collateral import Pack, check_current
from glasshouse.attestation.roots.refusing import refusal, refused, require
from glasshouse.attestation.roots.x509_errors import X509_ERRORS
from glasshouse.errors import Code, FormatError
from glasshouse.wire.crypto import sha256

DEVICE_ROOT_SHA256 = bytes.fromhex("102bf659d5419614c9d8e6aecebc80454eb26b1df6a769ac720b9a690b167b48")
"""NVIDIA Device Identity CA, as github.com/NVIDIA/nvtrust has it at 02817309."""
MANIFEST_ROOT_SHA256 = bytes.fromhex("12977b5115acb0381179279fffeb5a8c4d264971ebb32298023a465fa41df5d1")
"""NVIDIA CoRIM signing Root CA, likewise."""

_ECDSA_SHA384 = bytes.fromhex("300a06082a8648ce3d040303")
_UNDERSTOOD = (x509.BasicConstraints, x509.ExtendedKeyUsage, x509.KeyUsage)
_NO_AUTHORITY = x509.BasicConstraints(ca=False, path_length=None)
_LAST_US = 2**53 - 1
_MAX_CERTIFICATE_BYTES = 8192  # in a pack one could be as large as the pack, and is kept though no signature holds


@dataclass(frozen=True, kw_only=True, slots=True)
class NvidiaCertificate:
    """A certificate of the form that all of NVIDIA's have; its issuer's signature is another question."""

    parsed: x509.Certificate
    key: ec.EllipticCurvePublicKey  # on P-384
    basic: x509.BasicConstraints
    usage: x509.KeyUsage
    purposes: Sequence[x509.ObjectIdentifier]

    @property
    def signs(self) -> bool:
        """Whether its key signs what is no certificate, and no certificate."""
        return self.usage.digital_signature and not self.usage.key_cert_sign and not self.basic.ca


@lru_cache(maxsize=512)
def read_certificate(der: bytes) -> NvidiaCertificate:
    """Parse a certificate; raises `FormatError`."""
    require(len(der) <= _MAX_CERTIFICATE_BYTES, "a certificate that is too large")
    try:
        parsed = x509.load_der_x509_certificate(der)
        key, extensions = parsed.public_key(), list(parsed.extensions)
        # No signature covers the end, of which the library takes a second form: bits that are said not to be used.
        end = _ECDSA_SHA384 + bytes([3, len(parsed.signature) + 1, 0]) + parsed.signature
        has_end = der.endswith(parsed.tbs_certificate_bytes + end)
    except X509_ERRORS as error:
        raise FormatError(Code.SCHEMA, f"no certificate: {error}") from None
    require(has_end, "a certificate that was not signed with SHA-384, or has another end")
    found = {type(each.value): each.value for each in extensions}
    usage, basic = found.get(x509.KeyUsage), found.get(x509.BasicConstraints, _NO_AUTHORITY)
    unknown = [each for each in extensions if each.critical and type(each.value) not in _UNDERSTOOD]
    require(not unknown, "a certificate with what is critical and unknown")
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp384r1" or usage is None:
        raise FormatError(Code.SCHEMA, "a certificate of a key on another curve, or that does not say what for")
    purposes = tuple(found.get(x509.ExtendedKeyUsage, ()))
    return NvidiaCertificate(parsed=parsed, key=key, basic=basic, usage=usage, purposes=purposes)


@lru_cache(maxsize=1024)
def _check_issued(der: bytes, issuer_der: bytes, below: int) -> None:
    certificate, issuer = read_certificate(der), read_certificate(issuer_der)
    length = issuer.basic.path_length
    may_issue = issuer.basic.ca and issuer.usage.key_cert_sign and (length is None or length >= below)
    require(may_issue, "a certificate by what may not issue it")
    try:
        certificate.parsed.verify_directly_issued_by(issuer.parsed)
    except X509_ERRORS:
        raise FormatError(Code.SCHEMA, "a certificate that the next one did not issue") from None


def check_chain(chain: Sequence[bytes], root_sha256: bytes) -> NvidiaCertificate:
    """A chain leads to this root, and its first key signs what is no certificate.

    Args:
        chain: DER, from the end to the root.

    Returns:
        The first, of that key.

    Raises:
        FormatError: whatever does not hold; dates are another question.
    """
    require(sha256(chain[-1]) == root_sha256, "a chain to another root")
    for below, (child, parent) in enumerate(pairwise(chain)):
        _check_issued(child, parent, below)
    leaf = read_certificate(chain[0])
    require(leaf.signs and not leaf.purposes, "a certificate for another use than to sign")
    return leaf


def check_dates(chain: Sequence[bytes], now_us: int, code: Code, what: str) -> int:
    """All certificates are valid now; return when the first ends, exclusive; raises `CheckFailedError`."""
    parsed = [read_certificate(der).parsed for der in chain]
    begin_us = max(_us(each.not_valid_before_utc) for each in parsed)
    end_us = min(_us(each.not_valid_after_utc) for each in parsed)
    if not begin_us <= now_us < end_us:
        message = f"{what}: a certificate that is not of this time by the verifier's clock"
        raise refusal(code, message, f"from {utc(begin_us)} to {utc(end_us)}", utc(now_us))
    return end_us


def check_good(der: bytes, issuer_der: bytes, *, pack: Pack, now_us: int, max_age_s: int) -> int:
    """OCSP calls a certificate good: a hold is a revocation, and a nonce is not used.

    Returns:
        When the answer ends, µs, exclusive.

    Raises:
        CheckFailedError: `collateral-missing`, `collateral-invalid`, `collateral-expired` or `hardware-revoked`.
    """
    name = ocsp_name(der)
    data = pack.named(name)
    with refused(Code.COLLATERAL_INVALID, name):
        status, begin_us, end_us, responder = _answer(data, der, issuer_der)
    check_current(name, issued_us=begin_us, expires_us=end_us, now_us=now_us, max_age_s=max_age_s)
    until_us = check_dates([responder], now_us, Code.COLLATERAL_EXPIRED, name)
    if status is not ocsp.OCSPCertStatus.GOOD:
        message = f"{name}: NVIDIA does not call this certificate good"
        raise refusal(Code.HARDWARE_REVOKED, message, "good", status.name.lower())
    return min(until_us, end_us, begin_us + max_age_s * 1_000_000)


def ocsp_name(der: bytes) -> str:
    """Return the name of the item of a pack that has OCSP's answer about this certificate."""
    return f"nvidia/ocsp/{sha256(der)[:16].hex()}"


@lru_cache(maxsize=512)
def _answer(data: bytes, der: bytes, issuer_der: bytes) -> tuple[ocsp.OCSPCertStatus, int, int, bytes]:
    """Return what the answer says, from when to when, and its responder's certificate.

    Raises:
        FormatError: what does not hold, and whatever `cryptography` raises.
    """
    response, issuer = ocsp.load_der_ocsp_response(data), read_certificate(issuer_der)
    is_successful = response.response_status is ocsp.OCSPResponseStatus.SUCCESSFUL
    require(is_successful and len(response.certificates) == 1, "no answer, or one by other than one responder")
    # The certificate's own issuer let the responder answer, and that signed this (RFC 6960, 4.2.2.2).
    responder_der = response.certificates[0].public_bytes(Encoding.DER)
    responder = read_certificate(responder_der)
    _check_issued(responder_der, issuer_der, 0)
    may_answer = responder.signs and ExtendedKeyUsageOID.OCSP_SIGNING in responder.purposes
    require(may_answer, "an answer by who may not answer")
    responder.key.verify(response.signature, response.tbs_response_bytes, ec.ECDSA(SHA384()))
    point = issuer.key.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
    digests = (sha384(each).digest() for each in (issuer.parsed.subject.public_bytes(), point))
    asked = *digests, read_certificate(der).parsed.serial_number
    named = response.issuer_name_hash, response.issuer_key_hash, response.serial_number
    require(named == asked, "an answer about another certificate")
    # The algorithm's name is signed by nothing, and what is critical narrows what is said.
    is_formed = response.signature_algorithm_oid == SignatureAlgorithmOID.ECDSA_WITH_SHA384
    critical = [each for each in (*response.extensions, *response.single_extensions) if each.critical]
    require(is_formed and not critical, "an answer of another form")
    begin, end = response.this_update_utc, response.next_update_utc
    if end is None:
        raise FormatError(Code.SCHEMA, "an answer without an end")
    return response.certificate_status, _us(begin), _us(end), responder_der


def _us(moment: datetime) -> int:
    return min(max(int(moment.timestamp()), 0) * 1_000_000, _LAST_US)
