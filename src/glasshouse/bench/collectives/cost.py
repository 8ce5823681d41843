"""A cost model of all-reduce: latency, messages, AEAD, moving and adding bytes, fitted to what was measured here.

On one host every rank is one busy thread, so the terms of `Work` add up, and N ranks on C cores take N/C times as
long. Bytes through the AEAD, on the wire and added have one price each for all sealed ways, because the same code
moves them; an operation, a step and a message have one for each way. Laws: every price is at least zero; errors are
judged relatively, so that small messages count; a quality is told only for points that the fit has not seen (each size
is held out in turn). Method: non-negative least squares (Lawson and Hanson 1974), as an α-β model (Hockney 1994) with
prices for AEAD and messages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls

from glasshouse.bench.collectives.values import Way
from glasshouse.bench.collectives.work import Work, work
from glasshouse.errors import Code, UsageError

__all__ = ["Fit", "HeldOut", "Point", "Prices", "fit", "one_host_s"]

# What `sealed` does on one machine, without the network, says nothing of many machines.
MODELLED = (Way.RAW, Way.NETWORK, Way.SERIAL, Way.RING, Way.DIRECT, Way.PLAIN)
# Two sizes and two numbers of ranks are the least from which latency and bytes can be told apart.
LEAST_SIZES = 2
_SEALED = (Way.NETWORK, Way.SERIAL, Way.RING, Way.DIRECT, Way.PLAIN)
_OWN = 3  # operation, step, message
_SHARED = 3  # bytes on the wire, added, through the AEAD


@dataclass(frozen=True, slots=True)
class Point:
    """One measured all-reduce.

    Args:
        way: an algorithm.
        bytes: of the tensor.
        ranks: of the group.
        cores: that they shared.
        seconds: the median.
    """

    _: KW_ONLY
    way: Way
    bytes: int
    ranks: int
    cores: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Prices:
    """What the parts of one algorithm's work cost on one core of this machine.

    Args:
        operation_s: of an all-reduce, whatever its size.
        step_s: of a phase that waits for others.
        message_s: of a message, its AEAD call included.
        wire_s_per_byte: of a byte sent and received: copied out and in.
        add_s_per_byte: of a byte that is added.
        crypto_s_per_byte: of a byte through the AEAD.
    """

    _: KW_ONLY
    operation_s: float
    step_s: float
    message_s: float
    wire_s_per_byte: float
    add_s_per_byte: float
    crypto_s_per_byte: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"a price {name} of {value}")


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A point, and what the model says of it when fitted without any point of its size."""

    _: KW_ONLY
    point: Point
    predicted_s: float

    @property
    def error(self) -> float:
        """The relative error: 0.1 where the model says ten per cent too much."""
        return self.predicted_s / self.point.seconds - 1


@dataclass(frozen=True, slots=True)
class Fit:
    """The fitted model.

    Args:
        prices: of each algorithm.
        held_out: every point, predicted by a fit without its size.
    """

    _: KW_ONLY
    prices: Mapping[Way, Prices]
    held_out: tuple[HeldOut, ...]

    @property
    def median_error(self) -> float:
        """The median of the relative errors' sizes over the held-out points."""
        return float(np.median([abs(one.error) for one in self.held_out]))

    @property
    def worst_error(self) -> float:
        """The largest relative error over the held-out points."""
        return max(abs(one.error) for one in self.held_out)

    def to_json(self) -> dict[str, Any]:
        """Return prices, errors and every held-out point."""
        return {
            "held_out": [
                {
                    "bytes": one.point.bytes,
                    "measured_s": round(one.point.seconds, 7),
                    "predicted_s": round(one.predicted_s, 7),
                    "ranks": one.point.ranks,
                    "way": one.point.way.value,
                }
                for one in self.held_out
            ],
            "median_error": round(self.median_error, 4),
            "prices": {way.value: asdict(price) for way, price in self.prices.items()},
            "worst_error": round(self.worst_error, 4),
        }


def one_host_s(price: Prices, found: Work, *, ranks: int, cores: int) -> float:
    """Return the time of an all-reduce whose ranks all run on one host.

    Args:
        price: of its algorithm.
        found: the work of one rank.
        ranks: on the host.
        cores: that they share.
    """
    busy = (
        found.messages * price.message_s
        + found.crypto_bytes * price.crypto_s_per_byte
        + found.wire_bytes * price.wire_s_per_byte
        + found.add_bytes * price.add_s_per_byte
    )
    return price.operation_s + found.steps * price.step_s + max(1.0, ranks / cores) * busy


def fit(points: Sequence[Point]) -> Fit:
    """Fit prices to measured all-reduces, and judge them on sizes held out in turn.

    Args:
        points: of at least three sizes; algorithms without points get no prices.

    Raises:
        UsageError: there are too few sizes to tell latency from bytes.
    """
    sizes = sorted({point.bytes for point in points})
    if len(sizes) < LEAST_SIZES + 1:
        raise UsageError(Code.USAGE, f"a cost model needs all-reduces of at least {LEAST_SIZES + 1} sizes")
    held_out = []
    for size in sizes:
        known = _prices([point for point in points if point.bytes != size])
        for point in points:
            if point.bytes == size and point.way in known:
                held_out.append(HeldOut(point=point, predicted_s=_predict(known[point.way], point)))
    return Fit(prices=_prices(points), held_out=tuple(held_out))


def _predict(price: Prices, point: Point) -> float:
    return one_host_s(price, _work_of(point), ranks=point.ranks, cores=point.cores)


def _work_of(point: Point) -> Work:
    return work(point.way, bytes_=point.bytes, ranks=point.ranks)


def _prices(points: Sequence[Point]) -> dict[Way, Prices]:
    """Return the prices by algorithm."""
    found = {}
    for family in ((Way.RAW,), _SEALED):
        mine = [point for point in points if point.way in family]
        if mine:
            found.update(_solve(mine))
    return found


def _solve(points: Sequence[Point]) -> dict[Way, Prices]:
    """Solve for the prices of a family: three of each way's own, and three that they share."""
    ways = [way for way in MODELLED if any(point.way is way for point in points)]
    rows = []
    for point in points:
        found, load = _work_of(point), max(1.0, point.ranks / point.cores)
        row = [0.0] * (_OWN * len(ways) + _SHARED)
        row[_OWN * ways.index(point.way) : _OWN * ways.index(point.way) + _OWN] = [
            1.0,
            float(found.steps),
            load * found.messages,
        ]
        row[-_SHARED:] = [load * value for value in (found.wire_bytes, found.add_bytes, found.crypto_bytes)]
        rows.append([value / point.seconds for value in row])
    matrix = np.array(rows)
    scale = np.where(matrix.max(axis=0) > 0, matrix.max(axis=0), 1.0)
    solved, _ = nnls(matrix / scale, np.ones(len(rows)))
    prices = [float(value) for value in solved / scale]
    wire, add, crypto = prices[-_SHARED:]
    return {
        way: Prices(
            operation_s=prices[_OWN * place],
            step_s=prices[_OWN * place + 1],
            message_s=prices[_OWN * place + 2],
            wire_s_per_byte=wire,
            add_s_per_byte=add,
            crypto_s_per_byte=0.0 if way in (Way.RAW, Way.PLAIN) else crypto,
        )
        for place, way in enumerate(ways)
    }
