"""The head of an owner's audit log, signed by the gate: who keeps one notices when the log is another later."""

from __future__ import annotations

from dataclasses import dataclass

from glasshouse.wire import dsse
from glasshouse.wire.canonical import Json, decode, encode
from glasshouse.wire.fields import Fields, b64encode
from glasshouse.wire.signing import SigningKey

__all__ = ["AUDIT_HEAD_TYPE", "AuditHead"]

AUDIT_HEAD_TYPE = "application/vnd.glasshouse.audit-head+json"
_MAX_BYTES = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditHead:
    """Where an owner's audit log ends.

    Law: ``AuditHead.from_envelope(h.sign(gate), gate_public=gate.public) == h``.

    Attributes:
        owner: whose log it is, their public signing key.
        records: how many it has.
        sha256: the hash of the last one, or 32 zero bytes.
        time_us: when the gate signed this.
    """

    owner: bytes
    records: int
    sha256: bytes
    time_us: int

    def sign(self, gate: SigningKey) -> dsse.Envelope:
        """Return it signed by the gate."""
        payload: dict[str, Json] = {
            "owner": b64encode(self.owner),
            "records": self.records,
            "sha256": self.sha256.hex(),
            "time_us": self.time_us,
        }
        return dsse.sign(AUDIT_HEAD_TYPE, encode(payload), [gate])

    @classmethod
    def from_envelope(cls, envelope: dsse.Envelope, *, gate_public: bytes) -> AuditHead:
        """Verify the gate's signature and return what it signed.

        Raises:
            FormatError: `wrong-type`, `signature-invalid`, `schema-invalid`, `too-large` or `not-canonical`.
        """
        fields = Fields(decode(envelope.verify(AUDIT_HEAD_TYPE, gate_public), max_bytes=_MAX_BYTES), "audit head")
        head = cls(
            owner=fields.octets("owner", length=32),
            records=fields.integer("records"),
            sha256=fields.digest("sha256"),
            time_us=fields.integer("time_us"),
        )
        fields.end()
        return head
