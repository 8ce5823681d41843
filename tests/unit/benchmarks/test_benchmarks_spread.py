"""What a kept measurement spreads by is taken apart from its step records alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import spread
from glasshouse_bench.design import Mode
from simulators.slot_measurement import measured


def taken_apart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    out = folder.with_suffix(".json")
    monkeypatch.setattr(sys, "argv", ["spread", str(folder), "-o", str(out)])
    assert spread.main() == 0
    numbers: dict[str, float] = json.loads(out.read_text())["numbers"]
    return numbers


def test_a_cost_of_every_step_shows_at_each_place_of_a_slot_and_not_in_the_null(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = measured(tmp_path / "kept", ratio=1.1, sessions=6, length_ns=400_000_000, signed=False)
    found = taken_apart(folder, monkeypatch)
    places = [name for name in found if name.startswith("interleaved_step") and "half_width" not in name]
    assert len(places) > 1, "the step that is not counted is shown too"
    for name in places:
        assert found[name] == pytest.approx(10, abs=1.5)
        assert abs(found[name.replace("interleaved", "null")]) < 1.5
    whole = found["interleaved_deviation_of_sessions_%"] ** 2
    parts = [found[f"interleaved_of_it_{where}_sessions_%"] ** 2 for where in ("within", "between")]
    assert sum(parts) == pytest.approx(whole) or parts[1] == 0


def test_sessions_that_do_not_count_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"modes": [Mode.INTERLEAVED], "length_ns": 400_000_000, "signed": False}
    found = taken_apart(measured(tmp_path / "kept", sessions=6, died=[1, 4], **shape), monkeypatch)
    assert found["interleaved_sessions"] == 4
    monkeypatch.setattr(sys, "argv", ["spread", str(measured(tmp_path / "one", sessions=2, died=[1], **shape))])
    with pytest.raises(SystemExit):
        spread.main()
