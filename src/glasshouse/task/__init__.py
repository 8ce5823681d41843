"""What a training script sees: open inputs, report progress, save outputs.

The same code runs under both legs of a measurement: *raw* (plain folder in, folder out) and *protected* (keys in secret
memory, inputs opened from the sealed package on demand, everything that leaves goes through the agent). Laws: this room
never imports a training framework, and never holds more keys than those of the assets that the worker may read.
"""

from __future__ import annotations

from glasshouse.task.handle import Task
from glasshouse.task.session import current

__all__ = ["Task", "current"]
