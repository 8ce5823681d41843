"""Cells of the characterisation, and the numbers that follow from their raw samples.

Laws: all ways of a cell are sampled in every round, in an order drawn anew; a ratio compares medians, and its interval
resamples whole rounds, because what disturbs a round disturbs all ways in it. Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from typing import Any

import numpy as np

__all__ = ["DTYPES", "REPLAYED", "TRAINED", "Cell", "Kind", "Way", "bars", "numbers", "plan"]

MIB = 1 << 20
DTYPES = ("float32", "bfloat16", "float16", "float64")
TRAINED = ("gpt2-14m", "gpt2-27m", "resnet-2m", "vit-6m")
REPLAYED = ("resnet-50", "vit-b16", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
MEMORY_BAR = 3.0
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


class Kind(StrEnum):
    """What is repeated in a cell."""

    ALL_REDUCE = "all-reduce"
    TRAIN = "train"
    REPLAY = "replay"


# Those among which the best is looked for.
SEALED_WAYS = (Way.SEALED, Way.NETWORK, Way.SERIAL, Way.RING, Way.DIRECT)
WAYS = {
    Kind.ALL_REDUCE: (Way.RAW, *SEALED_WAYS, Way.PLAIN),
    Kind.TRAIN: (Way.RAW, Way.SEALED, Way.SERIAL, Way.RING, Way.DIRECT, Way.ALONE),
    Kind.REPLAY: (Way.RAW, Way.SEALED, Way.SERIAL, Way.RING, Way.DIRECT),
}
# The most that a sealed way may take, as a ratio to raw gloo, by bytes or model and by ranks.
RATIO_BARS: Mapping[tuple[int | str, int], float] = {
    (MIB, 2): 1.1,
    (25 * MIB, 2): 1.0,
    (MIB, 4): 1.1,
    (25 * MIB, 4): 1.15,
    ("gpt2-14m", 2): 1.03,
    ("gpt2-27m", 2): 1.06,
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the characterisation.

    Args:
        kind: what is repeated.
        ranks: how many processes.
        bytes: of the tensor, for an all-reduce.
        model: name of the model, for an iteration.
        cap_mib: the bucket cap; None for the default of DDP.
        dtype: of the elements, as torch names it.
        ways: what is compared.
    """

    _: KW_ONLY
    kind: Kind
    ranks: int
    bytes: int | None = None
    model: str | None = None
    cap_mib: int | None = None
    dtype: str = "float32"
    ways: tuple[Way, ...] = ()

    def __post_init__(self) -> None:
        if (self.bytes is None) is (self.model is None) or (self.model is None) is not (self.kind is Kind.ALL_REDUCE):
            raise ValueError(f"a cell of kind {self.kind} with bytes {self.bytes} and model {self.model}")
        if not self.ways:
            object.__setattr__(self, "ways", WAYS[self.kind])

    @property
    def bar(self) -> float | None:
        """The most that a sealed way may take as a ratio to raw; None where nothing is asked."""
        judged = self.dtype == "float32" and self.cap_mib is None and self.kind is not Kind.REPLAY
        return RATIO_BARS.get((self.bytes or self.model or "", self.ranks)) if judged else None


def plan(
    *,
    ranks: Sequence[int],
    parts: Sequence[str],
    sizes: Sequence[int],
    models: Sequence[str],
    caps: Sequence[int | None],
    dtypes: Sequence[str],
) -> list[Cell]:
    """Return the cells in their order: by ranks, and among these first what a bar speaks of.

    The first cap and type are used throughout; the others where they add something: with the fewest ranks, for 1 and
    25 MiB, for the first model that is trained, and for the first and last whose exchange is replayed.
    """
    cells: list[Cell] = []
    for count in sorted(set(ranks)):
        mine: list[Cell] = []
        if Kind.ALL_REDUCE in parts:
            for dtype in dtypes:
                few = sizes if dtype == dtypes[0] else [size for size in sizes if size in (MIB, 25 * MIB)]
                mine += [Cell(kind=Kind.ALL_REDUCE, ranks=count, bytes=size, dtype=dtype) for size in few]
        for kind, known in ((Kind.TRAIN, TRAINED), (Kind.REPLAY, REPLAYED)):
            names = [name for name in known if name in models] if kind in parts else []
            swept = {*names[:1], *(names[-1:] if kind is Kind.REPLAY else ())} if count == min(ranks) else set()
            points = [(cap, dtypes[0]) for cap in caps] + [(caps[0], dtype) for dtype in dtypes[1:]]
            mine += [
                Cell(kind=kind, ranks=count, model=name, cap_mib=cap, dtype=dtype)
                for name in names
                for cap, dtype in (points if name in swept else points[:1])
            ]
        cells += sorted(mine, key=lambda cell: cell.bar is None)
    return cells


