"""`glasshouse://`: a file system, for fsspec, whose one folder is the checkpoint that is being taken.

For `torch.distributed.checkpoint`, whose `save` and `async_save` (in threads) write into it without a copy in the
workspace: ``dcp.save(state, checkpoint_id="glasshouse://scratch/step-500")``. It is read where it lies in the next leg.
Law: of a checkpoint whose end does not come nothing is counted. Source: torch.distributed.checkpoint.filesystem.
"""

from __future__ import annotations

import io
import os
import re
from typing import Any

from fsspec import AbstractFileSystem

from glasshouse.errors import Code, UsageError
from glasshouse.task import current
from glasshouse.task.checkpoints import Part

_BUFFER_BYTES = 1 << 20
_METADATA = ".metadata"
_COORDINATOR = "__0_"


class PartFiles(AbstractFileSystem):  # type: ignore[misc]  # fsspec is not typed
    """Takes the files of one checkpoint after the other; those of one that is not due go nowhere."""

    protocol = "glasshouse"

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._part: Part | None = None

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Begin a checkpoint; in several ranks, each does. Its step is the last number in its name."""
        self._leave()
        if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
            raise UsageError(
                Code.USAGE,
                "glasshouse:// is of one machine: each would find the others' files missing when it goes on",
                hint="save into a folder, and give it to task.save_checkpoint",
            )
        folder = self._strip_protocol(path)
        numbers = re.findall(r"\d+", folder)
        if not numbers:
            raise UsageError(Code.USAGE, f"{path!r} has no number, which would be its step", hint="name it …/step-500")
        self._part = current().checkpoints.begin(step=int(numbers[-1]), paths=[folder])

    def exists(self, path: str, **_: Any) -> bool:
        """Return that nothing is there."""
        return False

    def open(self, path: str, mode: str = "rb", **_: Any) -> io.BufferedWriter:
        """Open the next file for writing."""
        if mode != "wb":
            raise io.UnsupportedOperation("a checkpoint is read where GLASSHOUSE_RESUME names it")
        name = self._strip_protocol(path)
        if self._part is not None:
            self._part.begin(name.removesuffix(".tmp"))
        return io.BufferedWriter(_PartFile(self, name), _BUFFER_BYTES)

    def write(self, data: memoryview) -> None:
        """Take the next bytes of the file that was opened last."""
        if self._part is not None:
            self._part.write(data)

    def closed(self, name: str) -> None:
        """End the part of a rank that writes one file; the coordinator's ends with the metadata."""
        if not name.rpartition("/")[2].startswith((_COORDINATOR, _METADATA)):
            self._end()

    def rename(self, path1: str, path2: str, **_: Any) -> None:
        """Take the end of a checkpoint, which is that its metadata is there."""
        self._end()

    def rm(self, path: str, **_: Any) -> None:
        """Leave a checkpoint of which a file could not be written."""
        self._leave()

    def _end(self) -> None:
        part, self._part = self._part, None
        if part is not None:
            part.__exit__(None, None, None)

    def _leave(self) -> None:
        part, self._part = self._part, None
        if part is not None:
            part.__exit__(OSError, None, None)


class _PartFile(io.RawIOBase):
    def __init__(self, files: PartFiles, name: str) -> None:
        self._files, self._name, self._bytes = files, name, 0
        # What it is synchronised by, as by a file: without one, the whole machine's disks would be.
        self._synced = os.memfd_create("glasshouse")

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._bytes

    def fileno(self) -> int:
        return self._synced

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        self._files.write(view)
        self._bytes += len(view)
        return len(view)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._synced)
            self._files.closed(self._name)
