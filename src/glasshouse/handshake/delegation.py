"""The delegation: the owner's signed statement that a broker key may act for them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from glasshouse.errors import Code, FormatError, VerificationError
from glasshouse.wire import dsse
from glasshouse.wire.canonical import Codec, Json
from glasshouse.wire.record import LEFT_OUT, choice, integer, items, octets

DELEGATION_TYPE = "application/vnd.glasshouse.delegation+json"
MAX_DELEGATION_BYTES = 4096


class Use(StrEnum):
    """What a broker key may be used for."""

    COUNTERSIGN = "countersign"
    RELEASE = "release"
    STORE = "store"


RUN_USES = frozenset({Use.COUNTERSIGN, Use.RELEASE})
"""What every run needs of a gate."""
_LIST = items(len(Use), choice(tuple(Use)))


def _read_uses(value: Json, where: str) -> frozenset[Use]:
    uses = list(_LIST.read(value, where))
    if uses != sorted(set(uses)):
        raise FormatError(Code.SCHEMA, f"{where} are not distinct and sorted")
    return frozenset(uses)


@dataclass(frozen=True, kw_only=True, slots=True)
class Delegation(dsse.Signed, name="delegation", max_bytes=MAX_DELEGATION_BYTES, payload_type=DELEGATION_TYPE):
    """A broker key, what for, and from when to when; signed by the owner."""

    broker_public: Annotated[bytes, octets(32)]  # the key that may act
    uses: Annotated[frozenset[Use], Codec(_read_uses, sorted)]  # what for; never empty
    not_before_us: int
    not_after_us: int  # exclusive
    # When it was signed: of an owner's delegations to one broker the greatest counts. 0 for one of before serials.
    serial_us: Annotated[int, integer(1), LEFT_OUT] = 0
    # The key of the gate's store, which may state that a checkpoint is kept; there with the use `store` alone.
    store_public: Annotated[bytes | None, octets(32), LEFT_OUT] = None

    def __post_init__(self) -> None:
        if len(self.broker_public) != 32 or not self.uses or not 0 <= self.not_before_us < self.not_after_us:
            raise FormatError(Code.SCHEMA, "a delegation of nothing, to no key or at no time")
        if (Use.STORE in self.uses) != (self.store_public is not None):
            raise FormatError(Code.SCHEMA, "a store without its key, or the reverse")

    def replaces(self, other: Delegation) -> bool:
        """Return whether this one takes the place of an owner's other to the same broker; a repeat need not."""
        return self.serial_us > other.serial_us or (self.serial_us == other.serial_us == 0)

    def check(self, use: Use, *, broker_public: bytes, at_us: int, leeway_us: int = 0) -> None:
        """Check that this broker key might do this at this time; raises `VerificationError`, `delegation-invalid`."""
        if broker_public != self.broker_public:
            raise VerificationError(Code.CHAIN_DELEGATION, "the owner delegated to another broker key")
        if use not in self.uses:
            raise VerificationError(Code.CHAIN_DELEGATION, f"the owner did not delegate the use {use}")
        if not self.not_before_us - leeway_us <= at_us < self.not_after_us + leeway_us:
            raise VerificationError(Code.CHAIN_DELEGATION, "the owner's delegation was not valid at that time")
