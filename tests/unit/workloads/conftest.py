"""Workloads set the framework's switches for their own process; tests that run them in theirs put them back."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture
def framework() -> Iterator[None]:
    """Put determinism and threads back after a workload ran in this process."""
    import torch

    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    environment = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
