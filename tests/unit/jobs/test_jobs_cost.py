"""What a run cost, by numbers that can be worked out by hand; what an input does not say is absent."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from glasshouse.cli.show.costs import usd_text
from glasshouse.errors import UsageError
from glasshouse.evidence.receipt import LIFECYCLE, Receipt, Work
from glasshouse.jobs.results.run_cost import Cost, Share, Slowdown, cost_of, slowdown_of
from simulators.world import World

S = 1_000_000
BEGAN_US = 1_800_000_000 * S
# 0.72 $ an hour are 0.0002 $ a second.
MACHINE = {
    "state": "gone",
    "usd_per_hour": "0.72",
    "asked_us": BEGAN_US,
    "up_us": BEGAN_US + 50 * S,
    "gone_us": BEGAN_US + 1080 * S,
}
STATEMENT = {"over": True, "billed_usd": "0.2200", "most_usd": "5", "most_s": 14400, "machines": [MACHINE]}
PLACED_US = BEGAN_US + 80 * S


def receipt(*, work: Work | None, total_us: int | None = 45 * S, ran_s: int = 950) -> Receipt:
    """A run of so many seconds, of which the runtime took 45 beside the training: five for the worker's imports."""
    told = World().run().receipt
    lifecycle = dict.fromkeys(LIFECYCLE, 0) | {"seal_outputs": 10 * S, "total": total_us}
    return replace(
        told,
        work=work,
        lifecycle_us=lifecycle,
        training_imports_us=5 * S,
        started_us=BEGAN_US,
        finished_us=BEGAN_US + ran_s * S,
        **({} if work is not None else {"outcome": "failed", "code": "script-failed"}),
    )


WORK = Work(unit="step", done=1800, elapsed_us=900 * S, stop_reason="finished")


def cost(statement: dict[str, Any] | None = STATEMENT, told: Receipt | None = None, **options: Any) -> Cost:
    return cost_of(statement, told, **{"now_us": BEGAN_US + 2000 * S, "placed_us": PLACED_US, **options})


def share(seconds: str, usd: str) -> Share:
    return Share(seconds=Decimal(seconds), usd=Decimal(usd))


def slowdown(low: str | None, high: str | None, word: str, *, delta: str = "0.01") -> Slowdown:
    return Slowdown(
        delta=Decimal(delta),
        low=None if low is None else Decimal(low),
        high=None if high is None else Decimal(high),
        word=word,
        whole=True,
        workload="lora",
        cpu="AMD EPYC",
        gpu=None,
    )


def test_a_rental_is_told_apart_into_booting_upload_training_protection_and_the_rest() -> None:
    found = cost(told=receipt(work=WORK))
    assert found.total == share("1080", "0.216")
    assert found.booting == share("50", "0.01")
    assert found.uploading == share("30", "0.006")
    assert found.training == share("900", "0.18")
    assert found.protecting == share("40", "0.008")
    # Ten seconds of sealing outputs lay within the training.
    assert found.rest == share("70", "0.014")
    assert (found.unit, found.done, found.usd_per_unit) == ("step", 1800, Decimal("0.000120"))
    assert (found.billed_usd, found.most_usd, found.most_s) == (Decimal("0.22"), Decimal(5), 14400)
    assert found.of_cap == Decimal("0.0432")
    assert found.slowdown is found.slowed is None
    assert (found.rented, found.over, found.fits) == (True, True, True)


def test_what_never_came_up_counts_as_booting_and_what_was_never_made_costs_nothing() -> None:
    failed = MACHINE | {"usd_per_hour": "0.36", "up_us": None, "gone_us": BEGAN_US + 100 * S}
    second = {name: value + 100 * S if isinstance(value, int) else value for name, value in MACHINE.items()}
    never = MACHINE | {"state": "never", "up_us": None, "gone_us": None}
    found = cost(STATEMENT | {"machines": [failed, never, second]}, receipt(work=WORK), placed_us=PLACED_US + 100 * S)
    assert found.total == share("1180", "0.226")
    assert found.booting == share("150", "0.02")
    assert found.uploading == share("30", "0.006")
    assert found.usd_per_hour == Decimal("0.72")
    assert found.since_us == BEGAN_US


