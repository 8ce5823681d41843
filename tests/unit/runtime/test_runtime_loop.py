"""The one place where the agent waits."""

from __future__ import annotations

import os
import resource

import pytest

from glasshouse.runtime.loop import Loop


def test_what_is_ready_is_handled_and_timers_come_in_time() -> None:
    loop, told = Loop(), []
    reader, writer = os.pipe()
    loop.watch(reader, lambda: told.append(os.read(reader, 8)))
    loop.after(0.02, lambda: os.write(writer, b"late"))
    os.write(writer, b"soon")
    assert loop.run_until(lambda: told == [b"soon", b"late"], within_s=20)
    loop.unwatch(reader)
    loop.unwatch(reader)
    os.close(reader)
    os.close(writer)


def test_a_handler_that_raises_ends_the_wait() -> None:
    def alarm() -> None:
        raise RuntimeError("alarm")

    loop = Loop()
    loop.after(0, alarm)
    with pytest.raises(RuntimeError, match="alarm"):
        loop.run_until(lambda: False, within_s=5)


def test_a_cancelled_timer_says_nothing() -> None:
    loop, told = Loop(), []
    timer = loop.after(0.01, lambda: told.append(1))
    timer.cancel()
    loop.sleep(0.05)
    assert told == []


def test_a_handler_may_forget_another_that_is_ready_too() -> None:
    loop, told = Loop(), []
    pipes = [os.pipe(), os.pipe()]
    for reader, writer in pipes:
        os.write(writer, b"x")
        other = pipes[0][0] if reader == pipes[1][0] else pipes[1][0]
        loop.watch(reader, lambda reader=reader, other=other: (told.append(reader), loop.unwatch(other)))
    loop.step(0.1)
    assert len(told) == 1
    for reader, writer in pipes:
        os.close(reader)
        os.close(writer)


def test_time_that_runs_out_is_told_apart() -> None:
    assert not Loop().run_until(lambda: False, within_s=0.01)
    assert Loop().run_until(lambda: True, within_s=0)


def test_waiting_costs_nothing() -> None:
    loop = Loop()
    before = resource.getrusage(resource.RUSAGE_SELF)
    loop.after(0.25, lambda: None)
    loop.sleep(0.5)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.05
