"""A Vast.ai whose machines are on paper, and an account there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from glasshouse.providers.rental.vast import Vast
from simulators.fake_api import quick
from simulators.fake_vast import FakeVast, fake_vast
from simulators.vast_market import Paper, Time


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def there(tmp_path: Path, time: Time) -> Iterator[FakeVast]:
    with fake_vast(tmp_path, clock=time, host=Paper) as there:
        yield there


@pytest.fixture
def vast(there: FakeVast, time: Time) -> Vast:
    return quick(Vast(there.key, there.url), time)
