"""Where the spread of a kept measurement comes from: within sessions, between them, by a step's place in its slot.

make bench-spread ARGUMENTS="benchmarks/results/overhead-lora-tiny-60m_cpu-2core-vm_2026-11-23"
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.kept import finish, kept, options
from glasshouse_bench.artifact import Part
from glasshouse_bench.design import Mode
from glasshouse_bench.estimate import estimate
from glasshouse_bench.records import Record, parse
from glasshouse_bench.sessions import blocks_of, session_of, window


def main() -> int:
    """Take the contrasts apart and print; returns the exit status."""
    parser = options(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a measurement in slots")
    given = parser.parse_args()
    numbers: dict[str, float] = {}
    modes = [mode for mode in (Mode.INTERLEAVED, Mode.NULL) if (given.folder / mode.value).is_dir()]
    for mode in modes:
        part = Part.open(given.folder, mode)
        pairs = [records for note in part.notes() if (records := _pair(part.records(note), part.design.length_ns))]
        if len(pairs) < 2:
            parser.error(f"{mode.value}: {len(pairs)} sessions that count; at least two are compared")
        halves = [_halves(pair) for pair in pairs]
        total, within = (float(np.std(one, ddof=1)) for one in ([sum(h) / 2 for h in halves], _apart(halves)))
        numbers |= {
            f"{mode.value}_sessions": len(pairs),
            f"{mode.value}_deviation_of_sessions_%": 100 * total,
            f"{mode.value}_of_it_within_sessions_%": 100 * within,
            f"{mode.value}_of_it_between_sessions_%": 100 * max(0.0, total**2 - within**2) ** 0.5,
        }
        for place in range(part.design.plan(0, "R", end_ns=0).in_slot):
            numbers |= _shown(f"{mode.value}_step_{place}_of_a_slot", [_contrast(pair, place) for pair in pairs])
    return finish(kept(numbers, {}, source=given.folder.name), given.output)


def _pair(records: Sequence[bytes | None], length_ns: int) -> tuple[Record, Record] | None:
    raw, protected = (None if data is None else parse(data) for data in records)
    # Blocks that only the machine's state excludes (steal) are in here; they are none or few.
    if raw is None or protected is None or session_of(raw, protected, length_ns=length_ns).blocks is None:
        return None
    return raw, protected


def _halves(pair: tuple[Record, Record]) -> tuple[float, float]:
    """Return the contrasts of every other block and of the rest."""
    first, stop = window(pair, pair[0].plan)
    odd = np.arange(first, stop) % 2 == 1
    plan = pair[0].plan
    found = [
        blocks_of(pair[0].steps, pair[1].steps, uncounted=plan.uncounted, first=first, kept=kept_)[0].contrast
        for kept_ in (odd, ~odd)
    ]
    return found[0], found[1]


def _apart(halves: Sequence[tuple[float, float]]) -> list[float]:
    """Return half the difference of both halves: its deviation is what a session's mean has from within."""
    return [(one - other) / 2 for one, other in halves]


def _contrast(pair: tuple[Record, Record], place: int) -> float:
    """Return the contrast of the steps at one place of their slots alone; place 0 is the one that is not counted."""
    first, stop = window(pair, pair[0].plan)
    only = [
        replace(one.steps, **{name: getattr(one.steps, name)[one.steps.index == place] for name in _ARRAYS})
        for one in pair
    ]
    return blocks_of(*only, uncounted=0, first=first, kept=np.ones(stop - first, dtype=bool))[0].contrast


_ARRAYS = ("slot", "index", "begin", "end")


def _shown(name: str, contrasts: Sequence[float]) -> dict[str, float]:
    found = estimate(contrasts).measured()
    if found is None:
        return {}
    return {
        f"{name}_%": 100 * float(np.expm1(np.mean(contrasts))),
        f"{name}_half_width_%": 50 * (found.high - found.low),
    }


if __name__ == "__main__":
    sys.exit(main())
