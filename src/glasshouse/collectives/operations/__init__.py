"""Every collective and the point-to-point messages, as values that an engine carries out.

Laws: an operation names in advance, for each peer, the frames that it sends and those that it takes, in one fixed
order, so that both ends agree without negotiation; it takes nothing that its opener has not verified; every rank that
takes part names the same operation, or it fails with what each of them does.
"""

from __future__ import annotations

from glasshouse.collectives.operations.data_movement import all_gather, all_to_all, barrier, broadcast, gather, scatter
from glasshouse.collectives.operations.point_to_point import receive, send
from glasshouse.collectives.operations.reductions import all_reduce, reduce, reduce_scatter

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
