"""The delegation: the owner's signed word that a broker key may act for them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from glasshouse.errors import Code, FormatError, VerificationError
from glasshouse.wire import dsse
from glasshouse.wire.canonical import Json, decode, encode
from glasshouse.wire.fields import Fields, b64encode
from glasshouse.wire.signing import SigningKey

__all__ = ["DELEGATION_TYPE", "MAX_DELEGATION_BYTES", "Delegation", "Use"]

DELEGATION_TYPE = "application/vnd.glasshouse.delegation+json"
MAX_DELEGATION_BYTES = 4096


class Use(StrEnum):
    """What a broker key may be used for."""

    COUNTERSIGN = "countersign"
    RELEASE = "release"


@dataclass(frozen=True, kw_only=True, slots=True)
class Delegation:
    """A broker key, what for, and from when to when.

    Law: ``Delegation.parse(d.sign(owner).encode(), owner_public=owner.public) == d``.

    Attributes:
        broker_public: the key that may act.
        uses: what for; never empty.
        not_before_us, not_after_us: when; the end is exclusive.
        serial_us: when it was signed: of an owner's delegations to one broker the greatest counts. 0 for one of
            before there were serials.
    """

    broker_public: bytes
    uses: frozenset[Use]
    not_before_us: int
    not_after_us: int
    serial_us: int = 0

    def __post_init__(self) -> None:
        if len(self.broker_public) != 32 or not self.uses or not 0 <= self.not_before_us < self.not_after_us:
            raise FormatError(Code.SCHEMA, "a delegation of nothing, to nobody or at no time")

    def sign(self, owner: SigningKey) -> dsse.Envelope:
        """Return the delegation signed by the owner."""
        payload: dict[str, Json] = {
            "broker_public": b64encode(self.broker_public),
            "not_after_us": self.not_after_us,
            "not_before_us": self.not_before_us,
            "uses": sorted(use.value for use in self.uses),
        }
        if self.serial_us:
            payload["serial_us"] = self.serial_us
        return dsse.sign(DELEGATION_TYPE, encode(payload), [owner])

    @classmethod
    def parse(cls, data: bytes, *, owner_public: bytes) -> Delegation:
        """Parse and verify a delegation's canonical bytes; see `from_envelope`."""
        return cls.from_envelope(dsse.Envelope.parse(data, max_bytes=MAX_DELEGATION_BYTES), owner_public=owner_public)

    @classmethod
    def from_envelope(cls, envelope: dsse.Envelope, *, owner_public: bytes) -> Delegation:
        """Verify the owner's signature and return what they signed.

        Raises:
            FormatError: `wrong-type`, `signature-invalid`, `schema-invalid`, `too-large` or `not-canonical`.
        """
        payload = envelope.verify(DELEGATION_TYPE, owner_public)
        fields = Fields(decode(payload, max_bytes=MAX_DELEGATION_BYTES), "delegation")
        uses = fields.texts("uses", max_items=len(Use))
        if uses != sorted(set(uses)) or not set(uses) <= set(Use):
            raise FormatError(Code.SCHEMA, "delegation.uses are not distinct, sorted and known")
        delegation = cls(
            broker_public=fields.octets("broker_public", length=32),
            uses=frozenset(Use(use) for use in uses),
            not_before_us=fields.integer("not_before_us"),
            not_after_us=fields.integer("not_after_us"),
            serial_us=fields.integer("serial_us", low=1) if fields.has("serial_us") else 0,
        )
        fields.end()
        return delegation

    def replaces(self, other: Delegation) -> bool:
        """Return whether this one takes the place of an owner's other to the same broker; a repeat need not."""
        return self.serial_us > other.serial_us or (self.serial_us == other.serial_us == 0)

    def check(self, use: Use, *, broker_public: bytes, at_us: int, leeway_us: int = 0) -> None:
        """Check that this broker key might do this at this time.

        Raises:
            VerificationError: `delegation-invalid`.
        """
        if broker_public != self.broker_public:
            raise VerificationError(Code.CHAIN_DELEGATION, "the owner delegated to another broker key")
        if use not in self.uses:
            raise VerificationError(Code.CHAIN_DELEGATION, f"the owner did not delegate the use {use}")
        if not self.not_before_us - leeway_us <= at_us < self.not_after_us + leeway_us:
            raise VerificationError(Code.CHAIN_DELEGATION, "the owner's delegation was not valid at that time")
