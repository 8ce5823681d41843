"""Whole signed measurements in folders, honest ones, for the stories of their verification."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from glasshouse.bench.overhead import sensitivity
from simulators.measurement import copy, write


@pytest.fixture(scope="module")
def few_resamples() -> Iterator[None]:
    """Most of the time of a small measurement is its bootstrap; none of these stories is about it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sensitivity, "block_bootstrap", partial(sensitivity.block_bootstrap, resamples=50))
        yield


@pytest.fixture(scope="module")
def honest(few_resamples: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("honest") / "out"
    write(folder)
    return folder


@pytest.fixture(scope="module")
def rival(few_resamples: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another measurement by the same owner, of a slower protection and with a null run of its own."""
    folder = tmp_path_factory.mktemp("rival") / "out"
    write(folder, overhead=0.2, null_overhead=0.001, phases=0, same_weights=False, blocks=5)
    return folder


@pytest.fixture
def folder(honest: Path, tmp_path: Path) -> Path:
    return copy(honest, tmp_path / "out")
