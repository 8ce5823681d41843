"""What a script sees of its line: it saves files of the job's folder, and finds where it goes on from.

Law: a checkpoint holds all that was named, or is not taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from glasshouse.errors import Code, GlasshouseError, RunError, UsageError
from glasshouse.task.uncollected import entries

MARKER = "glasshouse-checkpoint.json"
"""A file of each part: which paths were saved."""
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """The checkpoint that a run goes on from, whose files lie where they were."""

    step: int
    path: Path | None  # the file or folder that was saved first; None for a workload's own
    files: frozenset[str]  # below the job's folder, of all ranks of this machine


class Part(Protocol):
    """One rank's part on its way out; leaving the block ends it.

    An exception within the block ends it as one that is not counted.
    """

    excepted: Sequence[str]  # paths that another rank of this machine saves
    ended: bool

    def __enter__(self) -> Part: ...

    def __exit__(self, *error: object) -> None: ...

    def begin(self, path: str) -> None:
        """Begin the next file, by its path below the job's folder; raises `RunError` (`checkpoint-refused`)."""
        ...

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Send the next bytes of the file that was begun last; raises `RunError` (`checkpoint-refused`)."""
        ...


class Line(Protocol):
    """One rank's way to a checkpoint."""

    def check_size(self, size: int) -> None:
        """Raise `RunError` (`checkpoint-refused`) where files of so many bytes are more than the job allows."""
        ...

    def due(self) -> bool:
        """Return whether a checkpoint may begin now."""
        ...

    def begin(self, paths: Sequence[str] | None, *, step: int, wait_s: float, shared: bool) -> Part | None:
        """Begin a part, in all ranks or in none; None where no checkpoint may begin within `wait_s` seconds.

        Args:
            paths: what it is of, below the job's folder; None to have none begin.
            shared: whether these are files, which other ranks may name too and change when all have them.
        """
        ...


class Resumable:
    """What a script sees of its line."""

    def __init__(self, checkpoints: Checkpoints, resume: Restored | None) -> None:
        self.checkpoints = checkpoints
        self._resume = resume

    def save_checkpoint(self, path: str | Path | Sequence[str | Path], *, step: int, wait: bool = False) -> bool:
        """Save files of the job's folder as a checkpoint that the training can go on from on another machine.

        In several ranks each calls it. Where the job has no `[checkpoints]`, and under the raw leg, nothing is saved.

        Args:
            path: a file or a folder, or several.
            wait: whether to wait until a checkpoint may be taken.

        Returns:
            Whether it was: not before its time has come, nor while the one before is under way.

        Raises:
            RunError: `checkpoint-refused`: it would not be whole, or is larger than the job allows.
            UsageError: `usage` for a path that is not below the job's folder.
        """
        paths = [path] if isinstance(path, str | Path) else list(path)
        return self.checkpoints.save(paths, step=step, wait_s=math.inf if wait else 0.0)

    @property
    def resume(self) -> Restored | None:
        """The checkpoint that this run goes on from: its `step`, and `path`, which was saved first and lies there."""
        return self._resume

    def _not_restored(self, names: Sequence[str]) -> list[str]:
        """Return the names of inputs in whose place no file of the checkpoint lies."""
        return [name for name in names if self._resume is None or name not in self._resume.files]


class Checkpoints:
    """The checkpoints of one job.

    Attributes:
        saved: the files that are in one, below the job's folder.

    Args:
        line: where they go; None for nowhere.
        folder: the job's.
    """

    def __init__(self, line: Line | None, folder: Path) -> None:
        self.line = line
        self._folder = folder
        self.saved: set[str] = set()
        self._begun: Part | None = None

    def due(self) -> bool:
        """Return whether a checkpoint would be taken now."""
        return self.line is not None and self.line.due()

    def save(self, paths: Sequence[str | Path], *, step: int, wait_s: float) -> bool:
        """Save files and folders; see `Task.save_checkpoint`."""
        if self.line is None:
            return False
        try:
            names = [self._below(Path(path)) for path in paths]
            self.line.check_size(sum(path.stat().st_size for _, path in self._files(names)))
        except GlasshouseError:
            self.decline(step=step)
            raise
        part = self.line.begin(names, step=step, wait_s=wait_s, shared=True)
        if part is None:
            return False
        with part:
            found = list(self._files(names))
            for name, path in found:
                if not any(name == other or name.startswith(f"{other}/") for other in part.excepted):
                    _send(part, name, path)
        self.saved.update(name for name, _ in found)
        return True

    def begin(self, *, step: int, wait_s: float = 0.0, paths: Sequence[str] = ()) -> Part | None:
        """Begin a checkpoint of what is in memory; None where none may be taken within `wait_s` seconds."""
        if self.line is not None:
            self._begun = self.line.begin(list(paths), step=step, wait_s=wait_s, shared=False)
        return self._begun

    def close(self) -> None:
        """Leave a checkpoint that was begun and never ended: outputs would wait for it."""
        if self._begun is not None and not self._begun.ended:
            self._begun.__exit__(RuntimeError, None, None)

    def decline(self, *, step: int) -> None:
        """Take part, as one of several ranks, in a checkpoint that is not to be taken."""
        if self.line is not None:
            self.line.begin(None, step=step, wait_s=0.0, shared=True)

    def _below(self, path: Path) -> str:
        try:
            return path.resolve().relative_to(self._folder).as_posix()
        except ValueError:
            raise UsageError(
                Code.USAGE,
                f"a checkpoint's files lie below the job's folder, and {str(path)[:200]!r} does not",
                hint="save them below the working directory that the script began in",
            ) from None

    def _files(self, names: Sequence[str]) -> Iterator[tuple[str, Path]]:
        for name in names:
            path = self._folder / name
            if path.is_file():
                yield name, path
                continue
            found = [(f"{name}/{inside}", entry) for inside, entry in entries(path)]
            files = [(each, Path(entry.path)) for each, entry in found if entry.is_file(follow_symlinks=False)]
            other = [each for each, entry in found if entry.is_symlink()]
            if other or not files:
                raise refused(f"{other[0]!r} is a link" if other else f"there is no file at {name!r}")
            yield from files


def _send(part: Part, name: str, path: Path) -> None:
    part.begin(name)
    with path.open("rb", buffering=0) as source:
        buffer = memoryview(bytearray(_PIECE_BYTES))
        while count := source.readinto(buffer):
            part.write(buffer[:count])


def refused(why: str, *, hint: str = "") -> RunError:
    """Return the refusal of a checkpoint that cannot be a whole one."""
    return RunError(Code.CHECKPOINT_REFUSED, f"a checkpoint was not taken: {why}", hint=hint)
