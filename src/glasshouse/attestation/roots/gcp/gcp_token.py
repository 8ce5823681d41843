"""A token of Google's attestation service: a JWT whose header has the certificates of the key that signed it.

Laws: it is read offline, by one pinned root; nothing that it says is looked at before its signature.
Source: spec/hardware-evidence.md, section 7.6; RFC 7515, 4.1.6 and 7.1.
"""

from __future__ import annotations

import base64
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.hashes import SHA256

from glasshouse.attestation.roots.certificate_path import certificate_path
from glasshouse.attestation.roots.foreign_json import read_foreign
from glasshouse.attestation.roots.gcp.gcp_blob import MAX_TOKEN_BYTES, is_token
from glasshouse.attestation.roots.refusing import refused, require
from glasshouse.errors import Code
from glasshouse.wire.canonical import b64decode
from glasshouse.wire.crypto import sha256


def read_token(token: bytes, *, root_sha256: bytes, now_us: int) -> tuple[dict[str, Any], int]:
    """Return what a token says, and when the first of its certificates ends, µs, exclusive.

    Args:
        root_sha256: of the certificate, DER, that it has to lead to.

    Raises:
        CheckFailedError: of the checks 1 to 4 of 7.6.
    """
    with refused(Code.HARDWARE_MALFORMED, "the token"):
        require(is_token(token), f"not three parts of base64url, of at most {MAX_TOKEN_BYTES} bytes")
        header, payload, signature = map(b64decode, token.decode().split("."))
        chain = _chain(header)
    with refused(Code.HARDWARE_CERTIFICATE, "the token's certificates"):
        key, end_us = _signer(chain, root_sha256, now_us)
    with refused(Code.HARDWARE_SIGNATURE, "the token"):
        key.verify(signature, token.rpartition(b".")[0], PKCS1v15(), SHA256())
    with refused(Code.HARDWARE_MALFORMED, "what the token says"):
        return read_foreign(payload), end_us


def _chain(header: bytes) -> list[bytes]:
    named = read_foreign(header)
    chain: Any = named.get("x5c")
    # What is critical is not understood here, and another algorithm would be the sender's choice.
    is_pki = named.get("alg") == "RS256" and "crit" not in named and isinstance(chain, list) and len(chain) == 3
    if not is_pki or not all(isinstance(one, str) for one in chain):
        raise ValueError("no header of a token of the type PKI: RS256, and three certificates")
    return [base64.b64decode(one, validate=True) for one in chain]


def _signer(chain: list[bytes], root_sha256: bytes, now_us: int) -> tuple[RSAPublicKey, int]:
    """Return the first certificate's key, and the first end."""
    require(sha256(chain[2]) == root_sha256, "another root than Google's")
    leaf, issuer, root = (x509.load_der_x509_certificate(one) for one in chain)
    _, end_us = certificate_path([leaf, issuer], [root], now_us, names_use=False)
    uses = [one.value for one in leaf.extensions if isinstance(one.value, x509.KeyUsage)]
    require(all(use.digital_signature and not use.key_cert_sign for use in uses), "a key for another use")
    key = leaf.public_key()
    if not isinstance(key, RSAPublicKey) or key.key_size < 2048:
        raise ValueError("a key of another kind or size than RSA of at least 2048 bits")
    return key, end_us