def numbers(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what follows from the samples of a cell: medians, ratios with intervals, idleness.

    Args:
        found: the cell as it is kept; `samples` has ``[wall, user, system]`` of every round of each way, in seconds,
            processor time being that of all ranks.
    """
    samples, places = found["samples"], min(found["cores"], found["ranks"])
    median = {way: statistics.median(one[0] for one in rounds) for way, rounds in samples.items()}
    return {
        "cpu_s": {way: round(statistics.median(one[1] + one[2] for one in each), 7) for way, each in samples.items()},
        "exposed_s": {
            way: round(value - median["alone"], 7)
            for way, value in median.items()
            if "alone" in median and way != "alone"
        },
        # The part of the processors' time in which no rank was on one.
        "idle": {
            way: round(statistics.median(max(0.0, 1 - (one[1] + one[2]) / (places * one[0])) for one in rounds), 4)
            for way, rounds in samples.items()
        },
        "median_s": {way: round(value, 7) for way, value in median.items()},
        "ratio_to_raw": {way: _ratio(samples[way], samples["raw"]) for way in samples if "raw" in samples},
        "rounds": min(len(rounds) for rounds in samples.values()),
    }


def _ratio(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> list[float]:
    """Return the ratio of the medians, and the ends of its 95 % interval."""
    left, right = (np.array([one[0] for one in samples]) for samples in (ours, theirs))
    # The same draws for every cell: the same samples give the same interval.
    draws = np.random.default_rng(0).integers(0, len(left), (_RESAMPLES, len(left)))
    ratios = np.median(left[draws], axis=1) / np.median(right[draws], axis=1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return [round(float(value), 4) for value in (np.median(left) / np.median(right), low, high)]


def bars(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every bar that a measurement can judge: `what`, `found`, `at_most`, `met`, and `interval` or None.

    An all-reduce is judged by its best sealed way, an iteration by what a user gets.
    """
    judged: list[tuple[str, float, float, list[float] | None]] = []
    for found in document["cells"]:
        cell = cell_of(found)
        best = best_of(found)
        if cell.bar is None or best is None:
            continue
        train = cell.kind is Kind.TRAIN
        ratio = found["ratio_to_raw"]["sealed" if train and "sealed" in found["samples"] else best]
        thing = f"iteration of {cell.model}" if train else f"all-reduce of {(cell.bytes or 0) / MIB:g} MiB"
        what = f"{thing}, {cell.ranks} ranks, {'sealed' if train else 'best sealed'} to raw"
        judged.append((what, ratio[0], cell.bar, ratio[1:]))
    extra = [(one["extra_bytes"] / one["bytes"], one) for one in document["memory"] if one["way"] in SEALED_WAYS]
    if extra:
        share, one = max(extra, key=lambda pair: pair[0])
        where = f"{one['way']}, {one['bytes'] / MIB:g} MiB, {one['ranks']} ranks"
        judged.append((f"peak extra memory to the bucket, {where}", round(share, 4), MEMORY_BAR, None))
    return [
        {"what": what, "found": found, "at_most": most, "met": found <= most, "interval": interval}
        for what, found, most, interval in judged
    ]


def cell_of(found: Mapping[str, Any]) -> Cell:
    """Return the cell of what is kept of it."""
    names = ("kind", "ranks", "bytes", "model", "cap_mib", "dtype")
    values = {name: found[name] for name in names}
    return Cell(**values | {"kind": Kind(found["kind"]), "ways": tuple(map(Way, found["ways"]))})


def best_of(found: Mapping[str, Any]) -> str | None:
    """Return the fastest sealed way; None where none was sampled."""
    ways = [way for way in SEALED_WAYS if way in found["samples"]]
    return min(ways, key=lambda way: float(found["median_s"][way]), default=None)
