"""What a hostile worker can say by its progress, as the rules are implemented, and how much that is in an hour."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import RunError
from glasshouse.evidence.events import EventType, is_loss
from glasshouse.evidence.heads import Head
from glasshouse.evidence.log import EventLog, verify_log
from glasshouse.evidence.receipt import Work
from glasshouse.runtime.worker.worker_messages import Progress, parse
from glasshouse.runtime.worker.worker_session import ProgressReports
from glasshouse.wire.canonical import MAX_INTEGER
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.states import State

HOUR_S = 3600
MODEL = Path(__file__).resolve().parents[3] / "docs" / "security" / "threat-model.md"


def said(done: int, **fields: Any) -> Progress:
    message = {"type": "progress", "done": done, "total": None, "unit": "step", "loss": "0.5", "elapsed_us": 0}
    found = parse(message | fields)
    assert isinstance(found, Progress)
    return found


def test_one_report_a_second_whatever_is_offered() -> None:
    reports, taken = ProgressReports(), []
    for done in range(1, 30_001):  # ten thousand a second
        reports.offer(said(done))
        taken.append(reports.take(done * 100))
    assert [one.done for one in taken if one is not None] == [1, 10_001, 20_001]


def test_the_clock_is_the_agents() -> None:
    reports = ProgressReports()
    reports.offer(said(1, elapsed_us=2**50))
    first = reports.take(7)
    assert first is not None
    assert first.elapsed_us == 7


def test_counts_only_grow_and_the_unit_stays() -> None:
    reports = ProgressReports()
    assert reports.offer(said(5))
    reports.take(0)
    assert not any(reports.offer(said(done)) for done in range(6))
    assert not reports.offer(said(6, unit="epoch"))
    assert reports.offer(said(6))


@pytest.mark.parametrize(
    ("given", "told"),
    [([None, None], [None, None]), ([9, 8, None], [9, 9, 9]), ([None, 9, 8], [None, 9, 9])],
    ids=["never given", "given first", "given later"],
)
def test_a_total_is_given_once(given: list[int | None], told: list[int | None]) -> None:
    reports, found = ProgressReports(), []
    for number, total in enumerate(given):
        reports.offer(said(number + 1, total=total))
        one = reports.take(number * 1_000_000)
        assert one is not None
        found.append(one.total)
    assert found == told


def test_a_number_has_one_spelling_and_six_digits() -> None:
    spellings = ["0.5", "0.50", "0.5000000", "5e-01", "0.50000000001", "0.499999999"]
    assert {said(1, loss=text).loss for text in spellings} == {"0.5"}
    assert said(1, loss="0.12345678901234567").loss == "0.123457"
    with pytest.raises(RunError):
        said(1, loss="1e+999")


def test_the_work_is_bounded() -> None:
    reports = ProgressReports()
    reports.offer(said(7))
    reports.take(0)
    assert reports.bounded(Work(unit="step", done=3, elapsed_us=99, stop_reason="steps"), 5) == Work(
        unit="step", done=7, elapsed_us=5, stop_reason="steps"
    )
    assert reports.bounded(Work(unit="epoch", done=90, elapsed_us=1, stop_reason="steps"), 5) == Work(
        unit="step", done=7, elapsed_us=1, stop_reason="steps"
    )


def test_what_the_gate_lets_through_is_a_log_that_verifies() -> None:
    """Numbers, units, totals and losses of a worker that tries everything, over ten minutes."""
    key, lines = SigningKey(b"e" * 32), list[bytes]()
    log = EventLog(run_id="ab" * 16, evidence_key=key, clock_us=lambda: 1, sink=lines.append)
    for state in list(State)[1 : list(State).index(State.SEALED)]:
        log.transition(state)
    reports = ProgressReports()
    wanted = [(3, 9, "step"), (1, None, "epoch"), (10, 8, "step"), (2, 2**52, "step"), (10, None, "step")]
    tries = itertools.cycle(wanted)
    for tick in range(6_000):
        done, total, unit = next(tries)
        reports.offer(said(done * tick, total=total, unit=unit, loss=f"{math.sin(tick):.17f}"))
        one = reports.take(tick * 100_000)
        if one is not None:
            body = {name: getattr(one, name) for name in ("done", "elapsed_us", "loss", "total", "unit")}
            log.append(EventType.PROGRESS, body)
    verify_log(lines, Head.parse_signed(log.head(), key.public))
    assert sum(b'"progress"' in line for line in lines) > 500


def bits_an_hour() -> float:
    """Return the capacity of the rules as they are implemented, for reports at every second of an hour."""
    reports, taken = ProgressReports(), 0
    for tick in range(HOUR_S * 20):
        reports.offer(said(tick + 1))
        taken += reports.take(tick * 50_000) is not None
    # Every finite number with six digits has a text; what the exponent may be is tried, not assumed.
    exponents = [exponent for exponent in range(-400, 400) if _tells(f"1.23456e{exponent:+03d}")]
    losses = 2 * 900_000 * len(exponents) + 3  # zero, its negative, and none
    # Which `taken` of the numbers below 2^53, in order: they only grow.
    counts = math.lgamma(MAX_INTEGER + 2) - math.lgamma(taken + 1) - math.lgamma(MAX_INTEGER + 2 - taken)
    return taken * math.log2(losses) + counts / math.log(2)


def _tells(text: str) -> bool:
    try:
        loss = said(1, loss=text).loss
    except RunError:
        return False
    return loss is not None and is_loss(loss) and float(loss) == float(text) != 0


def test_the_threat_model_says_how_many_bits_are_left() -> None:
    bits = bits_an_hour()
    [told] = re.findall(r"about ([0-9,]+) bits \(([0-9]+) kB\) an hour", " ".join(MODEL.read_text().split()))
    assert math.isclose(bits, int(told[0].replace(",", "")), rel_tol=0.01), bits
    assert round(bits / 8000) == int(told[1])


def test_the_receipt_takes_no_word_of_the_workers() -> None:
    work = {"unit": "step", "done": 1, "elapsed_us": 1, "stop_reason": "steps"}
    finished = {"type": "finished", "work": work, "loss": None, "trainable": None, "digests": {}}
    parse(json.loads(json.dumps(finished)))
    for reason in ("paced", "epochs", "other", "meet-at-noon", "a"):
        with pytest.raises(RunError):
            parse(finished | {"work": work | {"stop_reason": reason}})
