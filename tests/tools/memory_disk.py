"""A small file system of its own, for what happens where a disk is another one, or full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["fill", "memory_disk"]


@contextmanager
def memory_disk(place: Path, *, size: str = "100%", names: int = 0) -> Iterator[Path]:
    """Mount a file system in memory, as long as the block runs; skips the test where that is not allowed.

    Args:
        place: is made.
        size: in bytes, as mount(8) takes it.
        names: how many files and folders it holds; 0 for any number.
    """
    place.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size},nr_inodes={names}", "tmpfs", str(place)]
    if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def fill(place: Path, *, free_bytes: int | None = None, free_names: int | None = None) -> Path:
    """Fill a file system but for so many bytes, or names, and return what fills it."""
    filler, found = place / "filler", os.statvfs(place)
    filler.mkdir()
    if free_bytes is not None:
        (filler / "bytes").write_bytes(bytes(found.f_bavail * found.f_frsize - free_bytes))
    if free_names is not None:
        for number in range(os.statvfs(place).f_favail - free_names):
            (filler / str(number)).touch()
    return filler
