"""A call that never returns does not keep its caller."""

from __future__ import annotations

import threading

import pytest

from glasshouse.collectives.transport.dial import within


def test_what_returns_in_time_is_returned() -> None:
    assert within(10, lambda: 7) == 7
    assert within(10, lambda: None) is None


def test_what_never_returns_is_a_timeout() -> None:
    held = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.05, held.wait)
    held.set()


def test_what_it_raises_is_raised() -> None:
    def fail() -> int:
        raise RuntimeError("the store is gone")

    with pytest.raises(RuntimeError, match="the store is gone"):
        within(10, fail)


def test_without_any_time_it_is_not_called() -> None:
    called = []
    for limit_s in (0, -1.5):
        with pytest.raises(TimeoutError):
            within(limit_s, lambda: called.append(True))
    assert not called
