"""The same slices through other estimators: whether the answer hangs on the choice of method.

None of these is the result; each is published beside it. All randomness is drawn from the design's seed
(`draws`), so that a verifier gets the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
from numpy.typing import NDArray

from glasshouse.bench.overhead.blocks import Block, Session
from glasshouse.bench.overhead.design import SEQUENCES, Arm, Design
from glasshouse.bench.overhead.draws import stream
from glasshouse.bench.overhead.estimate import block_contrast, contrasts
from glasshouse.bench.overhead.interval import TRIM, Interval, Mean, decimal, mean_of, trimmed_mean
from glasshouse.wire.canonical import Json

__all__ = [
    "RANDOMISATIONS",
    "RESAMPLES",
    "Bootstrap",
    "Randomisation",
    "Sensitivity",
    "block_bootstrap",
    "launch_effect",
    "ordinary_least_squares",
    "randomisation_test",
    "sensitivity",
    "untrimmed",
]

RESAMPLES = 1999
RANDOMISATIONS = 1999
# Of all schedules together: a week of slices drawn 1,999 times would take tens of gigabytes.
_BLOCKS_AT_ONCE = 1 << 18
_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """A percentile interval from resampled blocks."""

    _: KW_ONLY
    interval: Interval
    resamples: int
    run_lengths: tuple[int, ...]

    def to_json(self) -> dict[str, Json]:
        return {
            "interval_95": self.interval.to_json(),
            "resamples": self.resamples,
            "run_lengths": list(self.run_lengths),
        }


@dataclass(frozen=True, slots=True)
class Randomisation:
    """How often schedules that could have been drawn give an estimate at least as large, were there no effect."""

    _: KW_ONLY
    p: float
    draws: int

    def to_json(self) -> dict[str, Json]:
        return {"draws": self.draws, "p": decimal(self.p)}


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The whole set; a member is None where the data cannot answer it.

    Args:
        untrimmed: as the estimate, with plain means in place of trimmed ones.
        ols_period: least squares with block and position effects.
        ols_carryover: the same with the effect of the arm that ran before.
        bootstrap: the block bootstrap.
        randomisation: the randomisation test.
        launch: half the difference of raw-first and protected-first sessions.
    """

    _: KW_ONLY
    untrimmed: Mean | None
    ols_period: Mean | None
    ols_carryover: Mean | None
    bootstrap: Bootstrap | None
    randomisation: Randomisation
    launch: Mean | None

    def to_json(self) -> dict[str, Json]:
        return {
            "bootstrap": None if self.bootstrap is None else self.bootstrap.to_json(),
            "launch_order": _mean_json(self.launch),
            "ols_carryover": _mean_json(self.ols_carryover),
            "ols_period": _mean_json(self.ols_period),
            "randomisation": self.randomisation.to_json(),
            "untrimmed": _mean_json(self.untrimmed),
        }


def sensitivity(design: Design, sessions: Sequence[Session]) -> Sensitivity:
    """Return the set for the sessions that the estimate uses (`estimate.usable`).

    Raises:
        ValueError: no block that counts.
    """
    values = [contrasts(session.blocks) for session in sessions]
    blocks = [list(session.included) for session in sessions]
    return Sensitivity(
        untrimmed=untrimmed(values),
        ols_period=ordinary_least_squares(blocks),
        ols_carryover=ordinary_least_squares(blocks, carryover=True),
        bootstrap=block_bootstrap(values, seed=design.seed),
        randomisation=randomisation_test(blocks, seed=design.seed),
        launch=launch_effect(sessions),
    )


def untrimmed(sessions: Sequence[Sequence[float]]) -> Mean | None:
    """Return the estimate with plain means; None for a single block."""
    if len(sessions) > 1:
        return mean_of([math.fsum(values) / len(values) for values in sessions])
    return mean_of(sessions[0]) if len(sessions[0]) > 1 else None


