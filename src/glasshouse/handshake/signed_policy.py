"""A deployment's policy as its owner signed it for one gate: who edits that gate's database cannot change it."""

from __future__ import annotations

from dataclasses import dataclass

from glasshouse.attestation.policy import MAX_POLICY_BYTES, DeploymentPolicy
from glasshouse.wire import dsse
from glasshouse.wire.canonical import Json, decode, encode
from glasshouse.wire.fields import Fields, b64encode
from glasshouse.wire.signing import SigningKey

__all__ = ["MAX_SIGNED_POLICY_BYTES", "SIGNED_POLICY_TYPE", "SignedPolicy"]

SIGNED_POLICY_TYPE = "application/vnd.glasshouse.deployment+json"
MAX_SIGNED_POLICY_BYTES = 2 * MAX_POLICY_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class SignedPolicy:
    """A policy, of which package, at which gate.

    Law: ``SignedPolicy.parse(p.sign(owner).encode(), owner_public=owner.public) == p``.

    Attributes:
        broker_public: the gate's signing key.
        manifest_sha256: of the package.
        policy: what a release demands.
    """

    broker_public: bytes
    manifest_sha256: bytes
    policy: DeploymentPolicy

    def sign(self, owner: SigningKey) -> dsse.Envelope:
        """Return it signed by the owner."""
        payload: dict[str, Json] = {
            "broker_public": b64encode(self.broker_public),
            "manifest_sha256": self.manifest_sha256.hex(),
            "policy": self.policy.to_json(),
        }
        return dsse.sign(SIGNED_POLICY_TYPE, encode(payload), [owner])

    @classmethod
    def parse(cls, data: bytes, *, owner_public: bytes) -> SignedPolicy:
        """Parse and verify the canonical bytes of an envelope; see `from_envelope`."""
        return cls.from_envelope(
            dsse.Envelope.parse(data, max_bytes=MAX_SIGNED_POLICY_BYTES), owner_public=owner_public
        )

    @classmethod
    def from_envelope(cls, envelope: dsse.Envelope, *, owner_public: bytes) -> SignedPolicy:
        """Verify the owner's signature and return what they signed.

        Raises:
            FormatError: `wrong-type`, `signature-invalid`, `schema-invalid`, `too-large` or `not-canonical`.
        """
        payload = envelope.verify(SIGNED_POLICY_TYPE, owner_public)
        fields = Fields(decode(payload, max_bytes=MAX_SIGNED_POLICY_BYTES), "signed policy")
        signed = cls(
            broker_public=fields.octets("broker_public", length=32),
            manifest_sha256=fields.digest("manifest_sha256"),
            policy=DeploymentPolicy.from_json(fields.any("policy")),
        )
        fields.end()
        return signed
