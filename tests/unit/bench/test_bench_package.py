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
    assert {"seal", "seal_one_core", "copy", "open", "cipher", "sha256"} <= found["rates_gb_per_s"].keys()
    assert all(len(values) == 2 and min(values) > 0 for values in found["seconds"].values())
    assert found["ratios"]["open_to_cipher"] > 0
    assert 0 < found["reader_memory_bytes"] < 8 << 20
    assert found["bars"]["reader_memory_bytes"]["met"] is True
    assert found["suite"] == suite.value
    assert not list(tmp_path.iterdir())


def test_a_run_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        run(size_bytes=1 << 60, folder=tmp_path)
    with pytest.raises(UsageError):
        run(size_bytes=1, repeats=0, folder=tmp_path)
