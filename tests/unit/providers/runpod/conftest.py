"""A RunPod without machines, and an account there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from glasshouse.providers.rental.runpod import RunPod
from simulators.fake_api import quick
from simulators.fake_runpod import FakeRunPod, fake_runpod
from simulators.runpod_market import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fake(tmp_path: Path, clock: Clock) -> Iterator[FakeRunPod]:
    with fake_runpod(tmp_path, machines=False, clock=clock) as made:
        yield made


@pytest.fixture
def runpod(fake: FakeRunPod, clock: Clock) -> RunPod:
    made = quick(RunPod(fake.key, fake.url), clock)
    made.quiet_s = 0.05
    return made
