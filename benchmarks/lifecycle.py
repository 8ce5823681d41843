"""What protection adds to a run beside the training itself: ``make bench-lifecycle``.

Two measurements, both through the command line and without a stand-in. Full runs of a job that trains no longer than a
moment: the lifecycle of their receipts, and in turn with them the same job in the clear, and a plain copy of its data.
Then one longer run with the live view in a terminal: memory and processor time of every process but the worker. The
runtime's steps are timed by the runtime; the import of frameworks by the worker is told apart, as a plain run pays
for it too. Only Linux, and as root: memory is read from /proc.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.kept import Bar, finish, kept, options
from glasshouse.evidence.receipt import LIFECYCLE
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.supervise.follow import Seen
from glasshouse.wire.states import State

PACKAGE_BYTES = 10 << 20
BARS = {"total_without_imports_s": Bar(2.0), "pss_mib": Bar(150.0), "cpu_percent": Bar(0.5)}
TIMEOUT_S = 120.0
SAMPLE_S = 5.0
SETTLE_S = 3.0  # the start of a run is not its training: imports and page faults are over after a moment
PROGRAM = (sys.executable, "-m", "glasshouse.cli")
WORKER = "glasshouse.workloads.worker"
SCRIPT = """\
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
JOB = """\
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


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--runs", type=int, default=5, help="full runs, after one that is thrown away")
    parser.add_argument("--train-seconds", type=float, default=60.0, help="of the longer run; 0 leaves it out")
    asked = parser.parse_args()
    if asked.runs < 1 or 0 < asked.train_seconds < 2 * SETTLE_S or not sys.platform.startswith("linux"):
        parser.error(f"this takes Linux, at least one run, and at least {2 * SETTLE_S:g} s of training or none")
    with tempfile.TemporaryDirectory(prefix="glasshouse-bench-") as folder:
        stage = Stage(Path(folder))
        _, *runs = [stage.once() for _ in range(asked.runs + 1)]
        training = stage.train(asked.train_seconds) if asked.train_seconds else None
    return finish(result(runs, training), asked.output)


def result(runs: Sequence[dict[str, float]], training: dict[str, Any] | None) -> dict[str, Any]:
    """Return what is kept: medians over the runs, ratios of these medians, and the longer run's processes."""
    numbers = {name: round(statistics.median(run[name] for run in runs), 4) for name in runs[0]}
    for name, (protected, plain) in {
        "command_to_raw_command": ("command_s", "raw_command_s"),
        "total_to_raw_without_imports": ("total_without_imports_s", "raw_without_imports_s"),
    }.items():
        numbers[name] = round(numbers[protected] / numbers[plain], 3)
    bars = {"total_without_imports_s": BARS["total_without_imports_s"]}
    if training is not None:
        bars = BARS
        for unit in ("pss_mib", "cpu_percent"):
            each = {name: found[unit] for name, found in training["processes"].items()}
            numbers |= {unit: round(sum(each.values()), 3), **{f"{unit} of {name}": each[name] for name in each}}
    return kept(numbers, bars, package_bytes=PACKAGE_BYTES, runs=list(runs), training=training)


