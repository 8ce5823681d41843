"""When the warm-up is over: long enough, no drift, no step.

The arms alternate from the first slice on. After every warm-up block the rule is applied to the series
``y_b``, the mean over the block's four slices of ln(time per step), so that a difference between the arms
cancels:

1. at least `least_ns` from the first warm-up t0 to the last t1, and at least `window_blocks` blocks;
2. drift: the Theil–Sen slope of the last `window_blocks` values (the median of all pairwise slopes; Theil 1950,
   Sen 1968, J. Am. Stat. Assoc. 63:1379) times (window − 1) is below `drift_ppm` in size;
3. no changepoint: for each split of the window with at least two values on either side, the two-sample t with
   pooled variance; the largest |t| is compared with Student's t at 1 − 0.05/(2·splits), window − 2 degrees of
   freedom (the maximum of t over the splits, Worsley 1979, J. Am. Stat. Assoc. 74:365, bounded by Bonferroni). A split
   counts only if its means also differ by `drift_ppm`: on a quiet machine the smallest step is significant,
   and harmless.

Theil–Sen is blind to a step near an end of the window, where the split sees it. At the cap the session goes on
and is flagged `no_steady_state`. The rule is applied after every block, and so can pass by luck on a noisy
machine: it says when to start, and it is not a proof of steadiness.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum

from glasshouse.bench.overhead.blocks import Block
from glasshouse.bench.overhead.design import WarmupRule
from glasshouse.bench.overhead.interval import t_quantile

__all__ = ["CHANGEPOINT_LEVEL", "State", "Steadiness", "assess", "changepoint", "judge", "level", "theil_sen_slope"]

CHANGEPOINT_LEVEL = 0.05


class State(StrEnum):
    """What the warm-up has come to."""

    WARMING = "warming"
    STEADY = "steady"
    NO_STEADY_STATE = "no_steady_state"


@dataclass(frozen=True, slots=True)
class Steadiness:
    """What the rule says after some number of warm-up blocks.

    Args:
        state: whether to go on warming.
        blocks: how many warm-up blocks were looked at.
        elapsed_ns: from the first t0 to the last t1.
        drift: the change over the window on the log scale; None with too few blocks.
        changepoint: how many blocks of the window lie before the step that was found; None where there is none.
    """

    _: KW_ONLY
    state: State
    blocks: int
    elapsed_ns: int
    drift: float | None
    changepoint: int | None


def level(block: Block) -> float:
    """Return the mean over a block's slices of the natural logarithm of nanoseconds per step."""
    return math.fsum(math.log(time_ns) for time_ns in block.step_times_ns) / len(block.slices)


def theil_sen_slope(values: Sequence[float]) -> float:
    """Return the median of the slopes between all pairs of equally spaced values (Sen 1968)."""
    return statistics.median(
        (values[later] - values[earlier]) / (later - earlier)
        for earlier in range(len(values))
        for later in range(earlier + 1, len(values))
    )


def changepoint(values: Sequence[float], *, least: float) -> int | None:
    """Return the size of the first part of the split that shows one step in the mean, or None (Worsley 1979).

    Args:
        values: five or more, equally spaced.
        least: the smallest difference between the means that counts.
    """
    number = len(values)
    splits = range(2, number - 1)
    critical = t_quantile(1 - CHANGEPOINT_LEVEL / (2 * len(splits)), number - 2)
    found, largest = None, critical
    for split in splits:
        before, after = values[:split], values[split:]
        step = abs(statistics.fmean(after) - statistics.fmean(before))
        if step < least:
            continue
        squares = (split - 1) * statistics.variance(before) + (number - split - 1) * statistics.variance(after)
        error = math.sqrt(squares / (number - 2) * (1 / split + 1 / (number - split)))
        score = step / error if error else math.inf
        if score > largest:
            found, largest = split, score
    return found


def assess(levels: Sequence[float], elapsed_ns: int, rule: WarmupRule) -> Steadiness:
    """Apply the rule to the warm-up so far.

    Args:
        levels: `level` of each warm-up block, in order.
        elapsed_ns: from the first warm-up t0 to the last t1.
        rule: the design's parameters.
    """
    window = levels[-rule.window_blocks :]
    limit = rule.drift_ppm / 1_000_000
    drift = step = None
    if len(window) == rule.window_blocks:
        drift = theil_sen_slope(window) * (len(window) - 1)
        step = changepoint(window, least=limit)
    steady = drift is not None and abs(drift) < limit and step is None and elapsed_ns >= rule.least_ns
    capped = State.NO_STEADY_STATE if elapsed_ns >= rule.cap_ns else State.WARMING
    return Steadiness(
        state=State.STEADY if steady else capped,
        blocks=len(levels),
        elapsed_ns=elapsed_ns,
        drift=drift,
        changepoint=step,
    )


def judge(blocks: Sequence[Block], rule: WarmupRule) -> Steadiness:
    """Replay the rule over a session's warm-up; return what it said first other than to go on, or at the end.

    `blocks` of the result is how many it took: a session that warmed up for longer, or for less, did not
    follow its design.
    """
    levels: list[float] = []
    found = assess(levels, 0, rule)
    for number, block in enumerate(blocks, start=1):
        if not block.complete or min(one.duration_ns for one in block.slices) <= 0:
            # A clock that stood still gives no logarithm: the window starts again behind it.
            levels.clear()
            continue
        levels.append(level(block))
        elapsed_ns = block.slices[-1].t1_ns - blocks[0].slices[0].t0_ns
        found = replace(assess(levels, elapsed_ns, rule), blocks=number)
        if found.state is not State.WARMING:
            break
    return found
