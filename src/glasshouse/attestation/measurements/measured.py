"""What a runtime measured of itself, part by part, and what an owner recorded for each (spec/key-release.md, 5.2).

Law: a measurement is acceptable only where each of its parts is recorded for that part; a part without records, or a
measurement without parts, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from glasshouse.errors import Code, FormatError
from glasshouse.wire.crypto import lengths_prefixed, sha256
from glasshouse.wire.record import Record, Sha256, digest, items

PARTS = ("cryptography", "glasshouse", "interpreter", "start_up")
"""The parts, sorted: the ciphers, our own code, the interpreter with its standard library, and start-up hooks."""

MAX_REFERENCES = 32
_PART_LABEL = b"glasshouse measured part v1"
_LABEL = b"glasshouse runtime measurement v2"

Digests: TypeAlias = Annotated[tuple[bytes, ...], items(MAX_REFERENCES, digest())]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured(Record, name="measurement"):
    """The runtime measurement, as a digest for each part."""

    cryptography: Sha256  # of what encrypts and hashes beside the plaintext, with its native code
    glasshouse: Sha256  # of this distribution
    interpreter: Sha256  # and of its standard library
    start_up: Sha256  # of what runs before the first line of the runtime

    def __post_init__(self) -> None:
        if any(len(digest) != 32 for digest in self.parts().values()):
            raise FormatError(Code.SCHEMA, "a measured part is not a SHA-256 digest")

    @classmethod
    def of(cls, files: Mapping[str, Mapping[str, bytes]]) -> Measured:
        """Return the digests of parts, each given as file name → SHA-256 of its content; raises `KeyError`."""
        return cls(**{part: digest_of_part(part, files[part]) for part in PARTS})

    def parts(self) -> dict[str, bytes]:
        """Return the digest of each part, in their order."""
        return {part: getattr(self, part) for part in PARTS}

    @property
    def sha256(self) -> bytes:
        """One digest over all parts: what receipts and artifacts name."""
        parts = (piece for part, digest in self.parts().items() for piece in (part.encode(), digest))
        return sha256(lengths_prefixed(_LABEL, *parts))


@dataclass(frozen=True, kw_only=True, slots=True)
class References(Record, name="policy.references"):
    """The digests that are acceptable for each part: sorted, distinct, and at least one each."""

    cryptography: Digests
    glasshouse: Digests
    interpreter: Digests
    start_up: Digests

    def __post_init__(self) -> None:
        for part, digests in self.parts().items():
            if not 1 <= len(digests) <= MAX_REFERENCES:
                # An empty list would mean "anything": absence never means yes.
                raise FormatError(
                    Code.POLICY_IMPOSSIBLE, f"a policy needs between 1 and {MAX_REFERENCES} references of {part}"
                )
            if list(digests) != sorted(set(digests)) or any(len(digest) != 32 for digest in digests):
                raise FormatError(Code.SCHEMA, f"references of {part} that are not sorted, distinct SHA-256 digests")

    @classmethod
    def of(cls, *measured: Measured) -> References:
        """Return what accepts each part of these, also in another's company.

        Raises:
            FormatError: `policy-impossible`: none, or too many.
        """
        return cls(**{part: tuple(sorted({one.parts()[part] for one in measured})) for part in PARTS})

    def parts(self) -> dict[str, tuple[bytes, ...]]:
        """Return the digests of each part, in their order."""
        return {part: getattr(self, part) for part in PARTS}

    def unknown(self, measured: Measured) -> str | None:
        """Return the first part of a measurement that is not recorded; None where all are."""
        recorded = self.parts()
        return next((part for part, digest in measured.parts().items() if digest not in recorded[part]), None)


def digest_of_part(part: str, files: Mapping[str, bytes]) -> bytes:
    """Return the digest of one part, given as file name → SHA-256 of its content."""
    listed = (piece for name in sorted(files) for piece in (name.encode(), files[name]))
    return sha256(lengths_prefixed(_PART_LABEL, part.encode(), *listed))
