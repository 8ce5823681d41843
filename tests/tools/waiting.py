"""Waiting for what another process or thread will do: patient, as the machine may be busy."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["wait_for"]


def wait_for(condition: Callable[[], object], *, within_s: float = 60.0, told: Callable[[], str] = lambda: "") -> None:
    """Wait until `condition` holds.

    Raises:
        TimeoutError: it did not in time; `told` says what there was instead.
    """
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"it did not happen within {within_s:g} s: {told()}")
        time.sleep(0.01)
