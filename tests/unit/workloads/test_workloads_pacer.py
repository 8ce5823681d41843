"""The pacer at every step boundary: what it times, when it stands, and what it leaves out of the task's clock."""

from __future__ import annotations

import io
import math
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from glasshouse.errors import FormatError, UsageError
from glasshouse.task.handle import Task
from glasshouse.task.inputs import FolderInputs
from glasshouse.wire.pacing import End, Go, Order, Parked, Report, Slice
from glasshouse.workloads import pacer as pacer_module
from glasshouse.workloads.pacer import Pacer
from glasshouse.workloads.phases import Phases
from glasshouse.workloads.ports import Hooks, SocketPort, TimedChannel, TimedInputs
from tools.recorder import Recorder


def go(**changed: Any) -> Go:
    plain: dict[str, Any] = {
        "origin_ns": 0, "until": 0, "steps": 3, "least_ns": None, "guard_ns": 0, "burn_ns": 0, "stamps": False,
    }  # fmt: skip
    return Go(**plain | changed)


class Orders:
    """A port that gives the orders of a list, and then none any more.

    Args:
        orders: given one after the other.
        standing_s: how long the worker is left standing each time.
    """

    def __init__(self, *orders: Order | Exception, standing_s: float = 0.0) -> None:
        self.left, self.reports, self._standing_s = list(orders), list[Report](), standing_s

    def tell(self, report: Report) -> None:
        self.reports.append(report)

    def order(self) -> Order | None:
        time.sleep(self._standing_s)
        if not self.left:
            return None
        order = self.left.pop(0)
        if isinstance(order, Exception):
            raise order
        return order

    @property
    def slices(self) -> list[Slice]:
        return [report for report in self.reports if isinstance(report, Slice)]


class Job:
    """A task that is paced, and a loop that reports every step until it is told to stop."""

    def __init__(self, folder: Path, port: Orders) -> None:
        self.channel, self.hooks = Recorder(), Hooks()
        self.task = Task(
            params={},
            inputs=FolderInputs(folder),
            channel=TimedChannel(self.channel, self.hooks),
            workspace=folder / "workspace",
        )
        self.stopped = 0
        self.task.pace_by(
            Pacer(
                self.task,
                port,
                stop=self._stop,
                stopping=lambda: self.channel.stopping,
                hooks_ns=lambda: self.hooks.ns,
            )
        )

    def _stop(self) -> None:
        self.stopped += 1
        self.channel.stopping = True

    def train(self, step: Callable[[int], Any] = lambda _done: None, *, most: int = 1000) -> int:
        """Do steps; return how many were done when the job was to stop."""
        self.task.progress(0)
        done = 0
        while not self.task.should_stop() and done < most:
            loss = step(done)
            done += 1
            self.task.progress(done, None, loss)
        return done


@pytest.fixture
def job(tmp_path: Path) -> Callable[[Orders], Job]:
    return lambda port: Job(tmp_path, port)


def test_a_slice_has_its_steps_and_the_guard_those_before_it(job: Callable[[Orders], Job]) -> None:
    port = Orders(go(until=4, steps=3), go(until=10, steps=2), End(until=15))
    here = job(port)
    assert here.train() == 15
    assert here.stopped == 1
    assert port.reports[0] == Parked(done=0)
    first, second = port.slices
    assert (first.done_before, first.done_after, first.guard_steps, first.steps) == (4, 7, 4, 3)
    assert (second.done_before, second.done_after, second.guard_steps, second.steps) == (10, 12, 3, 2)
    assert 0 < first.t0_ns <= first.t1_ns <= second.t0_ns


def test_without_a_guard_a_slice_begins_where_the_worker_stands(job: Callable[[Orders], Job]) -> None:
    port = Orders(go(steps=2), go(steps=2), End(until=0))
    assert job(port).train() == 4
    assert [(one.done_before, one.guard_steps) for one in port.slices] == [(0, 0), (2, 0)]


def test_a_guard_that_is_short_of_time_goes_on(job: Callable[[Orders], Job]) -> None:
    port = Orders(go(until=2, guard_ns=300_000_000), End(until=0))
    job(port).train(lambda _done: time.sleep(0.005))
    (found,) = port.slices
    assert found.guard_ns >= 300_000_000
    assert 2 < found.done_before == found.guard_steps <= 60


def test_a_slice_may_end_by_its_time(job: Callable[[Orders], Job]) -> None:
    port = Orders(go(steps=None, least_ns=20_000_000), End(until=0))
    job(port).train(lambda _done: time.sleep(0.003))
    (found,) = port.slices
    assert found.t1_ns - found.t0_ns >= 20_000_000
    assert found.steps == found.done_after - found.done_before >= 1


