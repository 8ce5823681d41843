"""Files that a script wrote outside of its output folders, or left in them as a link: reported in the sealed log.

The names are the owner's secret, so they go no other way: the owner's side reads them from the decrypted log.
Law: ``Uncollected.parse(found.line()) == found``.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "glasshouse: written outside of the output folders, and lost: "
_MAX_NAMES = 20
_MAX_NAME_CHARS = 200
# At the top of the workspace: temporary files, caches and a model's settings, none of which is a result.
_OURS = frozenset({"cache", "model", "tmp"})

Snapshot = Mapping[str, tuple[int, int, int]]
"""Inode, size and time of change of each file, by its path below the workspace."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Uncollected:
    """Files that no output folder holds."""

    files: int  # how many
    bytes: int  # how large together
    named: tuple[str, ...]  # the first of them, by their paths below the script's working directory
    links: tuple[str, ...] = ()  # the first links within the output folders; what they lead to does not come back

    def line(self) -> str:
        """Return the line of the sealed log."""
        facts = {"bytes": self.bytes, "files": self.files, "links": list(self.links), "named": list(self.named)}
        return _PREFIX + json.dumps(facts, sort_keys=True)

    @classmethod
    def parse(cls, line: str) -> Uncollected | None:
        """Return what a line of a log reports; None for any other line."""
        if not line.startswith(_PREFIX):
            return None
        try:
            facts = {"links": []} | json.loads(line[len(_PREFIX) :])
            counts, names = [facts["files"], facts["bytes"]], [facts["named"], facts["links"]]
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        if not all(isinstance(count, int) and count >= 0 for count in counts):
            return None
        if not all(isinstance(listed, list) and all(isinstance(name, str) for name in listed) for listed in names):
            return None
        return cls(files=counts[0], bytes=counts[1], named=tuple(names[0]), links=tuple(names[1]))


def snapshot(workspace: Path) -> Snapshot:
    """Return the files of a workspace as they are before a script begins."""
    return dict(_files(workspace))


def look(
    workspace: Path, before: Snapshot, *, folder: Path, outputs: Sequence[Path], saved: Set[str] = frozenset()
) -> Uncollected | None:
    """Return what was written since `before` and lies in none of the folders `outputs`, by names below `folder`.

    Files of `saved`, below `folder`, are in a checkpoint, and not lost.
    """
    kept = {(folder / name).relative_to(workspace).as_posix() for name in saved}
    collected = tuple(f"{path.relative_to(workspace).as_posix()}/" for path in outputs)
    new = [
        (name, state[1])
        for name, state in sorted(_files(workspace), key=lambda file: file[0].split("/"))
        if before.get(name) != state and name not in kept and not name.startswith(collected)
    ]
    links = [output / name for output in outputs for name, entry in entries(output) if entry.is_symlink()]
    if not new and not links:
        return None
    return Uncollected(
        files=len(new),
        bytes=sum(size for _, size in new),
        named=_shown((workspace / name for name, _ in new), folder),
        links=_shown(links, folder),
    )


def _shown(paths: Iterable[Path], folder: Path) -> tuple[str, ...]:
    return tuple(os.path.relpath(path, folder)[:_MAX_NAME_CHARS] for path in itertools.islice(paths, _MAX_NAMES))


def _files(workspace: Path) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Yield each regular file that may be a result, in no order; no link is followed."""
    waiting = [""]
    while waiting:
        below = waiting.pop()
        try:
            listed = list(os.scandir(workspace / below))
        except OSError:
            continue  # taken away, or closed to reading, by the script itself
        for entry in listed:
            if entry.name == "__pycache__" or (not below and (entry.name in _OURS or entry.name.startswith("."))):
                continue
            name = f"{below}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                waiting.append(f"{name}/")
            elif entry.is_file(follow_symlinks=False):
                found = entry.stat(follow_symlinks=False)
                yield name, (found.st_ino, found.st_size, found.st_mtime_ns)


def regular_files(directory: Path) -> Iterator[tuple[str, Path]]:
    """Yield each regular file under `directory` with its relative name, in order; links are not followed."""
    for name, entry in entries(directory):
        if entry.is_file(follow_symlinks=False):
            yield name, Path(entry.path)


def entries(directory: Path) -> list[tuple[str, os.DirEntry[str]]]:
    """Return everything under `directory` with its relative name, in order; links are not followed. Empty without it.

    However deep: `Path.rglob` and `os.walk` call themselves for each level, and a script may nest as it likes.

    Raises:
        OSError: a folder cannot be listed.
    """
    found, waiting = [], [""] if directory.is_dir() else []
    while waiting:
        below = waiting.pop()
        with os.scandir(directory / below) as listed:
            for entry in listed:
                found.append((f"{below}{entry.name}", entry))
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{below}{entry.name}/")
    return sorted(found, key=lambda one: one[0].split("/"))
