"""The estimator on cases small enough to do by hand, and the one word that it allows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glasshouse.bench.overhead.combine import job_costs
from glasshouse.bench.overhead.design import SEQUENCES, Arm
from glasshouse.bench.overhead.estimate import Estimate, Unit, Word, block_contrast, claim, estimate
from glasshouse.bench.overhead.interval import (
    Interval,
    Mean,
    decimal,
    detectable,
    mean_of,
    t_quantile,
    trimmed_mean,
    trimmed_mean_of,
)
from glasshouse.bench.overhead.sequential import ONE_ORDER, SINGLE, Pair, sequential

TIMES = st.lists(st.floats(1.0, 1e9), min_size=4, max_size=4)
VALUES = st.lists(st.floats(-1, 1), min_size=1, max_size=40)


def test_a_contrast_by_hand() -> None:
    times = [math.exp(0.1), math.exp(0.4), math.exp(0.3), math.exp(0.2)]
    assert block_contrast("RPPR", times) == pytest.approx((0.4 + 0.3 - 0.1 - 0.2) / 2)
    assert block_contrast("PPRR", times) == pytest.approx((0.1 + 0.4 - 0.3 - 0.2) / 2)
    assert block_contrast("RP", [2.0, 3.0]) == pytest.approx(math.log(1.5))


@pytest.mark.parametrize(("sequence", "bias"), [("RPPR", 0), ("PRRP", 0), ("RRPP", 2), ("PPRR", -2)])
def test_a_linear_drift_cancels_or_has_a_sign_that_was_drawn(sequence: str, bias: int) -> None:
    times = [math.exp(0.01 * position) for position in range(4)]
    assert block_contrast(sequence, times) == pytest.approx(0.01 * bias, abs=1e-12)


@given(st.sampled_from(SEQUENCES), TIMES)
def test_relabelling_the_arms_turns_the_sign(sequence: str, times: list[float]) -> None:
    swapped = sequence.translate(str.maketrans("RP", "PR"))
    assert block_contrast(swapped, times) == -block_contrast(sequence, times)


@given(st.sampled_from(SEQUENCES), TIMES, st.floats(1e-3, 1e3))
def test_a_factor_on_all_times_changes_nothing(sequence: str, times: list[float], factor: float) -> None:
    scaled = [time * factor for time in times]
    assert block_contrast(sequence, scaled) == pytest.approx(block_contrast(sequence, times), abs=1e-9)


def test_means_by_hand() -> None:
    found = mean_of([1.0, 2.0, 3.0])
    assert (found.value, found.df) == (2.0, 2)
    assert found.standard_error == pytest.approx(1 / math.sqrt(3))
    # t(0.975, 2) = 4.302653 in any table.
    assert found.interval(0.95).low == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-6)
    assert t_quantile(0.975, 11) == pytest.approx(2.200985, abs=1e-6)
    with pytest.raises(ValueError, match="1 values"):
        mean_of([1.0])


def test_trimmed_means_by_hand() -> None:
    values = [100.0, 0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert trimmed_mean(values) == 4.5
    assert trimmed_mean(values[:9]) == pytest.approx(sum(values[:9]) / 9)
    found = trimmed_mean_of(values)
    # Winsorised: 1,1,2,…,7,8,8; its squares about 4.5 sum to 66.5.
    assert found.standard_error == pytest.approx(math.sqrt(66.5 / 9 / 10) / 0.8)
    assert (found.value, found.df) == (4.5, 7)
    assert trimmed_mean_of(values[:9]) == mean_of(sorted(values[:9]))
    with pytest.raises(ValueError, match="nothing"):
        trimmed_mean([])


@given(VALUES)
def test_a_trimmed_mean_stays_within_its_values_and_turns_with_them(values: list[float]) -> None:
    found = trimmed_mean(values)
    assert min(values) - 1e-12 <= found <= max(values) + 1e-12
    assert trimmed_mean([-value for value in values]) == pytest.approx(-found, abs=1e-12)


def test_the_smallest_effect_that_could_be_seen() -> None:
    # Many degrees of freedom: 1.959964 + 0.841621. Five: 3.5139, solved once with another library's noncentral t.
    assert detectable(Mean(value=0, standard_error=1, df=10**6)) == pytest.approx(2.801585, abs=1e-5)
    assert detectable(Mean(value=0, standard_error=2, df=5)) == pytest.approx(2 * 3.513903, abs=1e-5)


@pytest.mark.parametrize("df", [1, 3, 11])
def test_an_effect_of_that_size_is_seen_four_times_in_five(df: int) -> None:
    rng = np.random.default_rng(df)
    effect = detectable(Mean(value=0, standard_error=1, df=df))
    seen = np.abs((rng.normal(effect, 1, 40_000)) / np.sqrt(rng.chisquare(df, 40_000) / df)) > t_quantile(0.975, df)
    assert seen.mean() == pytest.approx(0.8, abs=0.01)


def test_several_sessions_by_hand() -> None:
    found = estimate([[0.01, 0.03], [0.04], [0.05, 0.07]])
    assert found.session_means == pytest.approx((0.02, 0.04, 0.06))
    assert found.log_ratio == pytest.approx(0.04)
    assert (found.unit, found.sessions, found.blocks, found.label) == (Unit.SESSION, 3, 5, "")
    assert found.mean is not None
    assert (found.mean.standard_error, found.mean.df) == (pytest.approx(0.02 / math.sqrt(3)), 2)
    assert found.slowdown == pytest.approx(math.exp(0.04) - 1)
    assert found.throughput_loss == pytest.approx(1 - math.exp(-0.04))
    low_high = found.throughput_loss_interval()
    wide = found.interval()
    assert low_high is not None
    assert wide is not None
    assert low_high.low == pytest.approx(1 - math.exp(-wide.low))
    assert low_high.high == pytest.approx(1 - math.exp(-wide.high))


def test_one_session_is_conditional_on_its_process_pair() -> None:
    found = estimate([[0.01, 0.02, 0.03]])
    assert (found.unit, found.label) == (Unit.BLOCK, "conditional on one process pair")
    assert found.mean == mean_of([0.01, 0.02, 0.03])


def test_one_block_has_no_interval_and_no_claim() -> None:
    found = estimate([[0.5]])
    assert (found.mean, found.interval(), found.minimum_detectable) == (None, None, None)
    assert "no interval" in found.label
    assert claim(found, margin=0.005).word is Word.INCONCLUSIVE
    assert found.to_json()["interval_95"] is None
    with pytest.raises(ValueError, match="no session"):
        estimate([])


@given(st.lists(VALUES, min_size=1, max_size=6))
def test_turning_all_contrasts_turns_the_estimate(sessions: list[list[float]]) -> None:
    found, turned = estimate(sessions), estimate([[-value for value in values] for values in sessions])
    assert turned.log_ratio == pytest.approx(-found.log_ratio, abs=1e-12)
    if found.mean is not None and turned.mean is not None:
        assert turned.mean.standard_error == pytest.approx(found.mean.standard_error, abs=1e-12)


def _found(value: float, error: float, df: int = 11) -> Estimate:
    return Estimate(
        log_ratio=value,
        mean=Mean(value=value, standard_error=error, df=df),
        unit=Unit.SESSION,
        sessions=df + 1,
        blocks=240,
        session_means=(),
        label="",
    )


@pytest.mark.parametrize(
    ("value", "error", "word", "null_word"),
    [
        (0.0, 0.001, Word.EQUIVALENT, Word.EQUIVALENT),
        (0.002, 0.0005, Word.EQUIVALENT, Word.BIAS_SUSPECTED),
        (0.02, 0.001, Word.OVERHEAD, Word.BIAS_SUSPECTED),
        (0.006, 0.001, Word.OVERHEAD, Word.BIAS_SUSPECTED),
        (0.004, 0.003, Word.INCONCLUSIVE, Word.INCONCLUSIVE),
        (0.0, 0.01, Word.INCONCLUSIVE, Word.INCONCLUSIVE),
        (-0.02, 0.01, Word.INCONCLUSIVE, Word.INCONCLUSIVE),
        (-0.02, 0.001, Word.BIAS_SUSPECTED, Word.BIAS_SUSPECTED),
        (-0.002, 0.0005, Word.BIAS_SUSPECTED, Word.BIAS_SUSPECTED),
    ],
)
def test_the_words(value: float, error: float, word: Word, null_word: Word) -> None:
    assert claim(_found(value, error), margin=0.005).word is word
    assert claim(_found(value, error), margin=0.005, null=True).word is null_word


def test_a_measurement_that_never_became_steady_is_not_equivalent() -> None:
    for value, error, word in ((0.0, 0.001, Word.INCONCLUSIVE), (0.002, 0.0005, Word.OVERHEAD)):
        assert claim(_found(value, error), margin=0.005).word is Word.EQUIVALENT
        assert claim(_found(value, error), margin=0.005, steady=False).word is word


@given(st.floats(-0.02, 0.02), st.floats(1e-6, 0.02), st.integers(1, 40))
def test_equivalence_is_two_one_sided_tests(value: float, error: float, df: int) -> None:
    found = claim(_found(value, error, df), margin=0.005)
    assert found.tost_p is not None
    if found.word is Word.EQUIVALENT:
        assert found.tost_p < 0.05 + 1e-12
    elif found.word is not Word.BIAS_SUSPECTED:
        assert found.tost_p >= 0.05 - 1e-12


def test_no_word_says_faster() -> None:
    assert [word.value for word in Word] == ["equivalent", "overhead", "inconclusive", "bias_suspected"]


def test_what_jobs_of_three_lengths_cost() -> None:
    found = _found(math.log(1.01), 0.0)
    quarter, hour, day = job_costs(found, once_s=9.0)
    assert (quarter.duration_s, hour.duration_s, day.duration_s) == (900, 3600, 86400)
    assert quarter.extra_s == pytest.approx(9 + 9)
    assert quarter.relative == pytest.approx(0.01 + 0.01)
    assert hour.relative == pytest.approx(0.01 + 0.0025)
    assert day.interval is not None
    assert day.interval.low == pytest.approx(0.01 + 9 / 86400)
    wide = job_costs(found, once_s=9.0, once_interval=Interval(low=0, high=18))[0].interval
    assert wide is not None
    assert (wide.low, wide.high) == (pytest.approx(0.01), pytest.approx(0.03))
    assert job_costs(found, once_s=-9.0)[0].relative == pytest.approx(0), "a noisy F is used as it is"


def test_one_sequential_unit_by_hand() -> None:
    found = sequential([Pair(first=Arm.RAW, log_ratio=0.05), Pair(first=Arm.PROTECTED, log_ratio=-0.01)])
    assert (found.log_ratio, found.order_effect) == (pytest.approx(0.02), pytest.approx(0.03))
    assert (found.interval(), found.units, found.label) == (None, 1, SINGLE)


def test_one_pair_in_one_order_says_both() -> None:
    found = sequential([Pair(first=Arm.PROTECTED, log_ratio=-0.03)])
    assert (found.log_ratio, found.order_effect, found.interval()) == (-0.03, None, None)
    assert found.label == f"{SINGLE}; {ONE_ORDER}"


def test_two_sequential_units_have_an_interval_and_a_left_over_pair_is_counted() -> None:
    ratios = [(Arm.RAW, 0.05), (Arm.PROTECTED, -0.01), (Arm.RAW, 0.07), (Arm.PROTECTED, 0.01), (Arm.RAW, 0.5)]
    found = sequential([Pair(first=first, log_ratio=value) for first, value in ratios])
    assert (found.units, found.unpaired, found.label) == (2, 1, "")
    assert found.mean == mean_of([0.02, 0.04])
    assert found.order_effect == pytest.approx(0.03)
    with pytest.raises(ValueError, match="no pair"):
        sequential([])


def test_numbers_are_written_in_one_way() -> None:
    assert decimal(0.00123456789012345) == "1.23456789012e-03"
    assert decimal(-0.0) == decimal(0.0) == "0.00000000000e+00"
    with pytest.raises(ValueError, match="nan"):
        decimal(math.nan)
