"""What the cost model says of an iteration on other machines: one rank a host, a link between them, up to 4096 ranks.

Laws: buckets are exchanged one after the other in the order in which their gradients become ready, evenly over the
backward pass by elements (two thirds of the computation); an all-reduce overlaps link and processor where its
algorithm is pipelined and adds them up where it is `serial`. Nothing here was measured beyond the ranks of the fit:
direct's connections and messages grow with the ranks, and congestion in a switch is not in the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from typing import Any

from glasshouse.bench.collectives.cost import Fit, Prices
from glasshouse.bench.collectives.values import Way
from glasshouse.bench.collectives.work import Work, work

__all__ = ["RANKS", "Bound", "Cluster", "Forecast", "Job", "exchange", "forecast", "forecasts"]

RANKS = (8, 16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096)
BACKWARD = 2 / 3
# An iteration that communication lengthens by less than this is bound by its computation.
HIDDEN = 0.05


class Bound(StrEnum):
    """Which term decides."""

    COMPUTATION = "computation"
    LINK = "link"
    CRYPTO = "crypto"
    MESSAGES = "messages"
    HOST = "copying"
    LATENCY = "latency"


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machines of a forecast, one rank on each.

    Args:
        link_bytes_per_s: of a rank, in each direction.
        latency_s: of a message on the link.
        crypto_bytes_per_s: of a rank's AEAD; None as it was measured here.
        crypto_beside: the AEAD runs beside copying (on a GPU), and not in the same thread.
    """

    _: KW_ONLY
    link_bytes_per_s: float
    latency_s: float = 20e-6
    crypto_bytes_per_s: float | None = None
    crypto_beside: bool = False

    def __post_init__(self) -> None:
        if self.link_bytes_per_s <= 0 or self.latency_s < 0 or (self.crypto_bytes_per_s or 1) <= 0:
            raise ValueError("a cluster whose rates are not positive")


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained.

    Args:
        name: of the model.
        bucket_bytes: in the order in which gradients become ready.
        compute_s: forward and backward pass of a rank, without communication.
    """

    _: KW_ONLY
    name: str
    bucket_bytes: tuple[int, ...]
    compute_s: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """One forecast iteration.

    Args:
        way: the algorithm.
        ranks: how many.
        seconds: of an iteration.
        exposed_s: of it, communication that the backward pass does not hide.
        bound: which term decides.
    """

    _: KW_ONLY
    way: Way
    ranks: int
    seconds: float
    exposed_s: float
    bound: Bound

    def to_json(self) -> dict[str, Any]:
        """Return all members."""
        return {
            "bound": self.bound.value,
            "exposed_s": round(self.exposed_s, 6),
            "ranks": self.ranks,
            "seconds": round(self.seconds, 6),
            "way": self.way.value,
        }


def exchange(price: Prices, found: Work, cluster: Cluster, *, pipelined: bool) -> tuple[float, dict[Bound, float]]:
    """Return the time of one all-reduce between hosts, and its terms.

    Args:
        price: of the algorithm, measured on one host.
        found: the work of one rank.
        cluster: where.
        pipelined: link, AEAD and copying overlap.
    """
    crypto_s = price.crypto_s_per_byte
    if cluster.crypto_bytes_per_s is not None and found.crypto_bytes:
        crypto_s = 1 / cluster.crypto_bytes_per_s
    terms = {
        Bound.LINK: found.wire_bytes / cluster.link_bytes_per_s,
        Bound.CRYPTO: found.crypto_bytes * crypto_s,
        Bound.MESSAGES: found.messages * price.message_s,
        Bound.HOST: found.wire_bytes * price.wire_s_per_byte + found.add_bytes * price.add_s_per_byte,
        Bound.LATENCY: price.operation_s + found.steps * (price.step_s + cluster.latency_s),
    }
    processor = terms[Bound.MESSAGES] + terms[Bound.HOST]
    if not pipelined:
        return sum(terms.values()), terms
    if cluster.crypto_beside:
        return terms[Bound.LATENCY] + max(terms[Bound.LINK], terms[Bound.CRYPTO], processor), terms
    return terms[Bound.LATENCY] + max(terms[Bound.LINK], terms[Bound.CRYPTO] + processor), terms


def forecast(model: Fit, way: Way, job: Job, cluster: Cluster, *, ranks: int) -> Forecast:
    """Return what an iteration takes.

    Args:
        model: fitted here.
        way: an algorithm that it has prices of.
        job: what is trained.
        cluster: where.
        ranks: how many.

    Raises:
        KeyError: the algorithm was not measured.
    """
    price, totals = model.prices[way], dict.fromkeys(Bound, 0.0)
    whole, passed, end = sum(job.bucket_bytes), 0, 0.0
    for bytes_ in job.bucket_bytes:
        passed += bytes_
        ready = job.compute_s * (1 - BACKWARD * (1 - passed / whole))
        taken, terms = exchange(price, work(way, bytes_=bytes_, ranks=ranks), cluster, pipelined=way is not Way.SERIAL)
        end = max(end, ready) + taken
        for bound, value in terms.items():
            totals[bound] += value
    seconds = max(job.compute_s, end)
    exposed = seconds - job.compute_s
    decides = max(totals, key=lambda bound: totals[bound])
    bound = Bound.COMPUTATION if exposed <= HIDDEN * job.compute_s else decides
    return Forecast(way=way, ranks=ranks, seconds=seconds, exposed_s=exposed, bound=bound)


def forecasts(model: Fit, job: Job, cluster: Cluster, *, ranks: Sequence[int] = RANKS) -> tuple[Forecast, ...]:
    """Return forecasts of every measured algorithm, by ranks."""
    return tuple(forecast(model, way, job, cluster, ranks=count) for count in ranks for way in model.prices)
