"""What the scripts keep: a number beside its bar, a missed bar as a failure, and never over another file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.kept import Bar, finish, kept, options

BARS = {"open_to_cipher": Bar(0.5, least=True), "reader_memory_mib": Bar(64)}


def test_numbers_are_shown_beside_their_bars_and_kept_with_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = {"open_to_cipher": 0.5, "reader_memory_mib": 1.0, "seal_to_cp": 0.3}
    path = tmp_path / "result.json"
    assert finish(kept(numbers, BARS, seconds=[1.0]), path) == 0
    out = capsys.readouterr().out
    assert "≥ 0.5" in out
    assert "≤ 64" in out
    found = json.loads(path.read_text())
    assert found["bars"]["open_to_cipher"] == {"bar": "≥ 0.5", "found": 0.5, "met": True}
    assert (found["numbers"], found["seconds"]) == (numbers, [1.0])
    assert found["machine"]["cores"] >= 1


@pytest.mark.parametrize("found", [0.49, math.nan])
def test_a_missed_bar_fails_and_is_named(found: float, capsys: pytest.CaptureFixture[str]) -> None:
    assert finish(kept({"open_to_cipher": found, "reader_memory_mib": 1.0}, BARS), None) == 1
    assert "did not reach: open to cipher." in capsys.readouterr().out


def test_a_bar_without_its_number_does_not_pass() -> None:
    with pytest.raises(KeyError):
        kept({"open_to_cipher": 1.0}, BARS)


def test_a_file_that_is_there_or_lies_nowhere_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "kept.json").write_text("{}")
    for name in ("kept.json", "no/folder.json"):
        with pytest.raises(SystemExit) as refused:
            options("").parse_args(["-o", str(tmp_path / name)])
        assert refused.value.code == 2
