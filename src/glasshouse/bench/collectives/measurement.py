"""A whole characterisation as one value: what was found, what was not measured, the bars, the model, the machine.

Round-trip law: ``Measurement.from_json(one.to_json()) == one``, medians and ratios being computed again from the raw
samples, so that a kept result can be checked by anybody.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from glasshouse.bench.collectives.models import MODELS
from glasshouse.bench.collectives.values import Cell, Found, Kind, Way
from glasshouse.errors import Code, FormatError

__all__ = ["Bar", "Measurement", "Memory", "NotMeasured", "Start", "bars"]

FORMAT = "glasshouse collectives measurement 1"
MIB = 1 << 20
# docs: the bars of the table in docs/collectives.md, as ratios of the best sealed way to raw gloo.
EXCHANGE_BARS = {(25 * MIB, 2): 1.0, (25 * MIB, 4): 1.15, (MIB, 2): 1.1, (MIB, 4): 1.1}
START_BAR_S = 1.0
MEMORY_BAR = 3.0


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """A cell without numbers, and why."""

    _: KW_ONLY
    cell: Cell
    why: str


@dataclass(frozen=True, slots=True)
class Memory:
    """How much more memory than before a rank needed at the peak of an all-reduce, the most of all ranks."""

    _: KW_ONLY
    way: Way
    ranks: int
    bytes: int
    extra_bytes: int


@dataclass(frozen=True, slots=True)
class Start:
    """How long making a group took, from the first rank's begin to the last one's end, each time."""

    _: KW_ONLY
    ranks: int
    raw_s: tuple[float, ...]
    sealed_s: tuple[float, ...]

    @property
    def beyond_s(self) -> float:
        """How much longer the sealed group takes than gloo's own, by the medians."""
        return statistics.median(self.sealed_s) - statistics.median(self.raw_s)


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar, and what was found; `low` and `high` are the ends of a ratio's interval, None where there is none."""

    _: KW_ONLY
    what: str
    at_most: float
    found: float
    unit: str = "×"
    low: float | None = None
    high: float | None = None

    @property
    def met(self) -> bool:
        return self.found <= self.at_most


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a run gave.

    Args:
        system: the machine, without names of hosts, users or paths.
        found: cells with numbers.
        not_measured: cells without.
        memory, start: of the groups; None or empty where not measured.
        seed: from which the orders were drawn.
        quick: a trial whose numbers are no result.
        failed: what went wrong in the middle; what was complete stands.
        took_s: the run.
        created_us: when it ended, microseconds since the epoch.
    """

    _: KW_ONLY
    system: Mapping[str, Any]
    found: tuple[Found, ...]
    not_measured: tuple[NotMeasured, ...] = ()
    memory: tuple[Memory, ...] = ()
    start: Start | None = None
    seed: int = 0
    quick: bool = False
    failed: str | None = None
    took_s: float = 0.0
    created_us: int = 0

    def of(self, kind: Kind) -> tuple[Found, ...]:
        """Return the cells of a kind."""
        return tuple(found for found in self.found if found.cell.kind is kind)

    def to_json(self) -> dict[str, Any]:
        """Return everything, the raw samples included."""
        return {
            "bars": {
                bar.what: {"at_most": bar.at_most, "found": round(bar.found, 4), "met": bar.met} for bar in bars(self)
            },
            "cells": [found.to_json() for found in self.found],
            "created_us": self.created_us,
            "failed": self.failed,
            "format": FORMAT,
            "memory": [
                {"bytes": one.bytes, "extra_bytes": one.extra_bytes, "ranks": one.ranks, "way": one.way.value}
                for one in self.memory
            ],
            "not_measured": [{**one.cell.to_json(), "why": one.why} for one in self.not_measured],
            "quick": self.quick,
            "seed": self.seed,
            "start": None
            if self.start is None
            else {
                "ranks": self.start.ranks,
                "raw_s": [round(value, 6) for value in self.start.raw_s],
                "sealed_s": [round(value, 6) for value in self.start.sealed_s],
            },
            "system": dict(self.system),
            "took_s": round(self.took_s, 1),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Measurement:
        """Return what `to_json` wrote; raises `FormatError`, `schema-invalid`."""
        try:
            if value["format"] != FORMAT:
                raise ValueError("another format")
            start = value["start"]
            return cls(
                system=dict(value["system"]),
                found=tuple(Found.from_json(one) for one in value["cells"]),
                not_measured=tuple(
                    NotMeasured(cell=Cell.from_json(one), why=str(one["why"])) for one in value["not_measured"]
                ),
                memory=tuple(
                    Memory(way=Way(one["way"]), ranks=one["ranks"], bytes=one["bytes"], extra_bytes=one["extra_bytes"])
                    for one in value["memory"]
                ),
                start=None
                if start is None
                else Start(ranks=start["ranks"], raw_s=tuple(start["raw_s"]), sealed_s=tuple(start["sealed_s"])),
                seed=int(value["seed"]),
                quick=bool(value["quick"]),
                failed=value["failed"],
                took_s=float(value["took_s"]),
                created_us=int(value["created_us"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(Code.SCHEMA, f"not a measurement of collectives: {error}"[:200]) from None

    @classmethod
    def parse(cls, text: str | bytes) -> Measurement:
        """Return the measurement of a JSON text; raises `FormatError`, `schema-invalid`."""
        try:
            value = json.loads(text)
        except ValueError:
            raise FormatError(Code.SCHEMA, "not a measurement of collectives: no JSON") from None
        if not isinstance(value, Mapping):
            raise FormatError(Code.SCHEMA, "not a measurement of collectives: no object")
        return cls.from_json(value)


def bars(measurement: Measurement) -> tuple[Bar, ...]:
    """Return every bar that this measurement can judge."""
    found = [bar for one in measurement.found for bar in _ratio_bar(one)]
    if measurement.start is not None and measurement.start.sealed_s:
        ranks = measurement.start.ranks
        found.append(
            Bar(
                what=f"start-up of {ranks} ranks beyond gloo's",
                at_most=START_BAR_S,
                found=measurement.start.beyond_s,
                unit="s",
            )
        )
    return (*found, *_memory_bars(measurement.memory))


def _ratio_bar(found: Found) -> Sequence[Bar]:
    cell, best = found.cell, found.best()
    if best is None or cell.dtype != "float32" or cell.cap_mib is not None:
        return ()
    if cell.kind is Kind.ALL_REDUCE:
        most = EXCHANGE_BARS.get((cell.bytes or 0, cell.ranks))
        what = f"all-reduce of {(cell.bytes or 0) / MIB:g} MiB, {cell.ranks} ranks, best sealed to raw"
    else:
        # An iteration is judged by what a user gets, and not by the best that could be picked by hand.
        best = Way.SEALED if Way.SEALED in found.samples else best
        most = (MODELS[cell.model or ""].bars or {}).get(cell.ranks) if cell.kind is Kind.TRAIN else None
        what = f"iteration of {cell.model}, {cell.ranks} ranks, sealed to raw"
    if most is None:
        return ()
    ratio = found.ratio(best)
    return (Bar(what=what, at_most=most, found=ratio.value, low=ratio.low, high=ratio.high),)


def _memory_bars(memory: Sequence[Memory]) -> list[Bar]:
    sealed = [one for one in memory if one.way not in (Way.RAW, Way.PLAIN)]
    if not sealed:
        return []
    worst = max(sealed, key=lambda one: one.extra_bytes / one.bytes)
    what = f"peak extra memory to the bucket, {worst.way.value}, {worst.bytes / MIB:g} MiB, {worst.ranks} ranks"
    return [Bar(what=what, at_most=MEMORY_BAR, found=worst.extra_bytes / worst.bytes)]
