"""A machine of Google's Confidential Space, and a service that signs its tokens with a root that only tests trust."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from glasshouse.attestation.roots.kinds import GCP_AUDIENCE
from glasshouse.wire.canonical import b64encode
from glasshouse.wire.crypto import sha256
from simulators.unix_service import unix_service

IMAGE_DIGEST = sha256(b"a container's manifest")
_DAY = timedelta(days=1)


@dataclass(kw_only=True)
class ConfidentialSpace:
    """A machine whose tokens are good.

    Args:
        now: when it and its certificates are.
        said: members that its tokens have in the place of a good one's, by their path with dots; None takes one out.
    """

    now: datetime
    said: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root, self.issuer, self.signer = (generate_private_key(65537, 2048) for _ in range(3))
        self.chain = [
            self.certificate("Leaf", self.signer, "Intermediate", self.issuer),
            self.certificate("Intermediate", self.issuer, "Root", self.root, is_authority=True),
            self.certificate("Root", self.root, "Root", self.root, is_authority=True),
        ]

    @property
    def root_sha256(self) -> bytes:
        """The pin of its root."""
        return sha256(self.chain[-1].public_bytes(Encoding.DER))

    def terms(self, **changed: Any) -> dict[str, Any]:
        """Return the object of a policy that takes it."""
        good = {
            "accept_issuers_word": True,
            "chain": "workload",
            "hwmodels": ["GCP_AMD_SEV", "GCP_INTEL_TDX"],
            "image_digests": [IMAGE_DIGEST.hex()],
            "least_swversion": 250800,
        }
        return {name: value for name, value in {**good, **changed}.items() if value is not None}

    def claims(self, nonce: str, audience: str = GCP_AUDIENCE) -> dict[str, Any]:
        """Return what a token says."""
        now_s = int(self.now.timestamp())
        found: dict[str, Any] = {
            "aud": audience,
            "exp": now_s + 3600,
            "iat": now_s,
            "iss": "https://confidentialcomputing.googleapis.com",
            "nbf": now_s,
            "sub": "https://www.googleapis.com/compute/v1/projects/ours/zones/us-west1-b/instances/one",
            "eat_nonce": nonce,
            "secboot": True,
            "oemid": 11129,
            "hwmodel": "GCP_INTEL_TDX",
            "swname": "CONFIDENTIAL_SPACE",
            "swversion": ["250800"],
            "attester_tcb": ["INTEL"],
            "dbgstat": "disabled-since-boot",
            "submods": {
                "confidential_space": {"support_attributes": ["LATEST", "STABLE", "USABLE"]},
                "container": {
                    "image_digest": f"sha256:{IMAGE_DIGEST.hex()}",
                    "restart_policy": "Never",
                    "env": {"HOSTNAME": "one"},
                    "args": ["/usr/sbin/sshd", "-D"],
                },
                "gce": {"zone": "us-west1-b", "project_id": "ours", "instance_name": "one"},
            },
            "tdx": {"gcp_attester_tcb_status": "UpToDate"},
        }
        for path, value in self.said.items():
            *above, name = path.split(".")
            inner = found
            for step in above:
                inner = inner[step]
            inner[name] = value
            if value is None:
                del inner[name]
        return found

    def token(
        self,
        nonce: str,
        *,
        audience: str = GCP_AUDIENCE,
        header: Mapping[str, Any] | None = None,
        payload: bytes | None = None,
        signer: RSAPrivateKey | None = None,
    ) -> bytes:
        """Return a token.

        Args:
            header: members in the place of the header's.
            payload: in the place of its claims.
            signer: in the place of the key that its first certificate has.
        """
        chain = [base64.b64encode(one.public_bytes(Encoding.DER)).decode() for one in self.chain]
        named = {"alg": "RS256", "kid": "one", "typ": "JWT", "x5c": chain, **(header or {})}
        said = json.dumps(self.claims(nonce, audience)).encode() if payload is None else payload
        signed = f"{b64encode(json.dumps(named).encode())}.{b64encode(said)}".encode()
        return signed + b"." + b64encode((signer or self.signer).sign(signed, PKCS1v15(), SHA256())).encode()

    def certificate(
        self,
        name: str,
        key: RSAPrivateKey,
        issuer: str,
        by: RSAPrivateKey,
        *,
        is_authority: bool = False,
        until: timedelta = 60 * _DAY,
        critical: x509.ExtensionType | None = None,
    ) -> x509.Certificate:
        """Return a certificate of these parties."""
        builder = x509.CertificateBuilder(
            _name(issuer), _name(name), key.public_key(), len(name) + 7, self.now - _DAY, self.now + until
        )
        builder = builder.add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        above = x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key())
        builder = builder.add_extension(above, critical=False)
        if is_authority:
            uses = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
            builder = builder.add_extension(uses, critical=True)
        if critical is not None:
            builder = builder.add_extension(critical, critical=True)
        return builder.sign(by, SHA256())

    def launcher(self, path: Path, *, instead: bytes | None = None) -> AbstractContextManager[None]:
        """Serve tokens on this socket, as the launcher does, of the time when they are asked for."""

        def token(asked: bytes, body: bytes) -> bytes | None:
            wanted = json.loads(body)
            if asked != b"/v1/token" or wanted.keys() != {"audience", "nonces", "token_type"}:
                return None
            [nonce] = wanted["nonces"]
            return self.token(nonce, audience=wanted["audience"]) if wanted["token_type"] == "PKI" else b"e.e.e"

        return unix_service(path, token, instead=instead)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"Tests of Glasshouse: {text}")])