class Stage:
    """A state home and a sealed job in a folder that is thrown away."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._home = folder, Home(path=folder / "home")
        (folder / "train.py").write_text(SCRIPT)
        (folder / "asset.bin").write_bytes(os.urandom(PACKAGE_BYTES))
        self._ask("init")
        self._quick = self._seal("quick", 0.0)

    def once(self) -> dict[str, float]:
        """Run the quick job protected, then copy its data and run it in the clear; return what each took."""
        summary, command_s = self._run(self._quick)
        if summary["receipt"]["verdict"] != "good":
            raise RuntimeError(f"a measured run's receipt is {summary['receipt']['verdict']}")
        steps = {f"{step}_s": summary["lifecycle_s"][step] or 0.0 for step in LIFECYCLE}
        imports_s = summary["training_imports_s"] or 0.0
        began = time.perf_counter()
        shutil.copyfile(self._folder / "asset.bin", self._folder / "copied.bin")
        copy_s = time.perf_counter() - began
        raw, raw_command_s = self._run(self._folder / "quick.toml", "--raw")
        return {
            **steps,
            "imports_s": imports_s,
            "total_without_imports_s": steps["total_s"] - imports_s,
            "command_s": command_s,
            "copy_s": copy_s,
            "raw_command_s": raw_command_s,
            "raw_without_imports_s": raw["total_s"] - (raw["training_imports_s"] or 0.0),
        }

    def train(self, seconds: float) -> dict[str, Any]:
        """Train for a while with the live view in a terminal, and sample every process but the worker."""
        package = self._seal("long", seconds + SETTLE_S + 2.0)
        with _terminal([*PROGRAM, "run", str(package), "--home", str(self._home.path)]) as command:
            folder = self._running()
            time.sleep(SETTLE_S)
            watched = _watched(command, folder)
            began, before = time.monotonic(), {name: cpu_s(process) for name, process in watched.items()}
            peaks = {name: _pss_mib(process) for name, process in watched.items()}
            while (left := began + seconds - time.monotonic()) > 0:
                time.sleep(min(SAMPLE_S, left))
                peaks = {name: max(peak, _pss_mib(watched[name])) for name, peak in peaks.items()}
            spent = {name: cpu_s(process) - before[name] for name, process in watched.items()}
            elapsed_s = time.monotonic() - began
            if Seen.of(folder.events).state is not State.RUNNING:
                raise RuntimeError("the run ended while it was sampled")
        return {
            "seconds": round(elapsed_s, 1),
            "processes": {
                name: {"pss_mib": round(peaks[name], 1), "cpu_percent": round(100 * spent[name] / elapsed_s, 3)}
                for name in watched
            },
        }

    def _running(self) -> RunFolder:
        """Wait until the newest run trains."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            time.sleep(0.2)
            newest = max(RunFolder.all(self._home), key=lambda folder: folder.load().created_us, default=None)
            if newest is not None and newest.load().outcome is None and Seen.of(newest.events).state is State.RUNNING:
                return newest
        raise RuntimeError("the run to be sampled did not train")

    def _seal(self, name: str, seconds: float) -> Path:
        job, package = self._folder / f"{name}.toml", self._folder / f"{name}.sealed"
        job.write_text(JOB.format(seconds=seconds))
        self._ask("seal", str(job), "-o", str(package))
        return package

    def _run(self, job: Path, *arguments: str) -> tuple[dict[str, Any], float]:
        began = time.perf_counter()
        summary = self._ask("run", str(job), *arguments)
        seconds = time.perf_counter() - began
        if summary["outcome"] != "completed":
            raise RuntimeError(f"a measured run ended as {summary['outcome']}")
        return summary, seconds

    def _ask(self, *arguments: str) -> dict[str, Any]:
        command = [*PROGRAM, *arguments, "--home", str(self._home.path), "--json"]
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            raise RuntimeError(f"glasshouse {arguments[0]} failed: {(done.stdout + done.stderr).decode()[-500:]}")
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer


@contextlib.contextmanager
def _terminal(command: list[str]) -> Iterator[psutil.Process]:
    """Start a command in a terminal of its own, whose screen is read and thrown away; at the end let it finish."""
    screen, slave = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    reading = subprocess.Popen(["cat"], stdin=screen, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
    )
    os.close(slave)
    os.close(screen)
    try:
        yield psutil.Process(process.pid)
        process.wait(TIMEOUT_S)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(TIMEOUT_S)
        reading.kill()
        reading.wait()


def _watched(command: psutil.Process, folder: RunFolder) -> dict[str, psutil.Process]:
    """Return every process of a run but its worker, by what it is."""
    agent = folder.load().agent
    if agent is None:
        raise RuntimeError("a run that trains without an agent")
    serving = json.loads((folder.path.parent.parent / "broker" / "serving.json").read_text())
    found = {
        "command": command,
        "agent": psutil.Process(agent.pid),
        "broker": psutil.Process(serving["process"]["pid"]),
    }
    children = found["agent"].children(recursive=True)
    others = [child for child in children if WORKER not in " ".join(child.cmdline())]
    if len(others) == len(children):
        raise RuntimeError("a run that trains without a worker")
    return found | {f"agent's child {number}": child for number, child in enumerate(others, 1)}


def _pss_mib(process: psutil.Process) -> float:
    pss: int = process.memory_full_info().pss
    return pss / 2**20


def cpu_s(process: psutil.Process) -> float:
    # In nanoseconds: /proc/PID/stat counts in hundredths of a second, too coarse for a budget of half a percent.
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


if __name__ == "__main__":
    sys.exit(main())
