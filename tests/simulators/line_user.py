"""A user whose job makes checkpoints: what it trains counts its steps, and says where it began."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from simulators.command_line import Shell
from tools.waiting import wait_for

__all__ = ["add_checkpoints", "kill_runtime", "wait_for_checkpoint"]

# Saves as often as it may, which is at once and then every ten seconds.
COUNTS = """\
import pathlib, sys, time
from glasshouse import task

job, steps, state = task.current(), int(sys.argv[1]), pathlib.Path("state/count")
begun = 0 if job.resume is None else int((job.resume.path / "count").read_text())
print("begun at", begun, flush=True)
state.parent.mkdir(exist_ok=True)
for step in range(begun + 1, steps + 1):
    state.write_text(str(step))
    time.sleep(0.05)
    job.progress(step, total=steps)
    job.save_checkpoint("state", step=step)
job.save_bytes("result.txt", f"{begun} {steps}".encode())
"""


def add_checkpoints(shell: Shell, path: Path, *, retries: int = 0) -> Path:
    """Have a job file's job count, and make checkpoints."""
    (shell.folder / "train.py").write_text(COUNTS)
    head, _, machine = path.read_text().partition("[machine]")
    table = f'\n[checkpoints]\nevery = "10s"\nretries = {retries}\n'
    path.write_text(head + table + (f"[machine]{machine}" if machine else ""))
    return path


def wait_for_checkpoint(shell: Shell, run: str, count: int = 1) -> None:
    """Wait until so many checkpoints of a run were counted, and that is in its log here."""
    log = shell.home / "runs" / run / "out" / "events.log"
    wait_for(lambda: log.exists() and log.read_bytes().count(b'"type":"checkpoint"') >= count)


def kill_runtime(shell: Shell, run: str) -> None:
    """Kill the runtime of a run on this machine: it wipes nothing, and leaves no receipt."""
    record: dict[str, Any] = json.loads((shell.home / "runs" / run / "run.json").read_text())
    os.kill(record["agent"]["pid"], signal.SIGKILL)
