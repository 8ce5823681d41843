"""Simulated characterisations of collectives: times from known prices, with noise."""

from __future__ import annotations

import random
from typing import Any

from glasshouse.bench.collectives.measurement import Measurement, Memory, NotMeasured, Start
from glasshouse.bench.collectives.values import Cell, Counts, Found, Kind, Sample, Way

CORES = 2
SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 25 << 20, 100 << 20)
# What an all-reduce of each way costs by itself, and for each byte and rank.
PRICES = {
    Way.RAW: (500e-6, 0.60e-9),
    Way.NETWORK: (250e-6, 0.52e-9),
    Way.SERIAL: (700e-6, 0.75e-9),
    Way.RING: (400e-6, 0.55e-9),
    Way.DIRECT: (230e-6, 0.50e-9),
    Way.PLAIN: (220e-6, 0.45e-9),
}


def found(cell: Cell, seconds: dict[Way, float], *, rounds: int = 9, foreign_cpu: float | None = 0.0) -> Found:
    """Return a cell whose ways take about these times."""
    chance = random.Random(3)
    return Found(
        cell=cell,
        samples={
            way: [_sample(value * chance.uniform(0.98, 1.02)) for _ in range(rounds)] for way, value in seconds.items()
        },
        counts={way: Counts(all_reduces=1.0, seal_calls=3, seal_s=0.001, wait_s=0.002) for way in seconds},
        cores=CORES,
        buckets=() if cell.kind is Kind.ALL_REDUCE else (1 << 18, 1 << 20),
        whole_buckets=0 if cell.kind is Kind.ALL_REDUCE else 2,
        foreign_cpu=foreign_cpu,
    )


def measurement(**changes: Any) -> Measurement:
    """Return a whole measurement with every kind of cell."""
    exchanges = [
        found(
            Cell(kind=Kind.ALL_REDUCE, ranks=count, bytes=size, ways=tuple(PRICES)),
            {way: once_s + size * count * byte_s for way, (once_s, byte_s) in PRICES.items()},
        )
        for count in (2, 4)
        for size in SIZES
    ]
    trained = [
        found(
            Cell(kind=Kind.TRAIN, ranks=2, model="gpt2-14m", cap_mib=cap, ways=(Way.RAW, Way.SEALED, Way.ALONE)),
            {Way.RAW: 0.200, Way.SEALED: 0.200, Way.ALONE: 0.150},
        )
        for cap in (None, 5)
    ]
    replayed = found(
        Cell(kind=Kind.REPLAY, ranks=4, model="gpt2-xl", ways=(Way.RAW, Way.SERIAL)), {Way.RAW: 0.1, Way.SERIAL: 0.4}
    )
    values: dict[str, Any] = {
        "system": {
            "cpu": "Simulated CPU",
            "logical_cpus": CORES,
            "kernel": "Linux",
            "torch": "2.13",
            "virtualised": True,
        },
        "found": (*exchanges, *trained, replayed),
        "not_measured": (
            NotMeasured(cell=Cell(kind=Kind.REPLAY, ranks=4, model="gpt2-large", ways=(Way.RAW,)), why="no time left"),
        ),
        "memory": (Memory(way=Way.SEALED, ranks=2, bytes=25 << 20, extra_bytes=10 << 20),),
        "start": Start(ranks=8, raw_s=(0.2, 0.3, 0.25), sealed_s=(0.5, 0.45, 0.6)),
        "seed": 5,
        "took_s": 61.0,
        "created_us": 1_790_000_000_000_000,
    }
    return Measurement(**values | changes)


def _sample(seconds: float) -> Sample:
    return Sample(wall_s=round(seconds, 7), user_s=round(seconds, 7), system_s=round(seconds / 2, 7))
