"""The benchmark of the event log measures a real log, and its bars are the ones it prints."""

from __future__ import annotations

import os

import pytest

from glasshouse.bench.evidence import run
from glasshouse.bench.processes import children_of, cpu_s, pss_bytes, usage
from glasshouse.errors import UsageError


def test_a_short_log_is_appended_and_verified() -> None:
    found = run(events=500, repeats=2)
    assert found["events"] == 500
    assert found["log_bytes"] > 500 * 100
    assert len(found["seconds"]["append"]) == len(found["seconds"]["verify"]) == 2
    for bar in found["bars"].values():
        assert bar["met"] is (bar["found"] <= bar["at_most"])


@pytest.mark.parametrize("arguments", [{"events": 10}, {"events": 1000, "repeats": 0}])
def test_what_measures_nothing_is_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        run(**arguments)


def test_processes_are_measured_and_missing_ones_are_none() -> None:
    before = cpu_s(os.getpid())
    assert before is not None
    total = sum(number * number for number in range(200_000))
    after = cpu_s(os.getpid())
    assert total
    assert after is not None
    assert after > before
    memory = pss_bytes(os.getpid())
    assert memory is not None
    assert memory > 1 << 20
    assert usage(2**22 - 1) is None
    assert list(children_of(2**22 - 1)) == []