def test_a_machine_that_is_still_rented_costs_until_now() -> None:
    running = STATEMENT | {"over": False, "billed_usd": None, "machines": [MACHINE | {"state": "up", "gone_us": None}]}
    found = cost(running)
    assert found.total == share("2000", "0.4")
    assert not found.over
    assert found.booting == share("50", "0.01")
    assert found.billed_usd is found.training is found.protecting is found.rest is found.usd_per_unit is None
    booting = cost(running | {"machines": [MACHINE | {"state": "made", "up_us": None, "gone_us": None}]})
    assert booting.booting == booting.total == share("2000", "0.4")
    assert booting.usd_per_hour is booting.uploading is None


@pytest.mark.parametrize(
    ("lack", "absent"),
    [
        ({"placed_us": None}, {"uploading"}),
        ({"told": receipt(work=None)}, {"training", "rest", "usd_per_unit", "unit", "done"}),
        ({"told": receipt(work=replace(WORK, done=0))}, {"usd_per_unit", "unit", "done"}),
        ({"told": receipt(work=WORK, total_us=None)}, {"protecting", "rest"}),
        ({"statement": STATEMENT | {"most_usd": None}}, {"most_usd", "of_cap"}),
        ({"statement": STATEMENT | {"billed_usd": None}}, {"billed_usd"}),
        ({"told": None}, {"training", "protecting", "rest", "usd_per_unit", "unit", "done"}),
    ],
    ids=["when-placed", "work", "steps", "lifecycle", "cap", "bill", "receipt"],
)
def test_each_input_that_lacks_leaves_its_own_number_out_and_no_other(lack: dict[str, Any], absent: set[str]) -> None:
    whole = cost(told=receipt(work=WORK)).to_json()
    found = cost(**{"told": receipt(work=WORK), **lack}).to_json()
    assert whole["rest"] is not None
    names = {"usd_per_unit": "work", "unit": "work", "done": "work"}
    expected = {names.get(name, name) for name in absent} | {"slowdown", "slowed_95"}
    assert {name for name, value in found.items() if value is None} == expected


def test_a_slowdown_is_a_part_of_the_training_between_the_ends_of_its_interval() -> None:
    found = cost(told=receipt(work=WORK), slowdown=slowdown("-0.10", "0.25", "inconclusive"))
    assert found.slowed is not None
    low, high = found.slowed
    # 900 s at 0.9 of a raw step were 1000 s raw; at 1.25 of one they were 720 s.
    assert (round(low.seconds, 9), round(high.seconds, 9)) == (-100, 180)
    assert low.usd is not None
    assert (round(low.usd, 9), high.usd) == (Decimal("-0.02"), Decimal("0.036"))
    assert found.to_json()["slowdown"]["word"] == "inconclusive"


@pytest.mark.parametrize(
    "told",
    [
        slowdown(None, None, "inconclusive"),
        slowdown("-0.02", "-0.01", "bias_suspected"),
        slowdown("0.01", "0.02", ""),
        slowdown("0.01", "0.02", "faster"),
        slowdown("-1", "0.02", "inconclusive"),
    ],
    ids=["no-interval", "bias", "no-word", "another-word", "impossible"],
)
def test_no_amount_follows_from_a_measurement_whose_word_bears_none(told: Slowdown) -> None:
    found = cost(told=receipt(work=WORK), slowdown=told)
    assert found.slowed is None
    assert found.slowdown is told


def test_a_machine_of_ones_own_costs_nothing_unless_a_price_is_named() -> None:
    told = receipt(work=WORK)
    found = cost(None, told, placed_us=None)
    assert not found.rented
    assert found.over
    assert found.total == Share(seconds=Decimal(950), usd=None)
    assert found.rest == Share(seconds=Decimal(20), usd=None)
    assert found.usd_per_hour is found.usd_per_unit is found.booting is None
    priced = cost(
        None, told, placed_us=None, usd_per_hour=Decimal("0.72"), slowdown=slowdown("0.25", "0.25", "overhead")
    )
    assert priced.total == share("950", "0.19")
    assert priced.slowed == (share("180", "0.036"),) * 2
    # 0.19 $ over 1800 steps, to three digits.
    assert priced.usd_per_unit == Decimal("0.000106")
    assert cost(None, None, placed_us=None).total is None
    with pytest.raises(UsageError, match="its price is known"):
        cost(usd_per_hour=Decimal(1))


