"""From sessions to a number, its interval and one word."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from glasshouse.errors import UsageError
from glasshouse_bench.calibration import calibrate
from glasshouse_bench.claim import Word, claim, job_costs
from glasshouse_bench.estimate import estimate, welch
from glasshouse_bench.sensitivity import sensitivity, trimmed_contrast
from glasshouse_bench.sessions import Blocks

MS = 1_000_000
SEED = bytes(32)


def around(mean: float, deviation: float, sessions: int = 20) -> list[float]:
    """Contrasts with exactly this mean and deviation, and no trend."""
    half = [(-1) ** k * (1 + (k * 7) % 5) for k in range(sessions // 2)]
    values = np.array([*half, *(-one for one in reversed(half))], dtype=float)
    return list(mean + values * deviation / values.std(ddof=1))


def test_the_interval_is_students_over_sessions() -> None:
    values = around(0.01, 0.02)
    found = estimate(values)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    interval = found.interval()
    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))
    assert found.log_ratio == pytest.approx(0.01)


def test_one_session_has_no_interval_and_claims_nothing() -> None:
    found = estimate([0.01])
    assert found.interval() is None
    assert found.minimum_detectable is None
    assert claim(found, margin=0.01).word is Word.INCONCLUSIVE


@pytest.mark.parametrize("values", [[], [math.nan], [0.1, math.inf]])
def test_nothing_follows_from_no_numbers(values: list[float]) -> None:
    with pytest.raises(ValueError, match="finite contrast"):
        estimate(values)


@pytest.mark.parametrize(("df", "factor"), [(2, 5.6535), (11, 3.0784), (100_000, 2.8016)])
def test_the_least_effect_that_is_seen_is_that_of_the_noncentral_t(df: int, factor: float) -> None:
    error = 0.001
    spread = np.zeros(df + 1)
    spread[:2] = 1, -1
    found = estimate(list(spread / spread.std(ddof=1) * error * math.sqrt(df + 1)))
    assert found.minimum_detectable == pytest.approx(factor * error, rel=1e-3)
    if df < 100:
        critical = stats.t.ppf(0.975, df)
        power = stats.nct.sf(critical, df, factor) + stats.nct.cdf(-critical, df, factor)
        assert power == pytest.approx(0.8, abs=1e-3)


def test_the_background_is_added_to_the_upper_end_alone() -> None:
    values = around(0.002, 0.001)
    bare, whole = estimate(values).interval(), estimate(values, background=0.0018).interval()
    assert bare is not None
    assert whole is not None
    assert whole.low == bare.low
    assert math.exp(whole.high) == pytest.approx(math.exp(bare.high) * 1.0018)


def test_what_overruns_may_have_added_is_taken_from_the_lower_end_and_what_they_took_is_given_to_the_upper() -> None:
    values = around(0.01, 0.001)
    bare = estimate(values).interval()
    more, less = (estimate(values, contention=[amount, 0.001] * 10).interval() for amount in (0.005, -0.009))
    assert bare is not None
    assert more is not None
    assert less is not None
    assert (more.low, more.high) == pytest.approx((bare.low - 0.003, bare.high))
    assert (less.low, less.high) == pytest.approx((bare.low, bare.high + 0.004))
    assert claim(estimate(values, contention=[0.02] * 20), margin=0.05).word is Word.EQUIVALENT
    assert claim(estimate(values, contention=[0.02] * 20), margin=0.005).word is Word.INCONCLUSIVE
    with pytest.raises(ValueError, match="contention"):
        estimate(values, contention=[0.0] * 19)


def test_a_widened_interval_is_wider_by_its_factor_and_by_nothing_else() -> None:
    values = around(0.0, 0.01)
    narrow, wide = estimate(values).interval(), estimate(values, widening=1.1).interval()
    assert narrow is not None
    assert wide is not None
    assert wide.high == pytest.approx(1.1 * narrow.high)
    with pytest.raises(ValueError, match="widening"):
        estimate(values, widening=0.9)


@pytest.mark.parametrize(
    ("mean", "deviation", "background", "null", "word"),
    [
        (0.001, 0.005, 0.0, False, Word.EQUIVALENT),
        (0.004, 0.005, 0.0, False, Word.EQUIVALENT),  # above 0, and inside the margin all the same
        (0.001, 0.005, 0.02, False, Word.INCONCLUSIVE),  # the background alone exceeds the margin
        (0.020, 0.005, 0.0, False, Word.OVERHEAD),
        (0.020, 0.005, 0.0, True, Word.BIAS_SUSPECTED),
        (-0.020, 0.005, 0.0, False, Word.BIAS_SUSPECTED),
        (-0.004, 0.005, 0.01, False, Word.BIAS_SUSPECTED),  # the background hides no bias
        (0.001, 0.100, 0.0, False, Word.INCONCLUSIVE),
    ],
)
def test_the_word(mean: float, deviation: float, background: float, null: bool, word: Word) -> None:
    assert claim(estimate(around(mean, deviation), background=background), margin=0.01, null=null).word is word


def test_no_word_is_faster() -> None:
    assert {word.value for word in Word} == {"equivalent", "overhead", "inconclusive", "bias_suspected"}


def test_equivalence_is_two_one_sided_tests_at_the_margin() -> None:
    values = around(0.002, 0.01)
    found = claim(estimate(values), margin=0.01)
    lower = stats.ttest_1samp(values, -0.01, alternative="greater").pvalue
    upper = stats.ttest_1samp(values, 0.01, alternative="less").pvalue
    assert found.tost_p == pytest.approx(max(lower, upper))


def test_what_is_not_steady_is_not_equivalent() -> None:
    values = list(np.linspace(-0.002, 0.002, 20))
    found = estimate(values)
    assert found.steady_p is not None
    assert found.steady_p == pytest.approx(stats.ttest_ind(values[:6], values[-6:], equal_var=False).pvalue)
    assert not found.steady
    assert claim(found, margin=0.01).word is Word.INCONCLUSIVE


def test_too_few_sessions_to_look_for_a_trend_are_not_steady() -> None:
    found = estimate([0.0, 0.0001, -0.0001, 0.0, 0.0])
    assert found.steady_p is None
    assert claim(found, margin=0.01).word is Word.INCONCLUSIVE


def test_two_samples_without_spread_are_told_apart() -> None:
    assert welch(np.zeros(3), np.zeros(3)) == 1
    assert welch(np.zeros(3), np.ones(3)) == 0


def test_a_short_job_pays_for_the_lifecycle_and_a_long_one_for_the_steps() -> None:
    found = estimate(around(math.log(1.01), 0.002), background=0.0018)
    quarter, hour, day = job_costs(found, [8.0, 10.0, 12.0])
    assert [one.seconds for one in (quarter, hour, day)] == [900, 3600, 86400]
    assert quarter.relative == pytest.approx(0.01 + 10 / 900)
    assert hour.protected_s == pytest.approx(3600 * 1.01 + 10)
    assert day.interval is not None
    assert day.interval.low < day.relative < day.interval.high
    assert job_costs(found, [8.0])[0].interval is None


# sensitivity


def blocks(protected_ns: list[int], raw_ns: int = 100 * MS) -> Blocks:
    time_ns = np.array([[raw_ns, one] for one in protected_ns])
    tens = np.full_like(time_ns, 10)
    return Blocks(time_ns=time_ns, steps=tens, beside_ns=0 * tens, cpu_ns=2 * time_ns, all_steps=tens + 2)


def test_trimming_deletes_bunched_cost_and_says_so_beside_the_result() -> None:
    bunched = blocks([200 * MS, *[100 * MS] * 19])
    assert trimmed_contrast(bunched) == 0
    assert bunched.contrast == pytest.approx(math.log(1.05))


def test_the_randomisation_test_sees_a_difference_and_not_its_absence() -> None:
    noise = [(98 + (k * 13) % 5) * MS for k in range(40)]
    alike = [blocks(noise) for _ in range(3)]
    apart = [blocks([one + 8 * MS for one in noise]) for _ in range(3)]
    assert sensitivity(alike, seed=SEED).randomisation_p > 0.1
    assert sensitivity(apart, seed=SEED).randomisation_p == 1 / 2000
    assert sensitivity(alike, seed=SEED) == sensitivity(alike, seed=SEED)


def test_blocks_of_no_processor_time_have_no_contrast_of_it() -> None:
    found = blocks([100 * MS] * 4)
    idle = dataclasses.replace(found, cpu_ns=0 * found.cpu_ns)
    assert sensitivity([found, idle], seed=SEED).processor is None


def test_a_session_without_a_whole_block_has_no_trimmed_contrast() -> None:
    found = blocks([100 * MS] * 4)
    none = dataclasses.replace(found, steps=found.steps * [0, 1])
    assert trimmed_contrast(none) is None


# calibration


def lengths(step_ms: float, number: int = 100) -> list[int]:
    return [round(step_ms * MS * (0.9 + 0.2 * k / (number - 1))) for k in range(number)]


@pytest.mark.parametrize(("step_ms", "steps"), [(2, 5), (9, 5), (12, 3), (45, 3), (60, 1)])
def test_shorter_steps_share_a_slot(step_ms: float, steps: int) -> None:
    found = calibrate(lengths(step_ms / 2), lengths(step_ms), start_s=3, between=0.02)
    assert found.steps == steps
    assert found.slot_ns == pytest.approx((steps + 1) * 1.2 * step_ms * MS * 1.09, rel=1e-3)


def test_a_gpu_gets_longer_slots_and_two_uncounted_steps() -> None:
    found = calibrate(lengths(60), lengths(60), start_s=3, between=0.02, device=True)
    assert (found.steps, found.uncounted) == (5, 2)
    assert calibrate(lengths(1), lengths(1), start_s=3, between=0.02, device=True).slot_ns == 250 * MS


@pytest.mark.parametrize(("between", "seconds"), [(0.05, 5), (0.0, 30), (1e-6, 30)])
def test_sessions_are_short_where_the_pair_is_the_noise_and_long_where_the_step_is(
    between: float, seconds: float
) -> None:
    assert calibrate(lengths(8), lengths(8), start_s=4, between=between).session_ns == seconds * 10**9


def test_the_length_of_a_session_weighs_its_start_against_both_variances() -> None:
    # Deviation/mean of these steps is 0.0583: each second of a session leaves a variance of 4·0.0583²·8 ms.
    found = calibrate(lengths(8), lengths(8), start_s=9, between=0.003)
    assert found.session_ns / 1e9 == pytest.approx(3 * math.sqrt(4 * 0.0583**2 * 0.008) / 0.003, rel=0.01)


def test_steps_that_no_slot_holds_are_refused_with_a_way_on() -> None:
    with pytest.raises(UsageError, match="no session holds") as refused:
        calibrate(lengths(700), lengths(700), start_s=3, between=0.02)
    assert "alternating" in refused.value.hint
    with pytest.raises(UsageError, match="fewer than 20 steps"):
        calibrate(lengths(10), lengths(10, 19), start_s=3, between=0.02)
