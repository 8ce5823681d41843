"""A line whose permission is always there, within the process of a test: every checkpoint is kept in plaintext."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from glasshouse.package.limits import CheckpointLimits
from glasshouse.task.checkpoints import Line, Part, Restored
from glasshouse.task.lines import MARKER, PartSink, PartStream, check_size
from glasshouse.wire.lines.checkpoint import is_padded


class LineInMemory(Line):
    """Keeps checkpoints by step.

    Args:
        due: whether one is taken after a step.
    """

    def __init__(self, due: Callable[[], bool] = lambda: True) -> None:
        self.taken: dict[int, dict[str, bytes]] = {}
        self._due = due
        self.limits = CheckpointLimits(bytes=1 << 30, every_s=10, most=1000)

    def check_size(self, size: int) -> None:
        check_size(size, self.limits)

    def due(self) -> bool:
        return self._due()

    def begin(self, paths: Sequence[str] | None, *, step: int, wait_s: float, shared: bool) -> Part | None:
        return None if paths is None else _Kept(self, step, paths)

    def restore(self, step: int, folder: Path) -> Restored:
        """Lay a checkpoint out below the job's folder."""
        for name, data in self.taken[step].items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        top = next(iter(self.taken[step])).partition("/")[0]
        return Restored(step=step, path=folder / top, files=frozenset(self.taken[step]))


class _Kept(PartStream):
    def __init__(self, line: LineInMemory, step: int, paths: Sequence[str]) -> None:
        self.files: dict[str, bytes] = {}
        super().__init__(_Padded(line, step, self.files), line.limits, paths)

    def begin(self, path: str) -> None:
        super().begin(path)
        self.files[path] = b""
        self._last = path

    def write(self, data: bytes | bytearray | memoryview) -> int:
        self.files[self._last] += bytes(data)
        return super().write(data)


class _Padded(PartSink):
    def __init__(self, line: LineInMemory, step: int, files: dict[str, bytes]) -> None:
        self._line, self._step, self._files = line, step, files

    def data(self, plaintext: memoryview) -> None:
        pass

    def end(self, size: int, *, whole: bool) -> None:
        assert is_padded(size)
        assert MARKER not in self._files
        if whole:
            self._line.taken[self._step] = self._files
