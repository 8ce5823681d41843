"""Simulated characterisations of collectives: times from known prices, with noise, for a fit to be held to them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from glasshouse.bench.collectives.cost import Point, Prices, one_host_s
from glasshouse.bench.collectives.measurement import Measurement, Memory, NotMeasured, Start
from glasshouse.bench.collectives.values import Cell, Counts, Found, Kind, Sample, Way
from glasshouse.bench.collectives.work import work

CORES = 2
SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 25 << 20, 100 << 20)
RATES = {"wire_s_per_byte": 0.4e-9, "add_s_per_byte": 0.2e-9}
PRICES = {
    Way.RAW: Prices(
        operation_s=180e-6,
        step_s=160e-6,
        message_s=0.0,
        crypto_s_per_byte=0.0,
        wire_s_per_byte=9e-10,
        add_s_per_byte=2e-10,
    ),
    Way.NETWORK: Prices(operation_s=150e-6, step_s=50e-6, message_s=20e-6, crypto_s_per_byte=0.06e-9, **RATES),
    Way.SERIAL: Prices(operation_s=150e-6, step_s=300e-6, message_s=40e-6, crypto_s_per_byte=0.06e-9, **RATES),
    Way.RING: Prices(operation_s=150e-6, step_s=90e-6, message_s=22e-6, crypto_s_per_byte=0.06e-9, **RATES),
    Way.DIRECT: Prices(operation_s=160e-6, step_s=50e-6, message_s=20e-6, crypto_s_per_byte=0.06e-9, **RATES),
    Way.PLAIN: Prices(operation_s=150e-6, step_s=50e-6, message_s=18e-6, crypto_s_per_byte=0.0, **RATES),
}


def points(*, noise: float = 0.0, ranks: Sequence[int] = (2, 4), sizes: Sequence[int] = SIZES) -> list[Point]:
    """Return what a machine of these prices would be measured to do."""
    chance = random.Random(7)
    return [
        Point(
            way=way,
            bytes=size,
            ranks=count,
            cores=CORES,
            seconds=one_host_s(price, work(way, bytes_=size, ranks=count), ranks=count, cores=CORES)
            * (1 + noise * chance.uniform(-1, 1)),
        )
        for way, price in PRICES.items()
        for size in sizes
        for count in ranks
    ]


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
            {
                way: one_host_s(price, work(way, bytes_=size, ranks=count), ranks=count, cores=CORES)
                for way, price in PRICES.items()
            },
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
