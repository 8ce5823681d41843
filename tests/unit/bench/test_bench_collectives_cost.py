"""The cost model finds prices that were planted, says how far off it is, and forecasts what follows from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from glasshouse.bench.collectives.cost import Prices, fit
from glasshouse.bench.collectives.forecast import RANKS, Bound, Cluster, Job, exchange, forecast, forecasts
from glasshouse.bench.collectives.values import Way
from glasshouse.bench.collectives.work import one_shot, work
from glasshouse.errors import UsageError
from simulators.collectives_measured import PRICES, RATES, SIZES, points

MIB = 1 << 20
FAST = Cluster(link_bytes_per_s=12.5e9)
JOB = Job(name="a model", bucket_bytes=(MIB, *[25 * MIB] * 20), compute_s=0.5)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64])
def test_direct_does_less_cryptography_than_a_ring_and_sends_as_much(ranks: int) -> None:
    size = ranks << 20
    direct, ring = (work(way, bytes_=size, ranks=ranks) for way in (Way.DIRECT, Way.RING))
    assert direct.crypto_bytes == pytest.approx((3 * ranks - 2) / ranks * size)
    assert ring.crypto_bytes == pytest.approx(4 * (ranks - 1) / ranks * size)
    assert direct.wire_bytes == ring.wire_bytes == work(Way.RAW, bytes_=size, ranks=ranks).wire_bytes
    assert direct.crypto_bytes <= ring.crypto_bytes
    assert (direct.steps, ring.steps) == (2, 2 * (ranks - 1))


def test_plain_is_the_chosen_way_without_its_cryptography_and_gloo_has_none() -> None:
    for ranks in (2, 4, 8):
        sealed, plain = (work(way, bytes_=MIB, ranks=ranks) for way in (Way.SEALED, Way.PLAIN))
        assert plain == replace(sealed, crypto_bytes=0.0, calls=0)
        assert work(Way.RAW, bytes_=MIB, ranks=ranks).calls == 0
    assert not one_shot(Way.DIRECT, bytes_=1, ranks=8)
    assert one_shot(Way.SEALED, bytes_=1, ranks=8)


def test_what_exchanges_nothing_has_no_work() -> None:
    with pytest.raises(ValueError, match="1 ranks"):
        work(Way.RING, bytes_=MIB, ranks=1)
    with pytest.raises(ValueError, match="without communication"):
        work(Way.ALONE, bytes_=MIB, ranks=2)


def test_planted_prices_predict_sizes_that_the_fit_has_not_seen() -> None:
    found = fit(points())
    assert found.prices.keys() == PRICES.keys()
    assert len(found.held_out) == len(SIZES) * 2 * len(PRICES)
    assert found.worst_error < 0.02
    crypto = found.prices[Way.DIRECT].crypto_s_per_byte
    assert crypto == pytest.approx(0.06e-9, rel=0.05)
    assert found.prices[Way.PLAIN].crypto_s_per_byte == 0


def test_noise_shows_in_the_errors_and_a_wrong_point_shows_as_the_worst() -> None:
    noisy = fit(points(noise=0.1))
    assert 0.005 < noisy.median_error < 0.15
    wrong = points(noise=0.01)
    wrong[3] = replace(wrong[3], seconds=10 * wrong[3].seconds)
    found = fit(wrong)
    assert found.worst_error > 0.5
    assert max(found.held_out, key=lambda one: abs(one.error)).point.bytes == wrong[3].bytes


def test_a_price_is_never_negative_even_where_sealed_was_measured_faster_than_plain() -> None:
    faster = [replace(point, seconds=point.seconds * (0.5 if point.way is Way.NETWORK else 1)) for point in points()]
    for price in fit(faster).prices.values():
        assert min(price.operation_s, price.step_s, price.message_s, price.wire_s_per_byte) >= 0
        assert price.crypto_s_per_byte >= 0
    with pytest.raises(ValueError, match="a price"):
        Prices(operation_s=-1.0, step_s=0.0, message_s=0.0, crypto_s_per_byte=0.0, **RATES)


def test_too_few_sizes_give_no_model() -> None:
    with pytest.raises(UsageError, match="at least 3 sizes"):
        fit(points(sizes=(MIB, 2 * MIB)))


def test_a_pipelined_exchange_overlaps_link_and_processor_and_a_serial_one_adds_them_up() -> None:
    found = work(Way.DIRECT, bytes_=25 * MIB, ranks=8)
    overlapped, terms = exchange(PRICES[Way.DIRECT], found, FAST, pipelined=True)
    added, _ = exchange(PRICES[Way.DIRECT], found, FAST, pipelined=False)
    assert added == pytest.approx(sum(terms.values()))
    assert max(terms[Bound.LINK], terms[Bound.CRYPTO]) < overlapped < added


def test_cryptography_beside_the_processor_hides_behind_the_link() -> None:
    found = work(Way.DIRECT, bytes_=25 * MIB, ranks=8)
    beside = replace(FAST, link_bytes_per_s=1e8, crypto_bytes_per_s=600e9, crypto_beside=True)
    seconds, terms = exchange(PRICES[Way.DIRECT], found, beside, pipelined=True)
    assert seconds == pytest.approx(terms[Bound.LINK] + terms[Bound.LATENCY])
    assert terms[Bound.CRYPTO] == pytest.approx(found.crypto_bytes / 600e9)


def test_the_forecast_says_which_term_bounds() -> None:
    model = fit(points())
    slow_link = forecast(model, Way.DIRECT, JOB, Cluster(link_bytes_per_s=1e7), ranks=8)
    slow_crypto = forecast(model, Way.DIRECT, JOB, replace(FAST, crypto_bytes_per_s=1e7), ranks=8)
    far = forecast(model, Way.RING, JOB, replace(FAST, latency_s=1e-2), ranks=4_096)
    long = forecast(model, Way.DIRECT, replace(JOB, compute_s=100.0), FAST, ranks=8)
    assert slow_link.bound is Bound.LINK
    assert slow_crypto.bound is Bound.CRYPTO
    assert far.bound is Bound.LATENCY
    assert long.bound is Bound.COMPUTATION
    assert long.seconds == pytest.approx(100.0, rel=0.05)


def test_forecasts_hold_what_must_hold() -> None:
    model = fit(points())
    found = forecasts(model, JOB, FAST)
    assert {one.ranks for one in found} == set(RANKS)
    for one in found:
        assert one.seconds >= JOB.compute_s
        assert one.exposed_s == pytest.approx(one.seconds - JOB.compute_s)
    by = {(one.way, one.ranks): one.seconds for one in found}
    for way in model.prices:
        assert by[way, 4_096] >= by[way, 8]
    # Dependent steps are what a ring pays at scale, and serial pays everything one after the other.
    assert by[Way.SERIAL, 512] > by[Way.RING, 512]
    assert by[Way.RING, 4_096] > by[Way.RING, 512]


def test_a_link_without_a_rate_is_no_cluster() -> None:
    with pytest.raises(ValueError, match="rates"):
        Cluster(link_bytes_per_s=0)
