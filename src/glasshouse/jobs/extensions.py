"""What other distributions add to this one: found by their entry points, and loaded only when it is asked for.

Laws: naming what is installed loads none of it; nothing here runs in an agent or a worker.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from glasshouse.errors import Code, UsageError

__all__ = ["ARTIFACTS", "COMMANDS", "installed", "load"]

COMMANDS = "glasshouse.commands"  # groups of commands, by the word that they are called by
ARTIFACTS = "glasshouse.artifacts"  # verifiers of folders, by NAME in application/vnd.glasshouse.NAME+json
# Distributions of this project, for those who lack one.
_OURS = {"bench": "glasshouse-train-bench", "measurement": "glasshouse-train-bench"}


def installed(group: str) -> tuple[str, ...]:
    """Return the names that are installed in a group, in order."""
    return tuple(sorted({one.name for one in entry_points(group=group)}))


def load(group: str, name: str) -> Any:
    """Return what stands under a name.

    Raises:
        UsageError: `requirement-missing`, it is not installed, or lacks a library.
    """
    found = next(iter(entry_points(group=group, name=name)), None)
    lacking = _OURS.get(name, "its distribution")
    if found is not None:
        try:
            return found.load()
        except ModuleNotFoundError as error:
            lacking = error.name or lacking
    raise UsageError(
        Code.REQUIREMENT_MISSING,
        f"{name} needs {lacking}, which is not installed",
        hint=f"install {lacking}; from a checkout: python -m pip install ./bench",
    )
