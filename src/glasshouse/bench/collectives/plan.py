"""What is measured, in which order, and how the time is shared among it.

Law: cells of one number of ranks lie together, because their processes are started once; within it the bars come
first, so that a measurement that was stopped has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from glasshouse.bench.collectives.values import Cell, Kind, Way
from glasshouse.errors import Code, UsageError

__all__ = ["CAPS", "DTYPES", "PARTS", "REPLAYS", "SIZES", "TRAINED", "Plan", "full", "quick"]

MIB = 1 << 20
SIZES = (64 << 10, 256 << 10, MIB, 4 * MIB, 25 * MIB, 100 * MIB)
BAR_SIZES = (MIB, 25 * MIB)
CAPS: tuple[int | None, ...] = (None, 1, 5, 100, 250)
DTYPES = ("float32", "bfloat16", "float16", "float64")
TRAINED = ("gpt2-14m", "gpt2-27m", "resnet-2m", "vit-6m")
REPLAYS = ("resnet-50", "vit-b16", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
PARTS = ("all-reduce", "train", "replay", "start")
TRAIN_WAYS = (Way.RAW, Way.SEALED, Way.SERIAL, Way.RING, Way.DIRECT, Way.ALONE)
REPLAY_WAYS = (Way.RAW, Way.SEALED, Way.SERIAL, Way.RING, Way.DIRECT)
EXCHANGE_WAYS = (Way.RAW, Way.SEALED, Way.NETWORK, Way.SERIAL, Way.RING, Way.DIRECT, Way.PLAIN)
START_RANKS = 8
MEMORY_BYTES = (25 * MIB, 100 * MIB)
# The larger and the judged cells take more of the time: their samples are long and their verdict counts.
_WEIGHTS = {Kind.ALL_REDUCE: 1.0, Kind.TRAIN: 3.0, Kind.REPLAY: 1.0}
_JUDGED = 3.0


@dataclass(frozen=True, slots=True)
class Plan:
    """A measurement before it begins.

    Args:
        cells: in their order; those of one number of ranks lie together.
        time_s: about how long all of it may take.
        seed: the orders of the ways are drawn from it.
        quick: a trial whose numbers are no result.
        start_ranks: of the start-up measurement; 0 for none.
        start_repeats: groups made for it.
        memory_bytes: sizes whose peak memory is looked at.
        least_rounds: of every cell.
    """

    _: KW_ONLY
    cells: tuple[Cell, ...]
    time_s: float
    seed: int
    quick: bool = False
    start_ranks: int = 0
    start_repeats: int = 3
    memory_bytes: tuple[int, ...] = ()
    least_rounds: int = 5

    def __post_init__(self) -> None:
        ranks = [cell.ranks for cell in self.cells]
        if ranks != sorted(ranks):
            raise ValueError("cells of one number of ranks do not lie together")
        if self.time_s <= 0 or (not self.cells and not self.start_ranks):
            raise UsageError(Code.USAGE, "nothing to measure, or no time for it")

    def needed(self, cell: Cell) -> bool:
        """Return whether a cell is measured even where that takes more than its share."""
        return self.quick or judged(cell)

    def weight(self, cell: Cell) -> float:
        """Return a cell's part of the time, against others'."""
        return _WEIGHTS[cell.kind] * (_JUDGED if judged(cell) else 1.0)

    def share_s(self, cell: Cell, left_s: float) -> float:
        """Return how long a cell may take of what is left when it begins."""
        place = self.cells.index(cell)
        return max(0.0, left_s) * self.weight(cell) / sum(self.weight(one) for one in self.cells[place:])


def judged(cell: Cell) -> bool:
    """Return whether a bar speaks of this cell."""
    if cell.dtype != "float32" or cell.cap_mib is not None:
        return False
    if cell.kind is Kind.ALL_REDUCE:
        return cell.bytes in BAR_SIZES
    return cell.kind is Kind.TRAIN and cell.ranks == 2 and cell.model in ("gpt2-14m", "gpt2-27m")


def full(
    *,
    time_s: float,
    seed: int,
    ranks: Sequence[int] = (2, 4),
    parts: Sequence[str] = PARTS,
    sizes: Sequence[int] = SIZES,
    models: Sequence[str] = (*TRAINED, *REPLAYS),
    caps: Sequence[int | None] = CAPS,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
) -> Plan:
    """Return the characterisation.

    Args:
        time_s: about how long it may take.
        seed: for the order of the samples.
        ranks: numbers of processes, each at least 2.
        parts: of `PARTS`.
        sizes: of tensors, in bytes.
        models: of `TRAINED` and `REPLAYS`.
        caps: bucket caps in MiB; None as DDP itself.
        dtypes: the first is used throughout, the others where they say something new.
    """
    cells: list[Cell] = []
    for count in sorted(set(ranks)):
        mine: list[Cell] = []
        swept = count == min(ranks)
        if "all-reduce" in parts:
            mine += _exchanges(count, sizes, dtypes)
        if "train" in parts:
            mine += _iterations(Kind.TRAIN, count, _of(TRAINED, models), caps, dtypes, swept=swept)
        if "replay" in parts:
            mine += _iterations(Kind.REPLAY, count, _of(REPLAYS, models), caps, dtypes, swept=swept)
        cells += sorted(mine, key=lambda cell: not judged(cell))
    return Plan(
        cells=tuple(cells),
        time_s=time_s,
        seed=seed,
        start_ranks=START_RANKS if "start" in parts else 0,
        memory_bytes=MEMORY_BYTES if "start" in parts else (),
    )


def quick(*, seed: int, parts: Sequence[str] = PARTS, time_s: float = 25.0) -> Plan:
    """Return a trial of every kind of cell in well under a minute; its numbers are no result."""
    cells = []
    if "all-reduce" in parts:
        cells += [
            Cell(kind=Kind.ALL_REDUCE, ranks=2, bytes=size, ways=EXCHANGE_WAYS)
            for size in (64 << 10, MIB, 4 * MIB, 25 * MIB)
        ]
    if "train" in parts:
        cells.append(Cell(kind=Kind.TRAIN, ranks=2, model="resnet-2m", ways=TRAIN_WAYS))
    if "replay" in parts:
        cells.append(Cell(kind=Kind.REPLAY, ranks=2, model="resnet-50", ways=REPLAY_WAYS))
    return Plan(
        cells=tuple(cells),
        time_s=time_s,
        seed=seed,
        quick=True,
        start_ranks=2 if "start" in parts else 0,
        start_repeats=1,
        memory_bytes=(4 * MIB,) if "start" in parts else (),
        least_rounds=3,
    )


def _of(known: Sequence[str], wanted: Sequence[str]) -> list[str]:
    return [name for name in known if name in wanted]


def _exchanges(ranks: int, sizes: Sequence[int], dtypes: Sequence[str]) -> list[Cell]:
    found = [Cell(kind=Kind.ALL_REDUCE, ranks=ranks, bytes=size, dtype=dtypes[0], ways=EXCHANGE_WAYS) for size in sizes]
    for dtype in dtypes[1:]:
        found += [
            Cell(kind=Kind.ALL_REDUCE, ranks=ranks, bytes=size, dtype=dtype, ways=EXCHANGE_WAYS)
            for size in sizes
            if size in BAR_SIZES
        ]
    return found


def _iterations(
    kind: Kind, ranks: int, models: Sequence[str], caps: Sequence[int | None], dtypes: Sequence[str], *, swept: bool
) -> list[Cell]:
    """Every model with the first cap; where it is swept, every cap for the first and the last, every type for one.

    A sweep of what is trained is for one number of ranks: the computation takes the time, and says nothing new.
    """
    ways = TRAIN_WAYS if kind is Kind.TRAIN else REPLAY_WAYS
    found = [Cell(kind=kind, ranks=ranks, model=name, cap_mib=caps[0], dtype=dtypes[0], ways=ways) for name in models]
    ends = models[:1] if kind is Kind.TRAIN else models[-1:]
    wide = [*models[:1], *ends] if swept else ends if kind is Kind.REPLAY else []
    for name in dict.fromkeys(wide):
        found += [Cell(kind=kind, ranks=ranks, model=name, cap_mib=cap, dtype=dtypes[0], ways=ways) for cap in caps[1:]]
    for name in ends if swept else []:
        found += [
            Cell(kind=kind, ranks=ranks, model=name, cap_mib=caps[0], dtype=dtype, ways=ways) for dtype in dtypes[1:]
        ]
    return found
