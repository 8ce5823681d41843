"""How often the interval holds the truth, in each simulated world: `python -m glasshouse_bench.coverage`."""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import scipy

from glasshouse_bench.estimate import Interval, estimate
from glasshouse_bench.sensitivity import trimmed_contrast
from glasshouse_bench.worlds import SLOT_NS, STEP_NS, STEPS, WORLDS, World, simulate

__all__ = ["contrasts", "coverage", "main"]

BAR = 0.93
SESSIONS = 20
LENGTH_S = 10.0
_BATCH = 2000


def contrasts(world: World, *, sessions: int, length_s: float, seed: int) -> Iterator[tuple[float, float, float]]:
    """Yield each session's contrast, its contention, and its trimmed mean of block contrasts.

    Raises:
        ValueError: a session in which no block has both arms.
    """
    rng = np.random.default_rng(seed)
    for begin in range(0, sessions, _BATCH):
        found = simulate(world, sessions=min(_BATCH, sessions - begin), length_s=length_s, rng=rng)
        for session in range(len(found.seeds)):
            blocks = found.blocks(session)
            trimmed = trimmed_contrast(blocks)
            if trimmed is None:
                raise ValueError("a session without a whole block")
            yield blocks.contrast, blocks.contention, trimmed


def coverage(
    world: World, *, runs: int, sessions: int = SESSIONS, length_s: float = LENGTH_S, seed: int, widening: float = 1.0
) -> dict[str, float]:
    """Return what many measurements of one world find.

    Returns:
        Of all log ratios in percent: `truth`, `mean` and its standard error, deviation of a session, mean `half_width`,
        the part `covered` (the result), the part without an allowance for `contention`, and both, with its mean, of the
        trimmed mean of block contrasts, which is not the result.
    """
    drawn = np.array(list(contrasts(world, sessions=runs * sessions, length_s=length_s, seed=seed)))
    held: list[list[bool]] = []
    widths = []
    for number in range(runs):
        contrast, contention, trimmed = drawn[number * sessions : (number + 1) * sessions].T
        ends = [
            estimate(contrast, widening=widening, contention=contention).measured(),
            estimate(contrast, widening=widening).measured(),
            estimate(trimmed, widening=widening).measured(),
        ]
        held.append([_holds(one, world.truth) for one in ends])
        widths.append(0.0 if ends[0] is None else (ends[0].high - ends[0].low) / 2)
    covered, bare_covered, trimmed_covered = np.mean(held, axis=0)
    return {
        "truth": 100 * world.truth,
        "mean": 100 * float(drawn[:, 0].mean()),
        "mean_standard_error": 100 * float(drawn[:, 0].std(ddof=1)) / math.sqrt(len(drawn)),
        "session_deviation": 100 * float(drawn[:, 0].std(ddof=1)),
        "half_width": 100 * float(np.mean(widths)),
        "contention": 100 * float(drawn[:, 1].mean()),
        "covered": float(covered),
        "covered_without_contention": float(bare_covered),
        "trimmed_mean": 100 * float(drawn[:, 2].mean()),
        "trimmed_covered": float(trimmed_covered),
    }


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each world, and keep all as data; return 1 where a world is below the bar."""
    parser = argparse.ArgumentParser(prog="python -m glasshouse_bench.coverage", description=__doc__)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--sessions", type=int, default=SESSIONS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--widening", type=float, default=1.0, help="factor on the standard error")
    parser.add_argument("--world", action="append", choices=list(WORLDS), help="one world only; may be repeated")
    parser.add_argument("-o", "--out", type=Path, help="keep the result as JSON here")
    options = parser.parse_args(arguments)
    found: dict[str, dict[str, object]] = {}
    low = False
    for name in options.world or WORLDS:
        one = coverage(
            WORLDS[name],
            runs=options.runs,
            sessions=options.sessions,
            # Of its own, so that a world alone gives what it gives among the others.
            seed=options.seed + zlib.crc32(name.encode()),
            widening=options.widening,
        )
        found[name] = {"world": asdict(WORLDS[name]), **{key: round(value, 5) for key, value in one.items()}}
        low |= one["covered"] < BAR
        sys.stdout.write(_line(name, one))
        sys.stdout.flush()
    design = {"length_s": LENGTH_S, "slot_ns": SLOT_NS, "step_ns": STEP_NS, "steps": STEPS}
    metadata = {"numpy": np.__version__, "python": platform.python_version(), "scipy": scipy.__version__}
    kept = {
        "bar": BAR,
        "design": design,
        "metadata": metadata,
        "runs": options.runs,
        "seed": options.seed,
        "sessions": options.sessions,
    }
    if options.out is not None:
        options.out.write_text(json.dumps({**kept, "widening": options.widening, "worlds": found}, indent=1) + "\n")
    return int(low)


def _line(name: str, one: dict[str, float]) -> str:
    below = f"  BELOW {BAR:.0%}" if one["covered"] < BAR else ""
    return (
        f"{name:27} true {one['truth']:6.3f} %  found {one['mean']:6.3f} ± {one['mean_standard_error']:.3f} %  "
        f"interval ± {one['half_width']:.2f} %  held {one['covered']:.1%}{below}  (without contention "
        f"{one['covered_without_contention']:.1%}; trimmed {one['trimmed_mean']:.3f} %, {one['trimmed_covered']:.1%})\n"
    )


def _holds(interval: Interval | None, truth: float) -> bool:
    return interval is not None and interval.low <= truth <= interval.high


if __name__ == "__main__":
    sys.exit(main())
