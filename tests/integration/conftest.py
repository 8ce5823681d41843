"""A real broker, and worlds of scripts around it, for tests that run the real agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from glasshouse.broker.client.broker_process import BrokerProcess
from tools.runtime_world import World, script_world


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    folder = tmp_path_factory.mktemp("broker")
    folder.chmod(0o700)
    with BrokerProcess(folder) as broker:
        yield broker


@pytest.fixture
def script_worlds(tmp_path: Path, broker: BrokerProcess) -> Iterator[Callable[..., World]]:
    """Make worlds as `script_world` does, around one broker; they end with the test."""
    with ExitStack() as worlds:

        def make(script: str, files: Mapping[str, bytes], **options: Any) -> World:
            return worlds.enter_context(script_world(tmp_path, script, files, broker=broker, **options))

        yield make
