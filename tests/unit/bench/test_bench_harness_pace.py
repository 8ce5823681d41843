"""The harness's end of a pacing channel, and how a signal reaches whoever waits."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from glasshouse.bench.harness.arms import process_cpu_ns
from glasshouse.bench.harness.pace import ArmLostError, Pace
from glasshouse.bench.harness.stop import Stop
from glasshouse.errors import Code, FormatError, RunError
from glasshouse.wire import pacing
from glasshouse.wire.canonical import encode

GO = pacing.Go(origin_ns=2**60, until=70, steps=100, least_ns=None, guard_ns=250_000_000, burn_ns=0, stamps=False)
REPORT: dict[str, Any] = {
    "cpu_ns": 5,
    "device_bytes": None,
    "done_after": 170,
    "done_before": 70,
    "guard_ns": 260_000_000,
    "guard_steps": 70,
    "hooks_ns": 12,
    "loss_finite": True,
    "phases": None,
    "skew_ns": -3,
    "steps": 100,
    "t0_ns": 1_000,
    "t1_ns": 2_000,
    "type": "pace-slice",
    "wait_ppm": None,
}


@pytest.fixture
def stop() -> Iterator[Stop]:
    with Stop() as made:
        yield made


@pytest.fixture
def pace(stop: Stop) -> Iterator[Pace]:
    made = Pace(stop)
    yield made
    made.close()


def test_an_order_goes_out_and_its_report_comes_back(pace: Pace) -> None:
    pace.child.send(encode(REPORT))
    found = pace.slice(GO, 1.0)
    assert (found.done_before, found.done_after, found.skew_ns) == (70, 170, -3)
    assert pacing.order(pace.child.recv(5000)) == GO
    pace.end(200)
    assert pacing.order(pace.child.recv(5000)) == pacing.End(until=200)


def test_a_worker_that_rests_says_so_once(pace: Pace) -> None:
    pace.child.send(encode({"done": 1, "type": "pace-parked"}))
    assert pace.parked(1.0) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"{}",
        b"not json",
        encode({"done": 1, "type": "pace-parked"}),
        encode(REPORT | {"steps": 0}),
        encode(REPORT | {"more": 1}),
        encode(REPORT | {"t0_ns": -1}),
        b" " + encode(REPORT),
        b"x" * 5000,
    ],
)
def test_a_report_that_is_none_is_refused(pace: Pace, answer: bytes) -> None:
    pace.child.send(answer)
    with pytest.raises(FormatError):
        pace.slice(GO, 1.0)


def test_a_slice_before_the_worker_rests_is_refused(pace: Pace) -> None:
    pace.child.send(encode(REPORT))
    with pytest.raises(FormatError):
        pace.parked(1.0)


def test_a_report_that_does_not_come_is_given_up(pace: Pace) -> None:
    with pytest.raises(RunError) as caught:
        pace.slice(GO, 0.01)
    assert caught.value.code is Code.DURATION_EXCEEDED


def test_the_end_of_the_worker_is_the_end_of_the_waiting(pace: Pace) -> None:
    pace.handed_over()
    with pytest.raises(ArmLostError):
        pace.slice(GO, 60.0)
    with pytest.raises(ArmLostError):
        pace.end(1)


def test_a_request_to_stop_ends_the_waiting(pace: Pace, stop: Stop) -> None:
    threading.Timer(0.05, stop.ask).start()
    with pytest.raises(RunError) as caught:
        pace.slice(GO, 60.0)
    assert caught.value.code is Code.INTERRUPTED


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_asks_and_interrupts_nothing(stop: Stop, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop.handled():
        for _ in range(3):
            os.kill(os.getpid(), number)
        assert stop.asked
        assert stop.count == 3
    assert signal.getsignal(number) is before


def test_what_was_ignored_stays_ignored(stop: Stop) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop.handled():
            os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.asked
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_clock_of_another_process_can_be_read() -> None:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            for _ in range(10_000_000):
                pass
            os.write(write, b"!")
            signal.pause()
        finally:
            os._exit(1)
    os.read(read, 1)
    spent = process_cpu_ns(child)
    assert spent is not None
    assert spent > 0
    assert process_cpu_ns(child) == spent  # it rests
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert process_cpu_ns(child) is None
    os.close(read)
    os.close(write)
