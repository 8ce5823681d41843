"""Every collective and the point-to-point messages, as values that an engine carries out.

Law: an operation names in advance, for each peer, the frames that it sends and those that it takes, in one fixed order,
so that both ends agree without negotiation; ranks that name different operations fail with what each of them does.
"""

from __future__ import annotations

from glasshouse.collectives.operations.plans import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from glasshouse.collectives.operations.point_to_point import receive, send

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "receive",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]
