"""The steady-state cost δ from interleaved blocks, and the one word that may be said about it.

The block contrast estimates ln(T_protected / T_raw), the log ratio L; from it follow the slowdown
δ = e^L − 1 of `T_protected(D) = F + (1 + δ)·D` and the throughput loss 1 − X_p/X_r = 1 − e^(−L). Both are
increasing in L, so that the ends of an interval carry over.

A process pair has an effect of its own (memory layout, placement: Mytkowicz et al., ASPLOS 2009), and blocks of
one pair say nothing about it: with two or more usable sessions the session is the unit of the interval, as in
Kalibera & Jones, "Rigorous benchmarking in reasonable time" (ISMM 2013). With one, the interval is conditional on
that process pair and says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum

from glasshouse.bench.overhead.blocks import Block, Session
from glasshouse.bench.overhead.design import Design
from glasshouse.bench.overhead.interval import (
    Interval,
    Mean,
    decimal,
    detectable,
    mean_of,
    t_tail,
    trimmed_mean,
    trimmed_mean_of,
)
from glasshouse.wire.canonical import Json

__all__ = ["CONDITIONAL", "Claim", "Estimate", "Unit", "Word", "block_contrast", "claim", "contrasts", "estimate"]

CONDITIONAL = "conditional on one process pair"
NO_INTERVAL = "one block, no interval"


class Unit(StrEnum):
    """What the interval takes as independent."""

    SESSION = "session"
    BLOCK = "block"


class Word(StrEnum):
    """The whole of what is claimed; a speed-up is not among the possible answers."""

    EQUIVALENT = "equivalent"
    OVERHEAD = "overhead"
    INCONCLUSIVE = "inconclusive"
    BIAS_SUSPECTED = "bias_suspected"


@dataclass(frozen=True, slots=True)
class Estimate:
    """The log ratio protected/raw with everything that is said beside it.

    Args:
        log_ratio: L.
        mean: L with its standard error and degrees of freedom; None where a single block leaves no spread.
        unit: what the interval is made of.
        sessions, blocks: how many of each are in it.
        session_means: the trimmed mean of each usable session, in order.
        label: what a reader has to know with the number, or empty.
    """

    _: KW_ONLY
    log_ratio: float
    mean: Mean | None
    unit: Unit
    sessions: int
    blocks: int
    session_means: tuple[float, ...]
    label: str

    def interval(self, level: float = 0.95) -> Interval | None:
        """Return the interval for L."""
        return None if self.mean is None else self.mean.interval(level)

    @property
    def minimum_detectable(self) -> float | None:
        """The log ratio that this run would have seen with 80 % power."""
        return None if self.mean is None else detectable(self.mean)

    @property
    def slowdown(self) -> float:
        """δ: how much longer a step takes, e^L − 1."""
        return math.expm1(self.log_ratio)

    @property
    def throughput_loss(self) -> float:
        """1 − X_p/X_r = 1 − e^(−L)."""
        return -math.expm1(-self.log_ratio)

    def slowdown_interval(self, level: float = 0.95) -> Interval | None:
        found = self.interval(level)
        return None if found is None else Interval(low=math.expm1(found.low), high=math.expm1(found.high))

    def throughput_loss_interval(self, level: float = 0.95) -> Interval | None:
        found = self.interval(level)
        return None if found is None else Interval(low=-math.expm1(-found.low), high=-math.expm1(-found.high))

    def to_json(self) -> dict[str, Json]:
        """Return the numbers as decimal strings (spec/overhead-artifact.md section 5)."""
        return {
            "blocks": self.blocks,
            "df": None if self.mean is None else decimal(self.mean.df),
            "interval_90": _json(self.interval(0.90)),
            "interval_95": _json(self.interval(0.95)),
            "label": self.label,
            "log_ratio": decimal(self.log_ratio),
            "minimum_detectable": None if self.mean is None else decimal(detectable(self.mean)),
            "session_means": [decimal(value) for value in self.session_means],
            "sessions": self.sessions,
            "slowdown": decimal(self.slowdown),
            "slowdown_95": _json(self.slowdown_interval()),
            "standard_error": None if self.mean is None else decimal(self.mean.standard_error),
            "throughput_loss": decimal(self.throughput_loss),
            "throughput_loss_95": _json(self.throughput_loss_interval()),
            "unit": self.unit.value,
        }


@dataclass(frozen=True, slots=True)
class Claim:
    """One word, and the test behind it.

    Args:
        word: what may be said.
        margin: the equivalence margin on the log ratio.
        tost_p: the larger p-value of the two one-sided tests; None without an interval.
        null: whether both arms were raw.
    """

    _: KW_ONLY
    word: Word
    margin: float
    tost_p: float | None
    null: bool

    def to_json(self) -> dict[str, Json]:
        return {
            "margin": decimal(self.margin),
            "null": self.null,
            "tost_p": None if self.tost_p is None else decimal(self.tost_p),
            "word": self.word.value,
        }


def block_contrast(sequence: str, step_times_ns: Sequence[float]) -> float:
    """Return ½·Σ(±ln t), + for P and − for R: an estimate of ln(T_p/T_r) from two slices of each arm.

    A factor that is common to the block cancels, and in RPPR and PRRP so does a linear drift (a
    counterbalanced order).
    """
    signed = [
        math.log(time_ns) if arm == "P" else -math.log(time_ns)
        for arm, time_ns in zip(sequence, step_times_ns, strict=True)
    ]
    return 2 * math.fsum(signed) / len(signed)


def contrasts(blocks: Sequence[Block]) -> list[float]:
    """Return the contrast of each block that counts, in order."""
    return [block_contrast(block.sequence, block.step_times_ns) for block in blocks if block.included]


def usable(design: Design, sessions: Sequence[Session]) -> tuple[Session, ...]:
    """Return the sessions that enter the estimate.

    Those in which at least half of the planned blocks count, so that a session that broke off does not
    weigh as much as a whole one; where there is none, the one with the most (the first of them), if any counts.
    """
    enough = tuple(one for one in sessions if 2 * len(one.included) >= design.blocks_per_session)
    if enough:
        return enough
    fullest = max(sessions, key=lambda one: len(one.included), default=None)
    return (fullest,) if fullest is not None and fullest.included else ()


def estimate(sessions: Sequence[Sequence[float]]) -> Estimate:
    """Return the overall estimate from the block contrasts of each usable session.

    Each session gives its 10 % trimmed mean. Two or more sessions: their plain mean, t with K − 1 degrees of freedom.
    One session: its trimmed mean with the interval of `trimmed_mean_of`, conditional on that process pair.

    Raises:
        ValueError: no session, or one without a block.
    """
    means = tuple(trimmed_mean(found) for found in sessions)
    if not means:
        raise ValueError("no session to estimate from")
    mean: Mean | None = None
    if len(means) > 1:
        mean = mean_of(means)
    elif len(sessions[0]) > 1:
        mean = trimmed_mean_of(sessions[0])
    single = CONDITIONAL if mean is not None else f"{CONDITIONAL}; {NO_INTERVAL}"
    return Estimate(
        log_ratio=means[0] if mean is None else mean.value,
        mean=mean,
        unit=Unit.SESSION if len(means) > 1 else Unit.BLOCK,
        sessions=len(means),
        blocks=sum(map(len, sessions)),
        session_means=means,
        label="" if len(means) > 1 else single,
    )


def claim(found: Estimate, *, margin: float, null: bool = False, steady: bool = True) -> Claim:
    """Return the one word for an estimate.

    In this order: the 95 % interval wholly below 0 is `bias_suspected`, because protection saves no time (in a null
    run, an interval wholly above 0 is so too); the 90 % interval inside ±margin is `equivalent`, which is two one-sided
    tests at 5 % (Schuirmann 1987, J. Pharmacokinet. Biopharm. 15:657), unless a session never became steady; the 95 %
    interval wholly above 0 is `overhead`; all else is `inconclusive`.

    Args:
        found: the estimate.
        margin: on the log ratio, above 0.
        null: both arms were raw.
        steady: every session that counts ended its warm-up by becoming steady.
    """
    if found.mean is None:
        return Claim(word=Word.INCONCLUSIVE, margin=margin, tost_p=None, null=null)
    wide, narrow = found.mean.interval(0.95), found.mean.interval(0.90)
    if wide.high < 0 or (null and wide.low > 0):
        word = Word.BIAS_SUSPECTED
    elif steady and -margin < narrow.low and narrow.high < margin:
        word = Word.EQUIVALENT
    elif wide.low > 0:
        word = Word.OVERHEAD
    else:
        word = Word.INCONCLUSIVE
    return Claim(word=word, margin=margin, tost_p=_tost(found.mean, margin), null=null)


def _tost(mean: Mean, margin: float) -> float:
    if not mean.standard_error:
        return 0.0 if abs(mean.value) < margin else 1.0
    return max(
        t_tail((mean.value + margin) / mean.standard_error, mean.df),
        t_tail((margin - mean.value) / mean.standard_error, mean.df),
    )


def _json(interval: Interval | None) -> Json:
    return None if interval is None else interval.to_json()
