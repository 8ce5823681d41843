"""Measures what protection adds to a run: time per step over full runs, memory and CPU while it trains.

Everything is real: the command as a person types it, in a terminal of its own, with its broker, runtime and
worker. The package holds 10 MiB. Beside it stands what one would do instead: the same job in the clear, and a plain
copy of its inputs. Laws: protected and raw runs take turns; the first of each is a warm-up and is kept apart; the
numbers are medians; every run's own numbers are in the result.
"""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from glasshouse.bench.processes import Usage, children_of, usage
from glasshouse.errors import Code, InternalError, UsageError
from glasshouse.evidence.receipt import LIFECYCLE
from glasshouse.jobs.follow import Seen
from glasshouse.jobs.home import Home
from glasshouse.jobs.rundir import RunFolder
from glasshouse.wire.states import State

__all__ = ["run"]

PACKAGE_BYTES = 10 << 20
BARS = {"total_without_imports_s": 2.0, "pss_mib": 150.0, "cpu_percent": 0.5}
GOAL_S = 1.0
_COMMAND_TIMEOUT_S = 120.0
_SAMPLE_S = 5.0
# The start of a run is not its training: imports and page faults are over after a moment.
_SETTLE_S = 3.0
_WORKER = b"glasshouse.workloads.worker"
_SCRIPT = """\
import sys, time
from glasshouse import task
job, seconds = task.current(), float(sys.argv[1])
with job.open("asset.bin") as asset:
    asset.read(1 << 20)
began, step = time.monotonic(), 0
while True:
    step += 1
    job.progress(step, loss=1 / step)
    if time.monotonic() - began >= seconds:
        break
    time.sleep(0.05)
job.save_bytes("result.txt", str(step).encode())
"""
_JOB = """\
workload = "script"
name = "lifecycle"
[inputs]
"train.py" = "train.py"
"asset.bin" = "asset.bin"
[params]
script = "train.py"
arguments = ["{seconds}"]
[policy]
assurance = "software"
profile = "standard"
max_duration = "30m"
"""


def run(*, runs: int = 5, train_s: float = 60.0) -> dict[str, Any]:
    """Measure full runs, then one longer training.

    Args:
        runs: how many runs the medians are over, beside a warm-up.
        train_s: how long to train while memory and CPU are sampled; 0 leaves that out.

    Returns:
        `lifecycle_s`, `imports_s`, `total_without_imports_s`, `command_s`, `instead`, `ratios`, `training`, `bars`
        and every run's numbers.

    Raises:
        UsageError: a machine without Linux, or arguments that measure nothing.
        InternalError: a run that did not complete.
    """
    if runs < 1 or 0 < train_s < 2 * _SETTLE_S:
        raise UsageError(Code.USAGE, f"the benchmark takes at least one run and {2 * _SETTLE_S:.0f} s of training")
    if not sys.platform.startswith("linux"):
        raise UsageError(Code.PLATFORM, "the benchmark reads /proc: it needs Linux")
    with tempfile.TemporaryDirectory(prefix="glasshouse-bench-") as name:
        bench = _Bench(Path(name))
        warm_up, *measured = [(bench.once(), bench.instead()) for _ in range(runs + 1)]
        training = bench.training(train_s) if train_s else None
    return _report(warm_up, measured, training)


