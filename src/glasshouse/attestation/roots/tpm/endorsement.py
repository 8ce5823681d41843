"""Endorsement keys: whose TPM it is, and a credential that only that TPM opens, for one attestation key.

Source: TCG TPM 2.0 Library, Part 1, 11.4.10 and 24; TCG EK Credential Profile.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence
from itertools import pairwise

from cryptography import x509
from cryptography.hazmat.decrepit.ciphers.modes import CFB
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.hashes import SHA256, SHA384, SHA512

from glasshouse.attestation.roots.tpm.tpm_policy import TpmPolicy
from glasshouse.attestation.roots.tpm.tpm_structures import check_ak, refused
from glasshouse.attestation.roots.x509_errors import X509_ERRORS
from glasshouse.errors import Code, FormatError

MAX_EK_BYTES = 4096
MAX_CERTIFICATES = 4
_EK_USE = x509.ObjectIdentifier("2.23.133.8.1")
_UNDERSTOOD = (x509.BasicConstraints, x509.KeyUsage, x509.ExtendedKeyUsage, x509.SubjectAlternativeName)


def check_endorsement(ek: bytes, *, policy: TpmPolicy, now_us: int) -> int:
    """An endorsement key's certificate leads to a root that the policy names.

    Args:
        ek: certificates, DER, one behind the other: the key's, then each one's issuer; the last one's is a root.

    Returns:
        When the first of them ends, µs, exclusive.

    Raises:
        CheckFailedError: `tpm-endorsement`.
    """
    with refused(Code.TPM_ENDORSEMENT, "the endorsement key"):
        try:
            chain = _certificates(ek)
            path = [*chain, _root_of(chain[-1], [x509.load_der_x509_certificate(one) for one in policy.ek_roots])]
            _check_use(chain[0], path[1])
            for below, (child, parent) in enumerate(pairwise(path)):
                _check_issued(child, parent, below)
            start = max(_us(one.not_valid_before_utc.timestamp()) for one in path)
            end = min(_us(one.not_valid_after_utc.timestamp()) for one in path)
        except X509_ERRORS as error:
            raise FormatError(Code.SCHEMA, f"a certificate that cannot be used: {error}") from None
        if not start <= now_us < end:
            raise FormatError(Code.SCHEMA, "a certificate that is not yet or no longer valid")
    return end


def credential_for(ak: bytes, ek: bytes, secret: bytes, *, policy: TpmPolicy, now_us: int) -> bytes | None:
    """Return the credential of a challenge for these keys, or None where the policy lists the attestation key.

    Args:
        ak, ek: as the challenge request names them.
        secret: 32 random bytes, which the gate stores with the challenge.

    Raises:
        CheckFailedError: `tpm-key` or `tpm-endorsement`.
    """
    name = check_ak(ak)
    if name.hex() in policy.aks:
        return None
    check_endorsement(ek, policy=policy, now_us=now_us)
    return make_credential(ek, name, secret)


def make_credential(ek: bytes, ak_name: bytes, secret: bytes) -> bytes:
    """Encrypt a secret for the TPM that has both keys; `check_endorsement` took this `ek`.

    Returns:
        TPM2B_ID_OBJECT || TPM2B_ENCRYPTED_SECRET.
    """
    with refused(Code.TPM_ENDORSEMENT, "the endorsement key"):
        key = _key_of(_certificates(ek)[0])
    if isinstance(key, rsa.RSAPublicKey):
        seed = os.urandom(32)
        oaep = padding.OAEP(padding.MGF1(SHA256()), SHA256(), b"IDENTITY\0")
        encrypted = key.encrypt(seed, oaep)
    else:
        own = ec.generate_private_key(ec.SECP256R1())
        points = [each.public_numbers() for each in (own.public_key(), key)]
        party_u, party_v = (point.x.to_bytes(32, "big") for point in points)
        shared = own.exchange(ec.ECDH(), key)
        seed = hashlib.sha256(b"\0\0\0\1" + shared + b"IDENTITY\0" + party_u + party_v).digest()
        encrypted = _sized(party_u) + _sized(points[0].y.to_bytes(32, "big"))
    encryptor = Cipher(AES(_kdfa(seed, b"STORAGE", ak_name, 128)), CFB(bytes(16))).encryptor()
    identity = encryptor.update(_sized(secret)) + encryptor.finalize()
    mac = hmac.digest(_kdfa(seed, b"INTEGRITY", b"", 256), identity + ak_name, "sha256")
    return _sized(_sized(mac) + identity) + _sized(encrypted)


def _kdfa(key: bytes, label: bytes, context: bytes, bits: int) -> bytes:
    block = b"\0\0\0\1" + label + b"\0" + context + bits.to_bytes(4, "big")
    return hmac.digest(key, block, "sha256")[: bits // 8]


def _sized(data: bytes) -> bytes:
    return len(data).to_bytes(2, "big") + data


def _us(seconds: float) -> int:
    return min(max(int(seconds) * 1_000_000, 0), 2**53 - 1)


def _certificates(data: bytes) -> list[x509.Certificate]:
    found: list[x509.Certificate] = []
    at = 0
    while at < len(data):
        if data[at : at + 2] != b"\x30\x82" or len(found) == MAX_CERTIFICATES or len(data) > MAX_EK_BYTES:
            raise FormatError(Code.SCHEMA, f"not 1 to {MAX_CERTIFICATES} certificates, DER, of {MAX_EK_BYTES} bytes")
        end = at + 4 + int.from_bytes(data[at + 2 : at + 4], "big")
        found.append(x509.load_der_x509_certificate(data[at:end]))
        at = end
    if not found or at != len(data):
        raise FormatError(Code.SCHEMA, "no certificate, or one that is cut short")
    return found


def _key_of(certificate: x509.Certificate) -> rsa.RSAPublicKey | ec.EllipticCurvePublicKey:
    key = certificate.public_key()
    if isinstance(key, rsa.RSAPublicKey) and key.key_size == 2048:
        return key
    if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1):
        return key
    raise FormatError(Code.SCHEMA, "a key of another kind or size than RSA-2048 or ECC P-256")


def _check_use(certificate: x509.Certificate, issuer: x509.Certificate) -> None:
    """It is of an endorsement key, by its own word or where its issuer certifies no other, and it does not sign."""
    key, found = _key_of(certificate), certificate.extensions
    try:
        uses = found.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        uses = issuer.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    usage = found.get_extension_for_class(x509.KeyUsage).value
    opens = usage.key_encipherment if isinstance(key, rsa.RSAPublicKey) else usage.key_agreement
    if _EK_USE not in uses or not opens or usage.digital_signature or _is_authority(certificate, 0):
        raise FormatError(Code.SCHEMA, "a certificate for another use than of an endorsement key")


def _is_authority(certificate: x509.Certificate, below: int) -> bool:
    """Whether it may issue, with so many authorities beneath it."""
    found = certificate.extensions
    try:
        basic = found.get_extension_for_class(x509.BasicConstraints).value
    except x509.ExtensionNotFound:
        return False
    if not basic.ca:
        return False
    usage = found.get_extension_for_class(x509.KeyUsage).value
    return usage.key_cert_sign and (basic.path_length is None or basic.path_length >= below)


def _root_of(last: x509.Certificate, roots: Sequence[x509.Certificate]) -> x509.Certificate:
    for root in roots:
        try:
            last.verify_directly_issued_by(root)
        except X509_ERRORS:
            continue
        return root
    raise FormatError(Code.SCHEMA, "a certificate that does not lead to a root that the policy names")


def _check_issued(child: x509.Certificate, parent: x509.Certificate, below: int) -> None:
    if not isinstance(child.signature_hash_algorithm, SHA256 | SHA384 | SHA512):
        raise FormatError(Code.SCHEMA, "a certificate signed over a digest that is not accepted")
    if any(one.critical and not isinstance(one.value, _UNDERSTOOD) for one in child.extensions):
        raise FormatError(Code.SCHEMA, "a certificate with a critical extension that is not understood")
    if not _is_authority(parent, below):
        raise FormatError(Code.SCHEMA, "a certificate of an issuer that may not issue it")
    child.verify_directly_issued_by(parent)
