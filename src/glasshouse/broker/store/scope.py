"""Whose things a call may see: an enrolled owner's own, or, on the Unix socket of the broker's own user, all.

Law: what is another owner's is answered as if it did not exist.
"""

from __future__ import annotations

from dataclasses import dataclass

from glasshouse.wire.crypto import lengths_prefixed, sha256

_ROW_LABEL = b"glasshouse gate package v1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """What one caller may see and change."""

    owner: bytes | None  # their public signing key; None for the broker's own user, who may see everything

    def covers(self, owner: bytes) -> bool:
        """Return whether what belongs to `owner` is this caller's."""
        return self.owner is None or self.owner == owner

    def row_of(self, package_id: str) -> str:
        """Return the name under which the database keeps this caller's package.

        Of each owner its own: a package id is no secret, and with one name for all another owner could take it first.
        """
        if self.owner is None:
            return package_id
        return sha256(lengths_prefixed(_ROW_LABEL, self.owner, package_id.encode()))[:16].hex()


EVERYTHING = Scope(owner=None)