class _Bench:
    """A state home and a sealed job in a folder that is thrown away."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._home = Home(path=folder / "home")
        (folder / "train.py").write_text(_SCRIPT)
        (folder / "asset.bin").write_bytes(os.urandom(PACKAGE_BYTES))
        self._ask("init")
        self._quick = self._seal("quick", 0.0)

    def once(self) -> dict[str, Any]:
        """Run the quick job and return its summary, with the time that the command took."""
        began = time.monotonic()
        summary = self._ask("run", str(self._quick))
        summary["command_s"] = time.monotonic() - began
        if summary["outcome"] != "completed" or summary["receipt"]["verdict"] != "good":
            raise InternalError(Code.INTERNAL, f"a measured run ended as {summary['outcome']}")
        return summary

    def instead(self) -> dict[str, float]:
        """Copy the inputs as `cp` does, and run the same job in the clear; return what each took."""
        began = time.monotonic()
        shutil.copyfile(self._folder / "asset.bin", self._folder / "copied.bin")
        copied = time.monotonic()
        summary = self._ask("run", str(self._folder / "quick.toml"), "--raw")
        command_s = time.monotonic() - copied
        if summary["outcome"] != "completed":
            raise InternalError(Code.INTERNAL, f"a raw run ended as {summary['outcome']}")
        imports_s = summary["training_imports_s"] or 0.0
        return {
            "copy": copied - began,
            "raw_command": command_s,
            "raw_without_imports": summary["total_s"] - imports_s,
        }

    def training(self, seconds: float) -> dict[str, Any]:
        """Train for a while with the live view in a terminal, and sample every process but the worker."""
        package = self._seal("long", seconds + _SETTLE_S + 2.0)
        terminal = _Terminal([*_program(), "run", str(package), "--home", str(self._home.path)])
        try:
            folder = self._running(terminal)
            time.sleep(_SETTLE_S)
            return _sample(terminal.pid, folder, seconds)
        finally:
            terminal.end()

    def _running(self, terminal: _Terminal) -> RunFolder:
        """Wait until the newest run trains."""
        deadline = time.monotonic() + _COMMAND_TIMEOUT_S
        while time.monotonic() < deadline and terminal.alive:
            newest = max(RunFolder.all(self._home), key=lambda folder: folder.load().created_us)
            if newest.load().outcome is None and Seen.of(newest.events).state is State.RUNNING:
                return newest
            time.sleep(0.2)
        raise InternalError(Code.INTERNAL, f"the run to be sampled did not train: {terminal.tail}")

    def _seal(self, name: str, seconds: float) -> Path:
        job, package = self._folder / f"{name}.toml", self._folder / f"{name}.sealed"
        job.write_text(_JOB.format(seconds=seconds))
        self._ask("seal", str(job), "-o", str(package))
        return package

    def _ask(self, *arguments: str) -> dict[str, Any]:
        command = [*_program(), *arguments, "--home", str(self._home.path), "--json"]
        done = subprocess.run(command, capture_output=True, timeout=_COMMAND_TIMEOUT_S, check=False)
        try:
            answer: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            answer = {"error": {"message": done.stderr.decode(errors="replace")[-500:]}}
        if "error" in answer:
            raise InternalError(Code.INTERNAL, f"glasshouse {arguments[0]} failed: {answer['error']['message']}")
        return answer


def _program() -> list[str]:
    return [sys.executable, "-m", "glasshouse.cli"]


class _Terminal:
    """A command in a terminal of its own, whose output nobody reads but us."""

    def __init__(self, command: list[str]) -> None:
        self._master, slave = pty.openpty()
        environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
        self._process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        self.tail = ""
        self._drain = threading.Thread(target=self._read, daemon=True)
        self._drain.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """Wait for the command, or stop it."""
        try:
            self._process.wait(_SETTLE_S + 10.0)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(_COMMAND_TIMEOUT_S)
        self._drain.join(5.0)
        os.close(self._master)

    def _read(self) -> None:
        while self.alive:
            ready, _, _ = select.select([self._master], [], [], 0.5)
            try:
                data = os.read(self._master, 65536) if ready else b""
            except OSError:
                return
            self.tail = (self.tail + data.decode(errors="replace"))[-2000:]


def _sample(command: int, folder: RunFolder, seconds: float) -> dict[str, Any]:
    """Sample memory now and then, and CPU time over the whole stretch."""
    watched = _watched(command, folder)
    began, before = time.monotonic(), {name: usage(pid) for name, pid in watched.items()}
    peaks = {name: _pss(found) for name, found in before.items()}
    while (left := began + seconds - time.monotonic()) > 0:
        time.sleep(min(_SAMPLE_S, left))
        for name, pid in watched.items():
            peaks[name] = max(peaks[name], _pss(usage(pid)))
    after, elapsed = {name: usage(pid) for name, pid in watched.items()}, time.monotonic() - began
    spent = {name: _spent(before[name], after[name]) for name in watched}
    return {
        "seconds": round(elapsed, 1),
        "processes": {
            name: {"pss_mib": round(peaks[name] / 2**20, 1), "cpu_percent": round(100 * spent[name] / elapsed, 3)}
            for name in watched
        },
        "pss_mib": round(sum(peaks.values()) / 2**20, 1),
        "cpu_percent": round(100 * sum(spent.values()) / elapsed, 3),
        "worker_is_running": _worker_runs(folder),
    }


def _watched(command: int, folder: RunFolder) -> dict[str, int]:
    """Return every process of a run but its worker, by what it is."""
    record = folder.load()
    assert record.agent is not None  # noqa: S101 - a run that trains has one
    found = {"command": command, "agent": record.agent.pid}
    serving = json.loads((folder.path.parent.parent / "broker" / "serving.json").read_text())
    found["broker"] = serving["process"]["pid"]
    others = 0
    for pid in children_of(record.agent.pid):
        if _WORKER not in _command_line(pid):
            others += 1
            found[f"agent's child {others}"] = pid
    return found


def _worker_runs(folder: RunFolder) -> bool:
    record = folder.load()
    agent = record.agent
    return agent is not None and any(_WORKER in _command_line(pid) for pid in children_of(agent.pid))


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _pss(found: Usage | None) -> int:
    if found is None or found.pss_bytes is None:
        raise InternalError(Code.PLATFORM, "a process's memory cannot be read: measure as root")
    return found.pss_bytes


def _spent(before: Usage | None, after: Usage | None) -> float:
    if before is None or after is None:
        raise InternalError(Code.INTERNAL, "a process ended while it was sampled")
    return after.cpu_s - before.cpu_s


def _report(
    warm_up: tuple[dict[str, Any], dict[str, float]],
    measured: list[tuple[dict[str, Any], dict[str, float]]],
    training: dict[str, Any] | None,
) -> dict[str, Any]:
    each = [_numbers(summary) | instead for summary, instead in measured]
    medians = {name: _median([numbers[name] for numbers in each]) for name in each[0]}
    found = {"total_without_imports_s": medians["total_without_imports"]}
    if training is not None:
        found |= {"pss_mib": training["pss_mib"], "cpu_percent": training["cpu_percent"]}
    bars = {name: {"at_most": BARS[name], "found": value, "met": value <= BARS[name]} for name, value in found.items()}
    bars["total_without_imports_s"]["goal"] = GOAL_S
    return {
        "package_bytes": PACKAGE_BYTES,
        "runs": len(measured),
        "lifecycle_s": {step: medians[step] for step in LIFECYCLE},
        "imports_s": medians["imports"],
        "total_without_imports_s": medians["total_without_imports"],
        "command_s": medians["command"],
        "instead": {f"{name}_s": medians[name] for name in ("copy", "raw_command", "raw_without_imports")},
        "ratios": {
            "command_to_raw_command": round(medians["command"] / medians["raw_command"], 3),
            "total_to_raw_without_imports": round(medians["total_without_imports"] / medians["raw_without_imports"], 3),
            "total_to_copy": round(medians["total_without_imports"] / max(medians["copy"], 1e-6), 1),
        },
        "training": training,
        "bars": bars,
        "each": each,
        "warm_up": _numbers(warm_up[0]) | warm_up[1],
    }


def _numbers(summary: dict[str, Any]) -> dict[str, float]:
    steps = {step: summary["lifecycle_s"][step] or 0.0 for step in LIFECYCLE}
    imports = summary["training_imports_s"] or 0.0
    return steps | {
        "imports": imports,
        "total_without_imports": steps["total"] - imports,
        "command": summary["command_s"],
    }


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 4)