def test_a_receipt_of_more_time_than_was_rented_is_said_not_to_fit() -> None:
    found = cost(told=receipt(work=replace(WORK, elapsed_us=1000 * S)))
    assert not found.fits
    assert found.rest is None
    assert cost(told=receipt(work=replace(WORK, elapsed_us=970_500_000))).fits, "clocks may differ by a second"


@pytest.mark.parametrize(
    "damage",
    [{"machines": None}, {"machines": [{}]}, {"billed_usd": "much"}, {"most_usd": "NaN"}],
)
def test_a_damaged_statement_is_named(damage: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="damaged"):
        cost(STATEMENT | damage)


def verdict(**changed: Any) -> dict[str, Any]:
    """What `glasshouse verify DIR --json` prints, as far as it is read here."""
    part = {
        "design": {
            "mode": "interleaved",
            "planted": None,
            "workload": {"kind": "lora"},
            "machine": {"cpu": "AMD EPYC", "gpu": None},
        },
        "result": {"slowdown": "1.00000000000e-02", "slowdown_95": {"low": "5.00000000000e-03", "high": "0.015"}},
        "claim": {"word": "overhead"},
    }
    null = part | {"design": part["design"] | {"mode": "null"}}
    return {"status": "good", "parts": [null, part | changed]}


def test_a_measurement_is_read_as_verify_prints_it() -> None:
    found = slowdown_of(verdict())
    assert (found.delta, found.low, found.high) == (Decimal("0.01"), Decimal("0.005"), Decimal("0.015"))
    assert (found.word, found.whole, found.workload, found.cpu, found.gpu) == (
        "overhead",
        True,
        "lora",
        "AMD EPYC",
        None,
    )
    assert found.bears
    assert not slowdown_of(verdict() | {"status": "incomplete"}).whole
    nothing = slowdown_of(verdict(result=None, claim=None))
    assert (nothing.delta, nothing.word, nothing.bears) == (None, "", False)
    one = slowdown_of(verdict(result={"slowdown": "0.01", "slowdown_95": None}, claim={"word": "inconclusive"}))
    assert (one.delta, one.low, one.bears) == (Decimal("0.01"), None, False)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"status": "good", "parts": verdict()["parts"][:1]}, "no protected run"),
        (verdict(design=verdict()["parts"][1]["design"] | {"planted": {"step_ppm": 20000}}), "planted on purpose"),
        ({"status": "good"}, "no measurement"),
        (verdict(result={}), "no measurement"),
    ],
    ids=["null-alone", "planted", "other-artifact", "other-form"],
)
def test_what_measures_no_protection_is_refused(told: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        slowdown_of(told)


def test_a_program_gets_amounts_as_decimal_text() -> None:
    told = cost(told=receipt(work=WORK), slowdown=slowdown("0.00", "0.25", "overhead")).to_json()
    assert json.loads(json.dumps(told)) == told
    assert told["total"] == {"seconds": "1080.000", "usd": "0.2160"}
    assert told["work"] == {"unit": "step", "done": 1800, "usd_each": "0.000120"}
    assert told["slowed_95"] == [{"seconds": "0.000", "usd": "0.0000"}, {"seconds": "180.000", "usd": "0.0360"}]
    assert (told["of_cap"], told["most_usd"], told["billed_usd"]) == ("0.043", "5", "0.2200")


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        ("12.345", "12.35 $"),
        ("1234.5", "1234.50 $"),
        ("0.6034", "0.603 $"),
        ("0.03314", "0.0331 $"),
        ("-0.00026", "-0.0003 $"),
        ("0.00002", "under 0.0001 $"),
        ("0", "0 $"),
    ],
)
def test_an_amount_has_no_more_digits_than_are_known(amount: str, text: str) -> None:
    assert usd_text(Decimal(amount)) == text
