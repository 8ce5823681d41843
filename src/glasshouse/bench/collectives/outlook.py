"""From a measurement to a fitted cost model and its forecasts of the paper's models on many machines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from glasshouse.bench.collectives.buckets import buckets_of
from glasshouse.bench.collectives.cost import Fit, one_host_s
from glasshouse.bench.collectives.forecast import Cluster, Forecast, Job, forecasts
from glasshouse.bench.collectives.measurement import Measurement
from glasshouse.bench.collectives.models import MODELS
from glasshouse.bench.collectives.values import Found, Way
from glasshouse.bench.collectives.work import work

__all__ = ["Iteration", "Outlook", "outlook"]

# As in the paper: the smallest and the largest GPT-2. A rank's batch is eight sequences of 1,024 tokens.
FORECAST_MODELS = ("gpt2", "gpt2-xl")
TOKENS = 8 * 1_024
# Forward and backward pass of a transformer (Kaplan et al. 2020): six operations a parameter and token.
FLOPS_PER_PARAMETER = 6


@dataclass(frozen=True, slots=True)
class Iteration:
    """A measured iteration or replay, which no price was fitted to, and what the model says of it."""

    _: KW_ONLY
    found: Found
    way: Way
    predicted_s: float

    @property
    def measured_s(self) -> float:
        return self.found.seconds(self.way)

    @property
    def error(self) -> float:
        """The relative error: 0.1 where the model says ten per cent too much."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True)
class Outlook:
    """A fitted model and what it says.

    Args:
        fit: with its errors on held-out points.
        cluster: the machines that are forecast.
        flops_per_s: sustained by a rank.
        jobs: what is trained there.
        forecasts: of every job, in the same order.
        iterations: measured ones, and what the model says of them.
    """

    _: KW_ONLY
    fit: Fit
    cluster: Cluster
    flops_per_s: float
    jobs: tuple[Job, ...]
    forecasts: tuple[tuple[Forecast, ...], ...]
    iterations: tuple[Iteration, ...] = ()

    def by_job(self) -> Iterator[tuple[Job, tuple[Forecast, ...]]]:
        """Yield every job with its forecasts."""
        return zip(self.jobs, self.forecasts, strict=True)

    def to_json(self) -> dict[str, Any]:
        """Return the prices, their errors and every forecast."""
        return {
            "crypto_bytes_per_s": self.cluster.crypto_bytes_per_s,
            "fit": self.fit.to_json(),
            "flops_per_s": self.flops_per_s,
            "iterations": [
                {
                    "cap_mib": one.found.cell.cap_mib,
                    "measured_s": round(one.measured_s, 6),
                    "model": one.found.cell.model,
                    "predicted_s": round(one.predicted_s, 6),
                    "ranks": one.found.cell.ranks,
                    "way": one.way.value,
                }
                for one in self.iterations
            ],
            "jobs": [
                {
                    "compute_s": round(job.compute_s, 6),
                    "forecasts": [one.to_json() for one in found],
                    "model": job.name,
                }
                for job, found in self.by_job()
            ],
            "latency_s": self.cluster.latency_s,
            "link_bytes_per_s": self.cluster.link_bytes_per_s,
        }


def outlook(measurement: Measurement, cluster: Cluster, *, flops_per_s: float) -> Outlook | None:
    """Return the outlook; None where too few all-reduces were measured for a model.

    Args:
        measurement: to fit.
        cluster: to forecast.
        flops_per_s: a rank's sustained computation.
    """
    fitted = measurement.model()
    if fitted is None:
        return None
    jobs = tuple(_job(name, flops_per_s) for name in FORECAST_MODELS)
    return Outlook(
        fit=fitted,
        cluster=cluster,
        flops_per_s=flops_per_s,
        jobs=jobs,
        forecasts=tuple(forecasts(fitted, job, cluster) for job in jobs),
        iterations=tuple(_iterations(measurement, fitted)),
    )


def _iterations(measurement: Measurement, fitted: Fit) -> Iterator[Iteration]:
    """Yield what the model says of every measured iteration: computation alone, and then the exchange of each bucket.

    On one host the ranks compute on the processors that exchange, so that nothing is hidden.
    """
    for found in measurement.found:
        if not found.buckets or found.cell.dtype != "float32":
            continue
        alone = found.seconds(Way.ALONE) if Way.ALONE in found.samples else 0.0
        for way in found.samples:
            if way not in fitted.prices:
                continue
            price, ranks = fitted.prices[way], found.cell.ranks
            exchanged = sum(
                one_host_s(price, work(way, bytes_=4 * elements, ranks=ranks), ranks=ranks, cores=found.cores)
                for elements in found.buckets
            )
            yield Iteration(found=found, way=way, predicted_s=alone + exchanged)


def _job(name: str, flops_per_s: float) -> Job:
    found = buckets_of(MODELS[name], cap_mib=None, dtype=torch.float32)
    compute_s = FLOPS_PER_PARAMETER * found.whole_elements * TOKENS / flops_per_s
    return Job(name=name, bucket_bytes=tuple(4 * count for count in found.elements), compute_s=compute_s)
