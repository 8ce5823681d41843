"""What torch calls when it is imported (the `torch.backends` entry point): makes the name `sealed` known to it.

Laws: imports nothing of this room, and never raises: `import torch` would fail with it.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Make `sealed` known to torch.distributed, where torch has it."""
