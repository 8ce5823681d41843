"""How often a null holds 0 is drawn from sessions in which nothing was planted, and a bias shows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import nulls
from glasshouse_bench.design import Mode, Planted
from simulators.slot_measurement import measured

SHORT = {"modes": [Mode.NULL], "length_ns": 400_000_000, "signed": False}


def drawn(folder: Path, *names: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, object]]:
    out = folder / "nulls.json"
    monkeypatch.setattr(sys, "argv", ["nulls", *(str(folder / name) for name in names), "-o", str(out)])
    status = nulls.main()
    return status, json.loads(out.read_text())


def test_what_was_planted_is_no_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(tmp_path / "honest", sessions=24, **SHORT)
    measured(tmp_path / "planted", sessions=3, planted=Planted(step_ppm=20_000, bunched_ns=0), null=1.02, **SHORT)
    _, found = drawn(tmp_path, "honest", "planted", monkeypatch=monkeypatch)
    assert found["sources"] == {"honest": 24}
    assert found["numbers"]["null_sessions"] == 24  # type: ignore[index]


def test_a_bias_of_the_method_misses_the_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(tmp_path / "biased", sessions=24, null=1.05, **SHORT)
    status, found = drawn(tmp_path, "biased", monkeypatch=monkeypatch)
    assert status == 1
    assert found["numbers"]["hold_0"] < 0.5  # type: ignore[index]


def test_too_few_sessions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(tmp_path / "few", sessions=3, **SHORT)
    with pytest.raises(SystemExit):
        drawn(tmp_path, "few", monkeypatch=monkeypatch)
