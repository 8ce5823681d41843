"""What is measured and what was found, as values: ways, cells, samples, counts; and how samples become numbers.

Laws: all ways of a cell were sampled in turns, a round holding each once in an order drawn anew; a ratio compares
medians, and its interval resamples whole rounds, because what disturbs a round disturbs all of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np

__all__ = ["SEALED_WAYS", "Cell", "Counts", "Found", "Kind", "Ratio", "Sample", "Way"]

_RESAMPLES = 2_000


class Way(StrEnum):
    """How gradients are exchanged."""

    RAW = "raw"  # gloo, in plaintext: what everything is compared with
    SEALED = "sealed"  # what `init_process_group("sealed")` does: between ranks of one machine through shared memory
    NETWORK = "network"  # the same between ranks that are not on one machine: over TCP, as gloo and all that follow
    SERIAL = "serial"  # encrypt, send, receive, decrypt, one after the other: the paper's pattern
    RING = "ring"
    DIRECT = "direct"  # in two phases, whatever the size
    PLAIN = "plain"  # `network` without AEAD: constructible here only
    ALONE = "alone"  # no exchange at all: the computation of an iteration


# Those among which the best is looked for.
SEALED_WAYS = (Way.SEALED, Way.NETWORK, Way.SERIAL, Way.RING, Way.DIRECT)


class Kind(StrEnum):
    """What is repeated in a cell."""

    ALL_REDUCE = "all-reduce"
    TRAIN = "train"
    REPLAY = "replay"


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the characterisation; every way is sampled in it.

    Args:
        kind: what is repeated.
        ranks: how many processes.
        dtype: of the elements, as torch names it.
        bytes: of the tensor, for an all-reduce.
        model: name of the model, for an iteration.
        cap_mib: the bucket cap; None as DDP itself.
        ways: what is compared.
    """

    _: KW_ONLY
    kind: Kind
    ranks: int
    dtype: str = "float32"
    bytes: int | None = None
    model: str | None = None
    cap_mib: int | None = None
    ways: tuple[Way, ...] = (Way.RAW, Way.SERIAL, Way.RING, Way.DIRECT, Way.PLAIN)

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ValueError(f"a cell of {self.ranks} ranks exchanges nothing")
        if (self.bytes is None) is (self.kind is Kind.ALL_REDUCE):
            raise ValueError(f"a cell of kind {self.kind} with bytes {self.bytes}")
        if (self.model is None) is not (self.kind is Kind.ALL_REDUCE):
            raise ValueError(f"a cell of kind {self.kind} with model {self.model}")

    def to_json(self) -> dict[str, Any]:
        """Return the members that describe the cell."""
        return {
            "bytes": self.bytes,
            "cap_mib": self.cap_mib,
            "dtype": self.dtype,
            "kind": self.kind.value,
            "model": self.model,
            "ranks": self.ranks,
            "ways": [way.value for way in self.ways],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Cell:
        """Return what `to_json` wrote; raises `KeyError`, `TypeError` or `ValueError`."""
        return cls(
            kind=Kind(value["kind"]),
            ranks=int(value["ranks"]),
            dtype=str(value["dtype"]),
            bytes=value["bytes"],
            model=value["model"],
            cap_mib=value["cap_mib"],
            ways=tuple(Way(way) for way in value["ways"]),
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed stretch of one way, over all ranks, for one repetition of what the cell repeats.

    Args:
        wall_s: from the first rank's begin to the last rank's end, by the clock that all share.
        user_s, system_s: processor time of all ranks together.
    """

    _: KW_ONLY
    wall_s: float
    user_s: float
    system_s: float


@dataclass(frozen=True, slots=True)
class Counts:
    """What one way did for one repetition, summed over the ranks; None where nothing counts (gloo).

    Args:
        all_reduces: per rank.
        seal_calls, open_calls, seal_bytes, open_bytes: of the AEAD.
        received_bytes: from the connections, headers and tags included, as the connections count them.
        seal_s, open_s, add_s: within these calls.
        system_s: in the kernel: sending, receiving, polling.
        other_s: on a processor otherwise: control, and in a training iteration its computation.
        wait_s: on none.
    """

    _: KW_ONLY
    all_reduces: float
    seal_calls: float = 0.0
    open_calls: float = 0.0
    seal_bytes: float = 0.0
    open_bytes: float = 0.0
    received_bytes: float = 0.0
    seal_s: float = 0.0
    open_s: float = 0.0
    add_s: float = 0.0
    system_s: float = 0.0
    other_s: float = 0.0
    wait_s: float = 0.0

    def to_json(self) -> dict[str, float]:
        """Return all members."""
        return {name: float(value) for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of medians with a 95 % interval from resampled rounds."""

    _: KW_ONLY
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Found:
    """What a cell gave.

    Args:
        cell: which.
        samples: of every way, in the order of the rounds; all of one length.
        counts: of every way that was counted.
        share: the part of an iteration's gradients that was exchanged; less than 1 for a sampled replay, whose times
            are of that part.
        buckets: elements of each exchanged bucket, in order; empty for an all-reduce.
        whole_buckets: buckets of the whole model.
        foreign_cpu: processors that other programs kept busy meanwhile, in the mean; None where nobody can tell.
        cores: that all ranks share.
    """

    _: KW_ONLY
    cell: Cell
    samples: Mapping[Way, Sequence[Sample]]
    counts: Mapping[Way, Counts]
    cores: int
    share: float = 1.0
    buckets: tuple[int, ...] = ()
    whole_buckets: int = 0
    foreign_cpu: float | None = None

    @property
    def rounds(self) -> int:
        return min((len(found) for found in self.samples.values()), default=0)

    def seconds(self, way: Way) -> float:
        """Return the median time of a way."""
        return statistics.median(sample.wall_s for sample in self.samples[way])

    def cpu_s(self, way: Way) -> float:
        """Return the median processor time, user and system, of all ranks together."""
        return statistics.median(sample.user_s + sample.system_s for sample in self.samples[way])

    def idle(self, way: Way) -> float:
        """Return the part of the processors' time in which no rank was on one."""
        places = min(self.cores, self.cell.ranks)
        return statistics.median(
            max(0.0, 1 - (sample.user_s + sample.system_s) / (places * sample.wall_s)) for sample in self.samples[way]
        )

    def ratio(self, way: Way, base: Way = Way.RAW) -> Ratio:
        """Return how many times longer a way takes than another."""
        ours = np.array([sample.wall_s for sample in self.samples[way]])
        theirs = np.array([sample.wall_s for sample in self.samples[base]])
        length = min(len(ours), len(theirs))
        # The same draws for every cell: a report of the same samples is the same report.
        draws = np.random.default_rng(0).integers(0, length, (_RESAMPLES, length))
        ratios = np.median(ours[draws], axis=1) / np.median(theirs[draws], axis=1)
        low, high = np.quantile(ratios, (0.025, 0.975))
        return Ratio(value=float(np.median(ours) / np.median(theirs)), low=float(low), high=float(high))

    def best(self) -> Way | None:
        """Return the fastest sealed way."""
        found = [way for way in SEALED_WAYS if way in self.samples]
        return min(found, key=self.seconds, default=None)

    def exposed_s(self, way: Way) -> float | None:
        """Return by how much the iteration is longer than its computation alone; None where that was not measured."""
        if Way.ALONE not in self.samples or way is Way.ALONE:
            return None
        return self.seconds(way) - self.seconds(Way.ALONE)

    def to_json(self) -> dict[str, Any]:
        """Return everything, the raw samples included; `from_json` reads it back."""
        return {
            **self.cell.to_json(),
            "buckets": list(self.buckets),
            "cores": self.cores,
            "counts": {way.value: found.to_json() for way, found in self.counts.items()},
            "exposed_s": {
                way.value: _short(value) for way in self.samples if (value := self.exposed_s(way)) is not None
            },
            "foreign_cpu": None if self.foreign_cpu is None else round(self.foreign_cpu, 3),
            "median_s": {way.value: _short(self.seconds(way)) for way in self.samples},
            "cpu_s": {way.value: _short(self.cpu_s(way)) for way in self.samples},
            "idle": {way.value: round(self.idle(way), 4) for way in self.samples},
            "ratio_to_raw": {way.value: self._ratio_json(way) for way in self.samples if Way.RAW in self.samples},
            "rounds": self.rounds,
            "samples": {
                way.value: [[_short(one.wall_s), _short(one.user_s), _short(one.system_s)] for one in found]
                for way, found in self.samples.items()
            },
            "share": self.share,
            "whole_buckets": self.whole_buckets,
        }

    def _ratio_json(self, way: Way) -> list[float]:
        found = self.ratio(way)
        return [round(found.value, 4), round(found.low, 4), round(found.high, 4)]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Found:
        """Return what `to_json` wrote; raises `KeyError`, `TypeError` or `ValueError`."""
        return cls(
            cell=Cell.from_json(value),
            samples={
                Way(way): [Sample(wall_s=wall, user_s=user, system_s=system) for wall, user, system in found]
                for way, found in value["samples"].items()
            },
            counts={Way(way): Counts(**found) for way, found in value["counts"].items()},
            cores=int(value["cores"]),
            share=float(value["share"]),
            buckets=tuple(int(one) for one in value["buckets"]),
            whole_buckets=int(value["whole_buckets"]),
            foreign_cpu=value["foreign_cpu"],
        )


def _short(seconds: float) -> float:
    """Return a time with tenths of a microsecond: the clock knows no more."""
    return round(seconds, 7)
