"""The small parts of the agent: its arguments, how an end is judged, clocks, what it says of the machine."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glasshouse.attestation.claims import Gpu
from glasshouse.errors import (
    Code,
    ExitCode,
    InternalError,
    PackageError,
    PeerError,
    RefusedError,
    RunError,
    UsageError,
)
from glasshouse.runtime import gpus
from glasshouse.runtime.confine import memory_limits
from glasshouse.runtime.run.run_state import Ending, StepTimes, process_start_us
from glasshouse.runtime.run.start_processes import AgentOptions, parse
from glasshouse.wire.states import Outcome


def test_the_command_line() -> None:
    words = ["--out", "o", "--max-seconds", "7", "--package", "p"]
    assert parse(words) == AgentOptions(package="p", out="o", max_seconds=7)
    assert parse(words[:2] + words[4:]) == AgentOptions(package="p", out="o")
    assert parse([*words, "--ranks", "2"]) == AgentOptions(package="p", out="o", max_seconds=7, ranks=2)
    peers = ("10.0.0.7:4000", "machine-2.example:65535", "[fe80::1]:1")
    assert parse([*words, "--peers", ",".join(peers)]).peers == peers


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--package", "p"],
        ["--package", "p", "--out"],
        ["--package", "p", "--out", "o", "--out", "o"],
        ["--package", "p", "--out", "o", "--token", "secret"],
        ["--package", "p", "--out", "o", "--max-seconds", "-1"],
        ["--package", "p", "--out", "o", "--max-seconds", "0"],
        ["--package", "p", "--out", "o", "--ranks", "0"],
        *(
            ["--package", "p", "--out", "o", "--peers", peers]
            for peers in ("", "host", "host:0", "host:65536", "a:1,", "a:1, b:2", "unix:/path", ",".join(65 * ["a:1"]))
        ),
        ["--package", "p", "--out", "o", "--ranks", "two"],
        ["--package", "p", "--out", "o", "--ranks", "2", "--ranks", "2"],
        ["--package", "p", "--out", "o", "--pace-fd", "7"],  # nothing outside paces a run
        ["--package", "p", "--out", "o", "--max-seconds", "1e9"],
        ["--package=p", "--out=o"],
    ],
)
def test_any_other_command_line_is_refused_without_repeating_it(words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse(words)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "outcome", "code", "exit_code"),
    [
        (RefusedError(Code.RELEASE_BUDGET, ""), Outcome.REFUSED, Code.RELEASE_BUDGET, ExitCode.REFUSED),
        (RefusedError(Code.HARDENING_MISSING, ""), Outcome.REFUSED, Code.HARDENING_MISSING, ExitCode.REFUSED),
        (RunError(Code.INTERRUPTED, ""), Outcome.INTERRUPTED, Code.INTERRUPTED, ExitCode.INTERRUPTED),
        (RunError(Code.DEBUGGER, ""), Outcome.FAILED, Code.DEBUGGER, ExitCode.RUN_FAILED),
        (PeerError(Code.BROKER_UNTRUSTED, ""), Outcome.FAILED, Code.BROKER_UNTRUSTED, ExitCode.RUN_FAILED),
        (PackageError(Code.PACKAGE_TAMPERED, ""), Outcome.FAILED, Code.PACKAGE_TAMPERED, ExitCode.RUN_FAILED),
        (InternalError(Code.INTERNAL, ""), Outcome.FAILED, Code.INTERNAL, ExitCode.RUN_FAILED),
        (ValueError("Jane Doe"), Outcome.FAILED, Code.INTERNAL, ExitCode.RUN_FAILED),
        (MemoryError(), Outcome.FAILED, Code.INTERNAL, ExitCode.RUN_FAILED),
    ],
)
def test_how_an_error_ends_a_run(error: Exception, outcome: Outcome, code: Code, exit_code: ExitCode) -> None:
    ending = Ending.of(error)
    assert (ending.outcome, ending.code, ending.exit_code) == (outcome, code, exit_code)
    assert "Jane" not in repr(ending)


def test_an_outcome_has_its_exit_code() -> None:
    assert Ending(outcome=Outcome.COMPLETED).exit_code == ExitCode.DONE
    assert Ending(outcome=Outcome.RESIDUE, code=Code.RESIDUE_FOUND).exit_code == ExitCode.RESIDUE


def test_the_process_knows_when_it_was_started() -> None:
    code = (
        "import time; before_us = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000\n"
        "from glasshouse.runtime.run.run_state import process_start_us; print(before_us, process_start_us())"
    )
    begun_us = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    running_us, started_us = map(int, done.stdout.split())
    tick_us = 1_000_000 // os.sysconf("SC_CLK_TCK")
    assert begun_us - tick_us <= started_us <= running_us


def test_that_does_not_rest_on_a_number_of_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    started_us = process_start_us()
    monkeypatch.setattr(os, "getpid", lambda: 1 << 22)  # none in this /proc
    assert process_start_us() == started_us


def test_steps_add_up_and_those_not_reached_are_none() -> None:
    lifecycle = StepTimes(StepTimes.now_us() - 1_000_000)
    for _ in range(2):
        with lifecycle.step("seal_outputs"):
            time.sleep(0.01)
    lifecycle.work_us = 900_000
    told = lifecycle.to_json()
    assert told["attest"] is None
    assert 20_000 <= (told["seal_outputs"] or 0) < 500_000
    # A second ago, less the time of the work itself, and sealing counts although it fell into that time.
    assert 140_000 <= (told["total"] or 0) < 900_000


def test_kills_for_want_of_memory_are_counted_where_the_kernel_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / "memory.events"
    group.write_text("low 0\noom 4\noom_kill 3\n")
    monkeypatch.setattr(memory_limits, "_counters", lambda: [str(tmp_path / "missing"), str(group)])
    assert memory_limits.oom_kills() == 3
    monkeypatch.setattr(memory_limits, "_counters", list)
    assert memory_limits.oom_kills() == 0


def test_this_machine_counts_them_somewhere() -> None:
    assert memory_limits.oom_kills() >= 0
    assert memory_limits._counters()[-1] == "/proc/vmstat"


class Driver:
    """NVIDIA's management library with one GPU, or with none that answers."""

    def __init__(self, *, broken: bool = False) -> None:
        self.broken = broken
        self.closed = False

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 0

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.closed = True

    def __getattr__(self, name: str) -> Callable[..., int]:
        fill: dict[str, Callable[..., None]] = {
            "nvmlSystemGetDriverVersion": lambda text, _size: setattr(text, "value", b"570.1"),
            "nvmlDeviceGetCount_v2": lambda count: setattr(count._obj, "value", 1),
            "nvmlDeviceGetHandleByIndex_v2": lambda _index, _device: None,
            "nvmlDeviceGetName": lambda _device, text, _size: setattr(text, "value", b"NVIDIA H200"),
            "nvmlDeviceGetUUID": lambda _device, text, _size: setattr(text, "value", b"GPU-1"),
            "nvmlDeviceGetMemoryInfo": lambda _device, memory: setattr(memory._obj, "total", 150_000_000_000),
        }
        if name not in fill:
            raise AttributeError(name)

        def answer(*arguments: Any) -> int:
            if self.broken:
                return 9
            fill[name](*arguments)
            return 0

        return answer


def test_a_gpu_is_claimed_as_its_driver_describes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia0").touch()
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: driver)
    expected = Gpu(name="NVIDIA H200", memory_bytes=150_000_000_000, driver="570.1", uuid="GPU-1")
    assert gpus.in_sight(folder=str(tmp_path)) == (expected,)
    assert driver.closed


def test_a_driver_that_does_not_answer_and_a_machine_without_one_claim_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpus.in_sight(folder=str(tmp_path)) == ()
    (tmp_path / "nvidia0").touch()
    assert gpus.in_sight(folder=str(tmp_path), library="no-such-library.so") == ()
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: Driver(broken=True))
    assert gpus.in_sight(folder=str(tmp_path)) == ()
