"""Lines: which leg may be released, and which checkpoint counts; without I/O (spec/checkpoints.md sections 5 and 6).

Laws: of each number of a line there is one ticket, and of each leg one release; only the holder of the current leg
counts; what a gate is shown of its own moves a record forward and never back.
"""

from __future__ import annotations

from dataclasses import dataclass

from glasshouse.wire.lines.statements import Ticket


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The checkpoint that the next leg goes on from."""

    seq: int = 0  # 0 for the beginning
    step: int = 0
    digest: bytes | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LineRecord:
    """What the gate's store holds of a line."""

    id: bytes
    deployment: str
    # The world: that of the first leg.
    machines: int
    ranks: int
    leg: int = 0  # the last that was released; 0 before the first
    holder: str | None = None  # key id of its machine 0's evidence key; None where the gate does not know it
    lost: bool = False  # whether its owner said so of that leg
    since_us: int = 0  # when that leg was released, or this gate came to know of it
    head: Head = Head()
    ticket: Ticket | None = None  # the newest
    order_us: int = 0  # the greatest serial of an order

    @property
    def seq(self) -> int:
        """The greatest number that was counted."""
        return 0 if self.ticket is None else self.ticket.seq
