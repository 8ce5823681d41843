"""Endorsement keys: whose TPM it is, and a credential that only that TPM opens, for one attestation key.

Source: TCG TPM 2.0 Library, Part 1, 11.4.10 and 24; TCG EK Credential Profile.
"""

from __future__ import annotations

import hashlib
import hmac
import os

from cryptography import x509
from cryptography.hazmat.decrepit.ciphers.modes import CFB
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from glasshouse.attestation.roots.certificate_path import certificate_path
from glasshouse.attestation.roots.refusing import refused, require
from glasshouse.attestation.roots.tpm.tpm_policy import TpmPolicy
from glasshouse.attestation.roots.tpm.tpm_quote import check_ak
from glasshouse.errors import Code, FormatError

MAX_CERTIFICATES = 4
_EK_USE = x509.ObjectIdentifier("2.23.133.8.1")


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
        path, end_us = certificate_path(_certificates(ek), policy.roots(), now_us)
        _check_use(*path[:2])
    return end_us


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


def endorsed_sha256(ek: bytes) -> bytes:
    """Return the digest of the endorsement key itself; `check_endorsement` took this `ek`.

    Not of its certificates: who holds one has it in another form too, as an ECDSA signature has two.
    """
    key = _key_of(_certificates(ek)[0])
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()


def _kdfa(key: bytes, label: bytes, context: bytes, bits: int) -> bytes:
    block = b"\0\0\0\1" + label + b"\0" + context + bits.to_bytes(4, "big")
    return hmac.digest(key, block, "sha256")[: bits // 8]


def _sized(data: bytes) -> bytes:
    return len(data).to_bytes(2, "big") + data


def _certificates(data: bytes) -> list[x509.Certificate]:
    found: list[x509.Certificate] = []
    while data or not found:
        end = 4 + int.from_bytes(data[2:4], "big")
        is_one = data[:2] == b"\x30\x82" and end <= len(data) and len(found) < MAX_CERTIFICATES
        require(is_one, f"not 1 to {MAX_CERTIFICATES} certificates, DER")
        found.append(x509.load_der_x509_certificate(data[:end]))
        data = data[end:]
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
    signs = usage.digital_signature or usage.content_commitment or usage.crl_sign
    is_for_it = _EK_USE in uses and opens and not signs
    require(is_for_it, "a certificate for another use than of an endorsement key")
