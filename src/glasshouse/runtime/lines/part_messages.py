"""A worker's messages about checkpoints (spec/checkpoints.md section 8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from glasshouse.package.limits import MAX_BYTES
from glasshouse.wire.lines.checkpoint import MAX_WORLD, PartRow
from glasshouse.wire.record import Member, Record, Sha256, integer, items


@dataclass(frozen=True, kw_only=True, slots=True)
class PartBegins(Record, constants={"type": "part"}):
    """One rank's part of a checkpoint follows in data frames."""

    previous: Sha256 | None  # digest of the checkpoint before
    rank: Annotated[int, integer(0, MAX_WORLD - 1)]
    seq: Annotated[int, integer(1)]
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PartEnds(Record, constants={"type": "part-end"}):
    """The part is whole."""

    size: Annotated[int, Member("bytes"), integer(1, MAX_BYTES)]


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherPart(PartRow):
    """A part of a rank on another machine, as that machine's agent named it."""

    rank: Annotated[int, integer(0, MAX_WORLD - 1)]

    def row(self) -> PartRow:
        """Return it as the header names it."""
        return PartRow(bytes=self.bytes, head_sha256=self.head_sha256, sha256=self.sha256)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartsThere(Record, constants={"type": "checkpoint"}):
    """All ranks of this machine have sent their parts."""

    others: Annotated[tuple[OtherPart, ...], items(MAX_WORLD)]  # on machine 0, of the ranks on all others
    seq: Annotated[int, integer(1)]
    step: int
