"""A broker in this process, and an owner whose deployment lets three launches in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from glasshouse.tamper.stage import Owner
from simulators.gate_store import MIB, OWNERS
from simulators.local_broker import LocalBroker


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[LocalBroker]:
    with LocalBroker(tmp_path) as running:
        yield running


@pytest.fixture
def owner(broker: LocalBroker) -> Owner:
    return Owner(broker, releases=3)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[LocalBroker]:
    with LocalBroker(tmp_path, owners=OWNERS, store_bytes=8 * MIB) as running:
        yield running
