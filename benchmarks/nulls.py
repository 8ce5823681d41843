"""How often the interval of twenty raw-against-raw sessions holds 0: drawn from the null parts of kept measurements.

make bench-nulls ARGUMENTS="benchmarks/results/overhead-lora-*"
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kept import Bar, finish, kept, options
from glasshouse_bench.analysis import analyse
from glasshouse_bench.artifact import Part
from glasshouse_bench.design import Mode
from glasshouse_bench.estimate import estimate

DRAWN, DRAWS, SEED = 20, 2000, 1
BARS = {"null_sessions": Bar(100, least=True), "hold_0": Bar(0.90, least=True), "hold_0_at_most": Bar(0.98)}


def main() -> int:
    """Draw and print; returns the exit status."""
    parser = options(__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="measurements with a null part")
    given = parser.parse_args()
    sources: dict[str, int] = {}
    contrasts: list[float] = []
    contention: list[float] = []
    widening = 1.0
    for folder in given.folders:
        if not (folder / Mode.NULL.value).is_dir():
            continue
        part = Part.open(folder, Mode.NULL)
        if part.design.planted is not None:
            continue  # not raw against raw: a cost was added on purpose
        found: Any = analyse(part)["sessions"]
        used = [one for one in found if one["contrast"] is not None]
        sources[folder.name] = len(used)
        contrasts += [float(one["contrast"]) for one in used]
        contention += [float(one["contention"]) for one in used]
        widening = max(widening, part.design.widening)
    if len(contrasts) < DRAWN:
        parser.error(f"{len(contrasts)} null sessions in all: at least {DRAWN} are drawn from")
    values, shared = np.array(contrasts), np.array(contention)
    random = np.random.default_rng(SEED)
    held = widths = 0.0
    for _ in range(DRAWS):
        drawn = random.choice(len(contrasts), DRAWN, replace=False)
        ends = estimate(values[drawn], contention=shared[drawn], widening=widening).measured()
        if ends is not None:
            held += ends.low <= 0 <= ends.high
            widths += (ends.high - ends.low) / 2
    share = held / DRAWS
    numbers = {
        "null_sessions": len(contrasts),
        "hold_0": share,
        "hold_0_at_most": share,
        "mean_half_width": widths / DRAWS,
        "mean_of_all": float(values.mean()),
        "session_deviation": float(values.std(ddof=1)),
    }
    raw = {"contention": contention, "contrasts": contrasts, "drawn": DRAWN, "draws": DRAWS, "seed": SEED}
    return finish(kept(numbers, BARS, sources=sources, widening=widening, **raw), given.output)


if __name__ == "__main__":
    sys.exit(main())
