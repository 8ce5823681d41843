"""A pack of what verifiers need beside the evidence: revocation lists, TCB info, reference manifests, OCSP responses.

Laws: a pack is not trusted; each item is judged by its maker's signature and the dates inside it, by the verifier that
uses it. Source: spec/hardware-evidence.md, section 5.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from glasshouse.attestation.refusal import CheckFailedError, utc
from glasshouse.errors import Code, FormatError
from glasshouse.wire.crypto import sha256
from glasshouse.wire.record import Record, items, octets, text

COLLATERAL_KIND = "https://glasshouse.dev/collateral/v1"
MAX_PACK_BYTES = 2 * 1024 * 1024
MAX_ITEMS = 128
_NAME = re.compile(r"(amd|intel|nvidia)(/[A-Za-z0-9][A-Za-z0-9._-]{0,95}){1,4}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Item(Record, name="collateral.items"):
    """One item, as its maker signed it."""

    name: Annotated[str, text(256, _NAME)]
    data: Annotated[bytes, octets(max_length=MAX_PACK_BYTES)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack(Record, name="collateral", max_bytes=MAX_PACK_BYTES, constants={"kind": COLLATERAL_KIND}):
    """A pack; `parse` checks no signature."""

    items: Annotated[tuple[Item, ...], items(MAX_ITEMS)]  # sorted by name, each once

    def __post_init__(self) -> None:
        names = [item.name for item in self.items]
        if names != sorted(set(names)):
            raise FormatError(Code.SCHEMA, "collateral whose items are unsorted or there twice")

    @property
    def sha256(self) -> bytes:
        """SHA-256 of the canonical form: the digest that an EAR names."""
        return sha256(self.encode())

    def named(self, name: str) -> bytes:
        """Return an item; raises `CheckFailedError`, `collateral-missing`."""
        for item in self.items:
            if item.name == name:
                return item.data
        raise CheckFailedError(
            "12",
            Code.COLLATERAL_MISSING,
            f"the collateral pack lacks {name}: fetch it with `glasshouse collateral fetch`",
            expected=name,
            actual=f"{len(self.items)} other items",
        )


EMPTY = Pack(items=())


def check_current(name: str, *, issued_us: int, expires_us: int, now_us: int, max_age_s: int) -> None:
    """An item's signed dates allow its use now.

    Args:
        issued_us, expires_us: as its maker signed them; the second is exclusive.

    Raises:
        CheckFailedError: `collateral-expired`, also for one of the future.
    """
    until_us = min(expires_us, issued_us + max_age_s * 1_000_000)
    if not issued_us <= now_us < until_us:
        what = "fetch it again with `glasshouse collateral fetch`" if issued_us <= now_us else "it is of the future"
        message = f"{name} in the collateral pack is not of this time by the verifier's clock: {what}"
        dates = f"from {utc(issued_us)} to {utc(until_us)}"
        raise CheckFailedError("12", Code.COLLATERAL_EXPIRED, message, expected=dates, actual=utc(now_us))
