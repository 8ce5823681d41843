"""Where a leg of a line begins: a claim of its launch token, and of the EAR of its release (spec/checkpoints.md 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from glasshouse.errors import Code, FormatError
from glasshouse.wire.record import LEFT_OUT, Id, Record, Sha256, digest, integer

MAX_LEGS = 1_000_000
LINE_BYTES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class LineStart(Record, name="line", max_bytes=1024):
    """Which leg of which line this is, and the checkpoint that it goes on from."""

    id: Annotated[bytes, digest(LINE_BYTES)]
    leg: Annotated[int, integer(1, MAX_LEGS)]
    seq: int  # of the checkpoint; 0 for none: the leg begins from the beginning
    checkpoint: Annotated[Sha256 | None, LEFT_OUT] = None  # its digest
    rewind: Annotated[bool, LEFT_OUT] = False  # whether the owner ordered an older one than the last
    counted: Annotated[int, LEFT_OUT] = (
        0  # the greatest number that was counted, where that is not `seq`: after a rewind
    )
    previous: Annotated[Id | None, LEFT_OUT] = None  # key id of the leg before's holder; in an EAR only, from leg 2 on

    def __post_init__(self) -> None:
        if (self.seq == 0) != (self.checkpoint is None):
            raise FormatError(Code.SCHEMA, "a line that begins from a number without a checkpoint, or the reverse")
        if (self.rewind and not self.counted) or 0 < self.counted <= self.seq:
            raise FormatError(Code.SCHEMA, "a rewind without a later checkpoint, or a later one that is none")
        if self.leg == 1 and (self.seq or self.counted or self.previous is not None):
            raise FormatError(Code.SCHEMA, "a first leg that goes on from something")

    @property
    def next_seq(self) -> int:
        """The number of the first checkpoint of this leg."""
        return max(self.seq, self.counted) + 1
