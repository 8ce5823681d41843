"""The package benchmark: ratios are of medians of one run, and a comparison that was not made is named as missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.package import Arms, result

SECONDS = {
    "seal": [1.0, 1.0, 1.0],
    "seal_one_core": [2.0, 1.5, 9.0],
    "cp": [1.0, 1.0, 1.0],
    "copy": [0.5, 0.5, 0.5],
    "open": [0.5, 0.5, 0.25],
    "cipher": [0.25, 0.25, 0.25],
    "cipher_seal": [0.5, 0.5, 0.5],
}


def test_ratios_are_of_the_medians_and_a_comparison_that_was_not_made_has_no_bar() -> None:
    found = result(10**9, SECONDS, 1 << 20, age="not found")
    numbers = found["numbers"]
    assert (numbers["open_to_cipher"], numbers["seal_to_cipher"], numbers["seal_two_cores_to_one"]) == (0.5, 0.25, 2.0)
    assert (numbers["seal_one_core_gb_per_s"], numbers["reader_memory_mib"]) == (0.5, 1.0)
    assert (found["age"], "open_to_age" in found["bars"]) == ("not found", False)
    assert found["bars"]["open_to_cipher"]["met"] is True


@pytest.mark.parametrize(
    ("cipher_s", "bar", "met"), [(0.1, "≥ 1.3", False), (0.5, "≥ 0.7", False), (0.75, "≥ 0.467", True)]
)
def test_sealing_is_judged_by_its_rate_or_on_a_slow_machine_by_its_part_of_the_cipher(
    cipher_s: float, bar: str, met: bool
) -> None:
    found = result(10**9, {**SECONDS, "cipher_seal": [cipher_s]}, 0, age="not found")
    assert found["bars"]["seal_one_core_gb_per_s"] == {"bar": bar, "found": 0.5, "met": met}


AGE = """#!/bin/sh
case "$1" in
  --version) echo v9.9 ;;
  -r) [ "$2" = age1fake ] && cp "$5" "$4" ;;
  -d) cat "$4" ;;
esac
"""
KEYGEN = """#!/bin/sh
case "$1" in
  -o) echo secret > "$2" ;;
  -y) echo age1fake ;;
esac
"""


def test_age_takes_its_turns_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools, work = tmp_path / "bin", tmp_path / "work"
    tools.mkdir()
    work.mkdir()
    monkeypatch.setenv("PATH", "/nowhere")
    missing = Arms(work, (3 << 20) + 5)
    assert missing.age_version == "not found"
    assert not [name for name, _ in missing.turn() if name.startswith("age")]
    for name, text in (("age", AGE), ("age-keygen", KEYGEN)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    arms = Arms(work, (3 << 20) + 5)
    assert arms.age_version == "v9.9"
    seconds = {name: [taken] for name, taken in arms.turn()}
    assert {"age", "age_discarded", "age_seal"} <= seconds.keys()
    assert 0 < arms.reader_memory_bytes() < 8 << 20
    found = result((3 << 20) + 5, seconds, 0, age=arms.age_version)
    assert {"open_to_age", "seal_to_age"} <= found["numbers"].keys()
    assert "open_to_age" in found["bars"]
