"""The package benchmark measures what it says, on a small asset: the numbers themselves are not judged here."""

from __future__ import annotations

from pathlib import Path

import pytest

from glasshouse.bench.package import run
from glasshouse.errors import UsageError
from glasshouse.wire.aead import Suite


@pytest.mark.parametrize("suite", list(Suite))
def test_a_small_run_reports_every_arm(tmp_path: Path, suite: Suite) -> None:
    found = run(size_bytes=(3 << 20) + 5, repeats=2, suite=suite, folder=tmp_path)
    assert {"seal", "seal_one_core", "copy", "cp", "open", "cipher", "cipher_seal", "blake3"} <= found[
        "rates_gb_per_s"
    ].keys()
    assert all(len(values) == 2 and min(values) > 0 for values in found["seconds"].values())
    assert found["ratios"]["open_to_cipher"] > 0
    assert 0 < found["reader_memory_bytes"] < 8 << 20
    assert found["bars"]["reader_memory_bytes"]["met"] is True
    assert found["suite"] == suite.value
    assert {"seal_to_cipher", "seal_to_cp", "open_to_cipher", "open_to_copy"} <= found["ratios"].keys()
    assert not list(tmp_path.iterdir())


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


def test_age_is_measured_where_it_is_installed_and_said_to_be_missing_where_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools, work = tmp_path / "bin", tmp_path / "work"
    tools.mkdir()
    work.mkdir()
    monkeypatch.setenv("PATH", "/nowhere")
    missing = run(size_bytes=1 << 16, repeats=1, folder=work)
    assert missing["age"] == "not found"
    assert not [name for name in [*missing["ratios"], *missing["bars"], *missing["seconds"]] if "age" in name]
    for name, text in (("age", AGE), ("age-keygen", KEYGEN)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    found = run(size_bytes=1 << 16, repeats=1, folder=work)
    assert found["age"] == "v9.9"
    assert {"age", "age_discarded", "age_seal"} <= found["seconds"].keys()
    assert {"open_to_age", "seal_to_age"} <= found["ratios"].keys()


def test_a_run_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        run(size_bytes=1 << 60, folder=tmp_path)
    with pytest.raises(UsageError):
        run(size_bytes=1, repeats=0, folder=tmp_path)