def ordinary_least_squares(sessions: Sequence[Sequence[Block]], *, carryover: bool = False) -> Mean | None:
    """Return the coefficient of the protected arm in a regression on all slices.

    ``ln t = block + position + τ·[arm is P] (+ λ·c)``, where c is ½ after a protected slice, −½ after a raw one and 0
    at the block's first position: the crossover model with period and first-order carry-over effects (Jones &
    Kenward, Design and Analysis of Cross-Over Trials, 3rd ed.). Block effects are removed by centring each
    block. The standard error is cluster-robust (Liang & Zeger 1986, Biometrika 73:13) with the factor
    G/(G−1)·(N−1)/(N−k) over G clusters, N slices and k regressors, and G − 1 degrees of freedom (Cameron & Miller 2015,
    J. Hum. Resour. 50:317); the clusters are sessions, or the blocks of a single one.

    Returns:
        None where the arm cannot be told from its position (too few different sequences) or there is one cluster.
    """
    clusters = [list(blocks) for blocks in sessions] if len(sessions) > 1 else [[block] for block in sessions[0]]
    if len(clusters) < 2:
        return None
    parts = [[_centred(block, carryover=carryover) for block in blocks] for blocks in clusters]
    design = np.vstack([x for part in parts for x, _ in part])
    observed = np.concatenate([y for part in parts for _, y in part])
    number, terms = design.shape
    if number <= terms or int(np.linalg.matrix_rank(design)) < terms:
        return None
    bread = np.linalg.inv(design.T @ design)
    effect = bread @ (design.T @ observed)
    meat = np.zeros((terms, terms))
    for part in parts:
        score = sum((x.T @ (y - x @ effect) for x, y in part), np.zeros(terms))
        meat += np.outer(score, score)
    groups = len(parts)
    factor = groups / (groups - 1) * (number - 1) / (number - terms)
    variance = float((bread @ meat @ bread)[0, 0]) * factor
    return Mean(value=float(effect[0]), standard_error=math.sqrt(max(variance, 0.0)), df=groups - 1)


