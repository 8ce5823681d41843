"""What a training script sees: open inputs, report progress, save outputs.

The same code runs under both legs of a measurement: *raw* (plain folder in, folder out) and *protected* (keys in secret
memory, inputs opened from the sealed package on demand, everything that leaves goes through the agent). Laws: this room
never imports a training framework, and never holds more keys than those of the assets that the worker may read.
"""

from __future__ import annotations

import os
from pathlib import Path

from glasshouse.task.channel import EventLines
from glasshouse.task.handle import Task
from glasshouse.task.inputs import FolderInputs

__all__ = ["Task", "current"]

_installed: Task | None = None


def install(task: Task) -> None:
    """Make `task` what `current` returns; the worker does this once."""
    global _installed
    _installed = task


def current() -> Task:
    """Return the task that this process runs.

    A script that is tried out by hand, outside Glasshouse, gets a raw task over the folder named by
    ``GLASSHOUSE_INPUTS`` (else the working directory) and ``GLASSHOUSE_OUTPUTS`` (else ``outputs``).
    """
    global _installed
    if _installed is None:
        inputs = Path(os.environ.get("GLASSHOUSE_INPUTS", ".")).resolve()
        outputs = Path(os.environ.get("GLASSHOUSE_OUTPUTS", "outputs")).resolve()
        _installed = Task(
            params={},
            inputs=FolderInputs(inputs),
            channel=EventLines(None, outputs),
            workspace=outputs,
            folders=(inputs, outputs),
        )
    return _installed
