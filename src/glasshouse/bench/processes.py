"""The descendants of a process, read from /proc."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["children_of"]


def children_of(pid: int) -> Iterator[int]:
    """Yield all descendants of a process."""
    try:
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return
    for child in " ".join(lists).split():
        yield int(child)
        yield from children_of(int(child))