def test_a_planted_overhead_is_in_every_step_and_in_no_other_slice(
    job: Callable[[Orders], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    burn, burnt_at_ns = pacer_module._burn, []
    monkeypatch.setattr(pacer_module, "_burn", lambda ns: (burnt_at_ns.append(time.perf_counter_ns()), burn(ns)))
    port = Orders(go(steps=4, burn_ns=10_000_000), go(steps=4), End(until=20))
    job(port).train()
    planted, plain = port.slices
    assert planted.t1_ns - planted.t0_ns >= 4 * 10_000_000
    assert [planted.t0_ns < at_ns < planted.t1_ns < plain.t0_ns for at_ns in burnt_at_ns] == [True] * 4


def test_reporting_belongs_to_the_slice_that_begins_with_its_call(
    job: Callable[[Orders], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call passes its report on, slowly: a slice of n steps holds n of them, as does the guard of n steps."""
    monkeypatch.setattr("glasshouse.task.handle._REPORT_EVERY_S", 0.0)
    port = Orders(go(until=2, steps=3), End(until=0))
    here = job(port)
    send = here.channel.send

    sent_at_ns: list[int] = []

    def slowly(message: dict[str, Any]) -> None:
        sent_at_ns.append(time.perf_counter_ns())
        time.sleep(0.01)
        send(message)

    monkeypatch.setattr(here.channel, "send", slowly)
    here.train()
    (found,) = port.slices
    inside = [at_ns for at_ns in sent_at_ns if found.t0_ns < at_ns < found.t1_ns]
    assert [sent_at_ns.index(at_ns) for at_ns in inside] == [2, 3, 4], "those of the guard are not among them"
    assert 30_000_000 <= found.hooks_ns <= found.t1_ns - found.t0_ns


def test_time_in_which_it_stands_is_none_for_the_tasks_clock(job: Callable[[Orders], Job]) -> None:
    port = Orders(*[go(steps=2)] * 4, End(until=0), standing_s=0.4)
    here = job(port)
    before, begun_ns = here.task.running_s(), time.perf_counter_ns()
    here.train(lambda _done: 0.5)
    worked_us = (time.perf_counter_ns() - begun_ns) / 1000 - 5 * 400_000
    reported = [message for message in here.channel.messages if message["type"] == "progress"]
    assert reported[-1]["elapsed_us"] <= worked_us
    assert (here.task.running_s() - before) * 1e6 <= worked_us
    assert here.task.last_report[4] <= worked_us


@pytest.mark.parametrize(("loss", "finite"), [(0.5, True), (None, True), (math.nan, False), (math.inf, False)])
def test_the_last_loss_of_a_slice_is_looked_at_after_its_end(
    job: Callable[[Orders], Job], loss: float | None, finite: bool
) -> None:
    port = Orders(go(steps=2), End(until=0))
    job(port).train(lambda done: loss if done == 1 else 0.1)
    assert [one.loss_finite for one in port.slices] == [finite]


@pytest.mark.parametrize("end", [None, ConnectionResetError(), EOFError()], ids=["no order", "reset", "gone"])
def test_when_no_order_comes_the_job_stops_as_its_owner_would_stop_it(
    job: Callable[[Orders], Job], end: Exception | None
) -> None:
    here = job(Orders(go(steps=2), *([] if end is None else [end])))
    assert here.train() == 2
    assert here.stopped == 1


def test_an_order_that_is_none_is_an_error_of_the_job(job: Callable[[Orders], Job]) -> None:
    with pytest.raises(FormatError):
        job(Orders(FormatError("schema-invalid", "no order"))).train()  # type: ignore[arg-type]


def test_a_job_that_is_stopped_in_the_middle_of_a_slice_stands_no_more(job: Callable[[Orders], Job]) -> None:
    port = Orders(go(steps=5))
    here = job(port)

    def step(done: int) -> None:
        here.channel.stopping = here.channel.stopping or done == 2

    assert here.train(step) == 3
    for done in range(3, 9):
        here.task.progress(done)
    assert (port.reports, here.stopped) == ([Parked(done=0)], 0)


def test_a_script_that_begins_with_its_first_step_has_done_one(job: Callable[[Orders], Job]) -> None:
    port = Orders(go(steps=2), End(until=0))
    here = job(port)
    for done in (32, 64, 96):  # it counts examples; a step is one report
        here.task.progress(done)
    assert port.reports[0] == Parked(done=1)
    assert [(one.done_before, one.done_after) for one in port.slices] == [(1, 3)]


def test_the_reports_of_other_threads_are_no_steps(job: Callable[[Orders], Job]) -> None:
    port = Orders(go(steps=2), End(until=0))
    here = job(port)

    def step(_done: int) -> None:
        thread = threading.Thread(target=lambda: [here.task.progress(7) for _ in range(9)])
        thread.start()
        thread.join()

    assert here.train(step) == 2
    assert [one.steps for one in port.slices] == [2]


# Phases.


def test_the_phases_of_a_slice_add_up_to_it_and_cost_nothing_when_nobody_asks(job: Callable[[Orders], Job]) -> None:
    port = Orders(go(until=2, steps=3, stamps=True), go(steps=3), End(until=0))
    here = job(port)
    stamps, asked = here.task.stamps, []

    def step(_done: int) -> None:
        asked.append(stamps.on)
        if stamps.on:
            stamps("forward")
        time.sleep(0.004)
        if stamps.on:
            stamps("optimizer")
        time.sleep(0.002)
        if stamps.on:
            stamps("residual")

    here.train(step)
    timed, plain = port.slices
    assert timed.phases is not None
    assert list(timed.phases) == ["forward", "optimizer", "residual"]
    assert timed.phases["forward"] >= 3 * 4_000_000, "and none of the guard's"
    assert timed.phases["optimizer"] >= 3 * 2_000_000
    assert plain.phases is None
    assert asked == [True] * 5 + [False] * 3
    stamps("nowhere")  # nobody looks


def test_a_phase_that_there_is_not_is_said_by_name(job: Callable[[Orders], Job]) -> None:
    here = job(Orders(go(stamps=True)))
    with pytest.raises(UsageError, match="'warmup'"):
        here.train(lambda _done: here.task.stamps("warmup"))


class Gpu:
    """`torch.cuda`, as far as it is used here; its time passes by one millisecond an event.

    Attributes:
        made: events so far.
        waits: how often it was waited for.
    """

    def __init__(self) -> None:
        self.made, self.waits, self.now_ms = 0, 0, 0.0

    def is_initialized(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.waits += 1

    def max_memory_allocated(self) -> int:
        return 1 << 30

    def Event(self, *, enable_timing: bool) -> GpuEvent:  # noqa: N802
        assert enable_timing
        self.made += 1
        return GpuEvent(self)


class GpuEvent:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self.at_ms = gpu, 0.0

    def record(self) -> None:
        self._gpu.now_ms += 1.0
        self.at_ms = self._gpu.now_ms

    def elapsed_time(self, later: GpuEvent) -> float:
        return later.at_ms - self.at_ms


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=gpu))
    return gpu


def test_a_gpu_is_waited_for_before_each_look_at_the_clock(job: Callable[[Orders], Job], gpu: Gpu) -> None:
    port = Orders(go(steps=2), go(steps=2), End(until=0))
    job(port).train()
    assert gpu.waits == 4
    assert [one.device_bytes for one in port.slices] == [1 << 30] * 2
    assert [one.wait_ppm for one in port.slices] == [None] * 2


def test_on_a_gpu_phases_are_events_that_were_made_before(job: Callable[[Orders], Job], gpu: Gpu) -> None:
    port = Orders(go(until=1, steps=2, stamps=True), End(until=0))
    here = job(port)
    made: list[int] = []

    def step(_done: int) -> None:
        made.append(gpu.made)
        here.task.stamps("forward")
        here.task.stamps("residual")

    here.train(step)
    (found,) = port.slices
    assert found.phases == {"forward": 2_000_000, "residual": 3_000_000}
    assert found.wait_ppm is not None
    assert set(made) == {gpu.made}, "none was made while it ran"


def test_more_marks_than_events_make_more_events() -> None:
    gpu = Gpu()
    phases = Phases(gpu, steps=1)
    before = gpu.made
    phases.begin()
    for _ in range(before):
        phases.mark("data")
    phases.end()
    assert gpu.made == before + 2
    spent = phases.spent_ns()
    assert set(spent) == {"data", "residual"}
    assert spent["data"] >= before * 1_000_000


def test_a_framework_that_does_not_use_its_gpu_is_not_waited_for(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "is_initialized", lambda: False)
    pacer_module.wait_for_device()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())  # in the middle of its import
    pacer_module.wait_for_device()
    assert gpu.waits == 0


# What is timed beside the steps.


def test_reading_an_input_is_timed_and_reads_the_same(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_bytes(b"one\ntwo\n" * 50_000)
    hooks = Hooks()
    inputs = TimedInputs(FolderInputs(tmp_path), hooks)
    assert (inputs.names, inputs.size("lines.txt")) == (("lines.txt",), 400_000)
    with inputs.open("lines.txt") as stream:
        assert stream.readline() == b"one\n"
        stream.seek(-4, io.SEEK_END)
        assert (stream.read(), stream.tell()) == (b"two\n", 400_000)
    opened = hooks.ns
    assert opened > 0
    buffer = bytearray(7)
    assert inputs.read_into("lines.txt", buffer, 4) == 7
    assert (bytes(buffer), hooks.ns > opened) == (b"two\none", True)
    with pytest.raises(UsageError):
        inputs.open("none")


def test_only_the_thread_that_trains_counts(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(1 << 16))
    hooks = Hooks()
    inputs = TimedInputs(FolderInputs(tmp_path), hooks)
    thread = threading.Thread(target=lambda: inputs.read_into("a", bytearray(1 << 16), 0))
    thread.start()
    thread.join()
    assert hooks.ns == 0


def test_a_raw_workers_channel_must_be_one(tmp_path: Path) -> None:
    import socket

    ours, theirs = socket.socketpair()
    with ours:
        for descriptor in (theirs.detach(), 999):
            with pytest.raises(UsageError, match="pace-fd"):
                SocketPort(descriptor)