def block_bootstrap(
    sessions: Sequence[Sequence[float]], *, seed: bytes, resamples: int = RESAMPLES
) -> Bootstrap | None:
    """Return the 95 % percentile interval of the estimate under resampling.

    With several sessions, K of them are drawn with replacement (hierarchical data: Davison & Hinkley, Bootstrap
    Methods and their Application, 1997, section 3.8), and within each drawn one, as within a single one, circular
    runs of ℓ = ⌈n^(1/3)⌉ successive contrasts (Politis & Romano 1992, circular block bootstrap), cut to n. Resample r
    takes its big-endian 64-bit words from ``stream(seed, "bootstrap", r, 0)``: K for the sessions if K > 1, then for
    each of them ⌈n/ℓ⌉ starting points, each word modulo the count. The ends are the 2.5 % and 97.5 % quantiles by
    linear interpolation (type 7 of Hyndman & Fan 1996, Am. Stat. 50:361).

    Returns:
        None for a single block.
    """
    number = len(sessions)
    if number == 1 and len(sessions[0]) < 2:
        return None
    values = [np.asarray(found, dtype=np.float64) for found in sessions]
    lengths = [_run_length(len(found)) for found in values]
    longest = max(-(-len(found) // length) for found, length in zip(values, lengths, strict=True))
    drawn = np.empty(resamples)
    for resample in range(resamples):
        raw = stream(seed, "bootstrap", resample, 0, 8 * (number + number * longest))
        words = np.frombuffer(raw, dtype=">u8")
        chosen = [int(word) % number for word in words[:number]] if number > 1 else [0]
        used = number if number > 1 else 0
        means = []
        for which in chosen:
            found, length = values[which], lengths[which]
            runs = -(-len(found) // length)
            starts = (words[used : used + runs] % np.uint64(len(found))).astype(np.int64)
            used += runs
            index = (starts[:, None] + np.arange(length)).ravel()[: len(found)] % len(found)
            means.append(_trimmed_rows(found[index][None, :])[0])
        drawn[resample] = np.mean(means)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Bootstrap(
        interval=Interval(low=float(low), high=float(high)), resamples=resamples, run_lengths=tuple(lengths)
    )


def randomisation_test(
    sessions: Sequence[Sequence[Block]], *, seed: bytes, draws: int = RANDOMISATIONS
) -> Randomisation:
    """Return the two-sided p-value of no effect on any slice, from the draw of the schedule itself.

    Were protection without effect, every slice would have lasted the same under any schedule; so the schedule is
    drawn again `draws` times, each block's sequence by the two low bits of one byte of
    ``stream(seed, "randomisation", r, 0)`` in the order of the blocks, and the estimate computed each time (Fisher, The
    Design of Experiments, 1935, section 21). p = (1 + how many are at least as large in size)/(draws + 1) (Phipson &
    Smyth 2010, Stat. Appl. Genet. Mol. Biol. 9:39).

    What is tested is whether *these processes* differ: a process pair's own effect counts as one, whatever its cause.
    With several sessions a small p beside an interval that holds 0 is therefore no contradiction.

    Raises:
        ValueError: no block.
    """
    if not any(sessions):
        raise ValueError("no block to draw again")
    tables = [
        np.array([[block_contrast(way, block.step_times_ns) for way in SEQUENCES] for block in blocks])
        for blocks in sessions
        if blocks
    ]
    total = sum(map(len, tables))
    estimates = np.zeros(draws)
    at_once = max(1, _BLOCKS_AT_ONCE // total)
    for first in range(0, draws, at_once):
        rows = range(first, min(first + at_once, draws))
        seen = np.frombuffer(b"".join(stream(seed, "randomisation", r, 0, total) for r in rows), dtype=np.uint8)
        ways = (seen & 3).reshape(len(rows), total)
        column = 0
        for table in tables:
            chosen = table[np.arange(len(table)), ways[:, column : column + len(table)]]
            estimates[rows.start : rows.stop] += _trimmed_rows(chosen)
            column += len(table)
    actual = math.fsum(
        trimmed_mean([block_contrast(block.sequence, block.step_times_ns) for block in blocks])
        for blocks in sessions
        if blocks
    )
    # A schedule that gives the same estimate up to rounding counts as at least as large.
    extreme = int(np.count_nonzero(np.abs(estimates) >= abs(actual) * (1 - 1e-9)))
    return Randomisation(p=(1 + extreme) / (draws + 1), draws=draws)


def launch_effect(sessions: Sequence[Session]) -> Mean | None:
    """Return half of the mean of raw-first sessions less that of protected-first ones; Welch's standard error.

    The degrees of freedom are Satterthwaite's (Welch 1947, Biometrika 34:28). None with fewer than two sessions of
    either kind.
    """
    found: dict[Arm, list[float]] = {Arm.RAW: [], Arm.PROTECTED: []}
    for session in sessions:
        if session.included:
            found[session.launched_first].append(trimmed_mean(contrasts(session.blocks)))
    if min(map(len, found.values())) < 2:
        return None
    raw, protected = mean_of(found[Arm.RAW]), mean_of(found[Arm.PROTECTED])
    parts = (raw.standard_error**2, protected.standard_error**2)
    below = parts[0] ** 2 / raw.df + parts[1] ** 2 / protected.df
    return Mean(
        value=(raw.value - protected.value) / 2,
        standard_error=math.sqrt(sum(parts)) / 2,
        df=sum(parts) ** 2 / below if below else raw.df + protected.df,
    )


def _centred(block: Block, *, carryover: bool) -> tuple[_Floats, _Floats]:
    """Return the regressors and the log times of one block, each less its mean over the block."""
    arms = block.sequence
    columns = [[float(arm == "P") for arm in arms]]
    columns += [[float(position == which) for position in range(len(arms))] for which in range(1, len(arms))]
    if carryover:
        columns.append([0.0, *(0.5 if arm == "P" else -0.5 for arm in arms[:-1])])
    x = np.array(columns).T
    y = np.log(np.array(block.step_times_ns))
    return x - x.mean(axis=0), y - y.mean()


def _trimmed_rows(values: _Floats) -> _Floats:
    """Return `trimmed_mean` of each row."""
    number = values.shape[1]
    cut = math.floor(TRIM * number + 1e-9)
    kept = np.sort(values, axis=1)[:, cut : number - cut]
    return np.asarray(kept.mean(axis=1))


def _run_length(number: int) -> int:
    length = 1
    while length**3 < number:
        length += 1
    return length


def _mean_json(mean: Mean | None) -> Json:
    if mean is None:
        return None
    return {
        "df": decimal(mean.df),
        "interval_95": mean.interval(0.95).to_json(),
        "standard_error": decimal(mean.standard_error),
        "value": decimal(mean.value),
    }
