"""Who watches the watch: the agent notices a sentinel that is stopped, traced, silent or gone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from glasshouse.runtime.loop import Loop
from glasshouse.runtime.run import interrupts
from glasshouse.runtime.run.interrupts import Heartbeat
from glasshouse.runtime.watchdog import watchdog
from glasshouse.runtime.watchdog.watchdog import Watchdog
from tools.forked import in_child
from tools.machine import needs_filters, needs_tracing
from tools.tracer import Tracer

pytestmark = needs_filters

EVERY_S = 0.02
LONG_S = 15.0


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "EVERY_S", EVERY_S)


def noticed(harm: Callable[[Watchdog], object], *, period_s: float = 0.05) -> bool:
    """Do something to a sentinel that is looked at; return whether that was noticed, and the look then ended."""

    def act() -> bool:
        loop, told = Loop(), []
        watcher = watchdog.start(period_s=period_s)
        try:
            Heartbeat(loop, watcher, lambda: told.append(watcher.pid), lambda _since_s: None)
            loop.sleep(5 * EVERY_S)
            assert told == []
            held = harm(watcher)
            found = loop.run_until(lambda: bool(told), within_s=LONG_S)
            loop.sleep(3 * EVERY_S)
            assert len(told) <= 1
            if isinstance(held, Tracer):
                held.close()
            return found
        finally:
            watcher.stop()

    return in_child(act)


def test_a_sentinel_that_is_left_alone_is_looked_at_again_and_again() -> None:
    def act() -> list[str]:
        loop, told = Loop(), []
        watcher = watchdog.start(period_s=0.05)
        try:
            Heartbeat(loop, watcher, lambda: told.append("gone"), lambda _since_s: None)
            loop.sleep(0.3)
            return told
        finally:
            watcher.stop()

    assert in_child(act) == []


@pytest.mark.parametrize("signal_", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_sentinel_that_is_stopped_or_killed_is_noticed(signal_: signal.Signals) -> None:
    assert noticed(lambda watcher: os.kill(watcher.pid, signal_))


@needs_tracing
@pytest.mark.parametrize("stopping", [True, False], ids=["stopped", "running"])
def test_a_sentinel_that_is_traced_is_noticed(stopping: bool) -> None:
    assert noticed(lambda watcher: Tracer(watcher.pid, stopping=stopping))


def test_a_sentinel_that_runs_and_does_not_look_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "SILENT_S", 0.4)
    assert noticed(lambda _watcher: None, period_s=600)


def test_a_single_silent_look_is_no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a machine was paused as a whole: the agent may be the first of the two to run again."""

    def act() -> list[str]:
        loop, told = Loop(), []
        watcher = watchdog.start(period_s=0.05)
        answers = iter([99.0, 99.0, 0.1, 99.0, 0.1])
        try:
            monkeypatch.setattr(watcher, "silent_s", lambda: next(answers, 0.0))
            Heartbeat(loop, watcher, lambda: told.append("gone"), lambda _since_s: None)
            loop.run_until(lambda: next(answers, None) is None, within_s=LONG_S)
            return told
        finally:
            watcher.stop()

    assert in_child(act) == []


def test_one_that_was_ended_on_purpose_can_still_be_looked_at() -> None:
    assert noticed(lambda watcher: watcher.stop())


def test_looking_costs_the_agent_less_than_a_thousandth_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "EVERY_S", 0.001)

    def act() -> float:
        loop, looks, told = Loop(), 0, []
        watcher = watchdog.start()
        untouched = watcher.untouched

        def counted() -> bool:
            nonlocal looks
            looks += 1
            return untouched()

        watcher.untouched = counted  # type: ignore[method-assign]
        try:
            Heartbeat(loop, watcher, lambda: told.append("gone"), lambda _since_s: None)
            before = time.process_time()
            loop.run_until(lambda: looks >= 200, within_s=LONG_S)
            spent_s = time.process_time() - before
            assert told == []
            return spent_s / looks
        finally:
            watcher.stop()

    assert in_child(act) < 1.0 / 1000
