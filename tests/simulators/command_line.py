"""A user at a shell: a folder with a job, a state home, and `glasshouse` as a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulators import forked_commands

__all__ = ["CANARY", "SCRIPT", "SUM", "Answer", "Shell"]

CANARY = "patient-4711-canary"

SCRIPT = """\
import sys, time
from glasshouse import task

job, steps = task.current(), int(sys.argv[1])
rows = open("rows.csv").read().splitlines()
print("the first row is", rows[0])
for step in range(1, steps + 1):
    time.sleep(0.05)
    job.progress(step, total=steps, loss=1 / step)
    if step == 3 and len(sys.argv) > 2:
        raise SystemExit(sys.argv[2])
job.save_bytes("result.txt", f"{len(rows)} rows, {rows[-1]}".encode())
"""

# Ranks that add up what each has, over sealed connections.
SUM = """
import torch
import torch.distributed as dist

dist.init_process_group("sealed")
value = torch.tensor([float(2 ** dist.get_rank())])
dist.all_reduce(value)
print(f"rank {dist.get_rank()} of {dist.get_world_size()} has {value.item():.0f}")
dist.destroy_process_group()
"""

JOB = """\
workload = "script"
name = "ward-seven"
[inputs]
"train.py" = "train.py"
"rows.csv" = "rows.csv"
[params]
script = "train.py"
arguments = {arguments}
[policy]
assurance = "software"
profile = "{profile}"
max_duration = "5m"
"""


@dataclass(frozen=True)
class Answer:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def object(self) -> dict[str, Any]:
        """The one object on standard output; anything beside it fails the test."""
        found: dict[str, Any] = json.loads(self.out)
        return found

    @property
    def error(self) -> dict[str, str]:
        found: dict[str, str] = self.object["error"]
        return found


class Shell:
    """A user's folder.

    Args:
        folder: an empty folder.
        python: the interpreter that has Glasshouse.
    """

    def __init__(self, folder: Path, *, python: str = sys.executable) -> None:
        self.folder, self.python = folder, python
        self.home = folder / ".glasshouse"
        # Everything in one place: the folder is gone with the test.
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("GLASSHOUSE")} | {
            "GLASSHOUSE_HOME": str(self.home)
        }
        (folder / "train.py").write_text(SCRIPT)
        (folder / "rows.csv").write_text("\n".join(f"{CANARY},{number}" for number in range(500)))

    def job(self, name: str, *arguments: str, profile: str = "standard") -> Path:
        """Write a job file."""
        path = self.folder / f"{name}.toml"
        path.write_text(JOB.format(arguments=json.dumps(list(arguments)), profile=profile))
        return path

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command and return at once."""
        return self._start([self.python, "-m", "glasshouse.cli", *arguments])

    def start_with(self, program: Path, *arguments: str) -> subprocess.Popen[str]:
        """Start a command by a program of the tests' own, and return at once."""
        return self._start([self.python, str(program), *arguments])

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ask(self, *arguments: str, timeout_s: float = 180.0) -> Answer:
        """Run a command to its end."""
        if self.python != sys.executable:
            return self.end(self.start(*arguments), timeout_s=timeout_s)
        code, out, err = forked_commands.run(arguments, self.folder, self.environment, timeout_s=timeout_s)
        return Answer(code=code, out=out, err=err)

    def end(self, process: subprocess.Popen[str], *, timeout_s: float = 180.0) -> Answer:
        """Wait for a command."""
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=timeout_s)
            raise
        return Answer(code=process.returncode, out=out, err=err)

    def newest(self) -> dict[str, Any] | None:
        """Return the newest run as `status --json` has it, read from its own record."""
        records = [json.loads(path.read_text()) for path in (self.home / "runs").glob("*/run.json")]
        return max(records, key=lambda record: record["created_us"], default=None)

    def wait_until_running(self, before: set[str] | None = None, *, timeout_s: float = 120.0) -> dict[str, Any]:
        """Wait until a run that is not in `before` trains, and return its record."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            record = self.newest()
            if record and record["run_id"] not in (before or set()) and record["phase"] == "running":
                events = self.home / "runs" / record["run_id"] / "out" / "events.log"
                if events.exists() and b'"type":"progress"' in events.read_bytes():
                    return record
            time.sleep(0.05)
        raise AssertionError(f"no run began to train: {self.newest()}")

    def known(self) -> set[str]:
        """Return the ids of the runs that are there."""
        return {path.name for path in (self.home / "runs").iterdir()} if (self.home / "runs").exists() else set()

    def left_running(self, within_s: float = 10.0) -> list[str]:
        """Return the command lines of processes that work for this folder and do not end by themselves in time."""
        deadline = time.monotonic() + within_s
        while (found := self._running()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _running(self) -> list[str]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(self.folder) in line and int(path.parent.name) != os.getpid():
                found.append(line)
        return found
