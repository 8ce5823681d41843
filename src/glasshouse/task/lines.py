"""The worker's side of a line: the permission to seal a checkpoint, and the part that leaves under it.

Laws: a part is begun only under a permission that was not used; one that was begun leaves as a whole, or as one that is
never counted. Source: spec/checkpoints.md sections 3 and 8.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Protocol

from glasshouse.errors import Code, PackageError
from glasshouse.package.checkpoints.part_content import MAX_FILE_INDEX_BYTES, MAX_FILES, PartWriter
from glasshouse.package.limits import CheckpointLimits
from glasshouse.task.channel import AgentLink, Message, unbroken
from glasshouse.task.checkpoints import MARKER, Line, Part, refused
from glasshouse.wire.canonical import Json, encode
from glasshouse.wire.lines.checkpoint import padded
from glasshouse.wire.record import LEFT_OUT, Record, Sha256, integer

_PIECE_BYTES = 1 << 20
_ENTRY_BYTES = 36  # of an entry of the index without its path, at most
_INDEX_BYTES = 64  # of an entry without its path, and more than enough of a part without files


@dataclass(frozen=True, kw_only=True, slots=True)
class Permission(Record, name="line", max_bytes=1024, constants={"type": "line"}):
    """The agent's word that a checkpoint may come."""

    left: int  # how many may come, with this one; 0 for none
    seq: Annotated[int, integer(1)]
    wait_us: int  # how long until it may begin
    previous: Sha256 | None = None  # digest of the checkpoint before
    refused: Annotated[Code | None, LEFT_OUT] = None  # why the one before was not counted


class PartSink(Protocol):
    """Where the plaintext of a part goes."""

    def data(self, plaintext: memoryview) -> None:
        """Take the next bytes."""

    def end(self, size: int, *, whole: bool) -> None:
        """Take the end: of a part that is `whole`, or of one that is not to be counted."""


class PartStream(Part):
    """One rank's part on its way out; leaving the block ends it.

    An exception within the block ends it as one that is not counted.
    """

    def __init__(
        self, sink: PartSink, limits: CheckpointLimits, paths: Sequence[str], *, excepted: Sequence[str] = ()
    ) -> None:
        self.excepted = excepted
        self._sink, self._limits = sink, limits
        self._writer = PartWriter(sink.data)
        self._marker = encode({"paths": list(paths)})
        self._bytes, self._index_bytes = 0, len(self._marker)
        self._names, self._folders = {MARKER}, set[str]()
        self._entries_bytes = 2 * _ENTRY_BYTES + len(MARKER)  # of the index, at most
        self._lock = threading.Lock()  # a job that ends leaves a part that a thread of its own writes
        self.ended = False

    def __enter__(self) -> PartStream:
        return self

    def __exit__(self, *error: object) -> None:
        with unbroken(), self._lock:
            if self.ended:
                return
            self.ended = True
            try:
                # At the end: the first file then begins with a chunk, and is opened straight into its place.
                self._writer.begin(MARKER)
                self._writer.update(self._marker)
                size, whole = self._writer.finish(), error[0] is None
            except PackageError as why:  # not found by `begin`: outputs wait for the end of the part
                self._sink.end(self._writer.abandon(), whole=False)
                raise refused(why.message) from None
            self._sink.end(size, whole=whole)

    def begin(self, path: str) -> None:
        """Begin the next file, by its path below the job's folder; raises `RunError` (`checkpoint-refused`)."""
        folders = {str(folder) for folder in PurePosixPath(path).parents}
        if path in self._names:
            raise refused(f"{path!r} is there twice")
        if path in self._folders or folders & self._names:
            raise refused(f"{path!r} is within a file, or a folder with files")
        if len(self._names) == MAX_FILES:
            raise refused(f"it has {MAX_FILES} files or more")
        entry_bytes = _ENTRY_BYTES + len(encode(path))
        if self._entries_bytes + entry_bytes > MAX_FILE_INDEX_BYTES:
            raise refused("its files have too long paths together")
        index_bytes = self._index_bytes + _INDEX_BYTES + len(path.encode())
        check_size(self._bytes + index_bytes, self._limits)
        try:
            self._writer.begin(path)
        except PackageError as error:
            raise refused(error.message) from None
        self._names.add(path)
        self._folders |= folders
        self._index_bytes, self._entries_bytes = index_bytes, self._entries_bytes + entry_bytes

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Send the next bytes of the file that was begun last; raises `RunError` (`checkpoint-refused`)."""
        view = memoryview(data).cast("B")
        check_size(self._bytes + self._index_bytes + len(view), self._limits)
        self._bytes += len(view)
        for start in range(0, len(view), _PIECE_BYTES):  # a job that ends waits for one
            with self._lock:
                if self.ended:
                    raise refused("the job has ended")
                self._writer.update(view[start : start + _PIECE_BYTES])
        return len(view)


def check_size(size: int, limits: CheckpointLimits) -> None:
    """Raise `RunError` (`checkpoint-refused`) where a part of so many bytes of files and index is too large."""
    if padded(size + _INDEX_BYTES) > limits.bytes:
        raise refused(
            f"it has more than the {limits.bytes} bytes that the job allows",
            hint="raise bytes in [checkpoints], or save less",
        )


class AgentLine(Line):
    """The line of a worker that has the agent's permissions."""

    def __init__(self, link: AgentLink, limits: CheckpointLimits) -> None:
        self.limits = limits
        self.on_permission: Callable[[Message], None] = lambda _message: None  # told each that comes
        self._link = link
        self._permission: Permission | None = None
        self._begins_s = 0.0
        self._kept: list[Message] = []  # rows of the parts of this checkpoint
        self._over = False  # whether one was left unfinished: the agent waits for it, and permits no other
        self._changed = threading.Condition()

    def take(self, message: Message) -> None:
        """Take the agent's message about the line; in the thread that listens. Raises `FormatError`."""
        with self._changed:
            if message.get("type") == "part-kept":
                self._kept.append(message)
                self._changed.notify_all()
                return
            self._permission = Permission.from_json(message)
            self._begins_s = time.monotonic() + self._permission.wait_us / 1e6
            if self._permission.refused is not None:
                print(f"glasshouse: a checkpoint was not counted: {self._permission.refused}", file=sys.stderr)  # noqa: T201
            self._changed.notify_all()
        self.on_permission(self.now())

    def check_size(self, size: int) -> None:
        check_size(size, self.limits)

    def due(self) -> bool:
        found = self._permission
        return found is not None and found.left > 0 and not self._over and time.monotonic() >= self._begins_s

    def claim(self, wait_s: float) -> Permission | None:
        """Use the permission, once its time has come; None where that is not within `wait_s` seconds, or never."""
        until_s = time.monotonic() + wait_s
        with self._changed:
            while not self.due():
                now_s, found = time.monotonic(), self._permission
                if now_s >= until_s or self._over or (found is not None and not found.left):
                    return None
                due_s = self._begins_s if found is not None else math.inf
                least_s = min(until_s, due_s) - now_s
                self._changed.wait(least_s if math.isfinite(least_s) else None)
            claimed, self._permission, self._kept = self._permission, None, []
        return claimed

    def give_back(self, permission: Permission) -> None:
        """Take back a permission under which nothing was begun."""
        with self._changed:
            self._permission = permission
            self._changed.notify_all()

    def now(self) -> Message:
        """Return what ranks are told of the permission."""
        found = self._permission
        if found is None:
            return {"type": "line", "left": 0, "wait_us": 0}
        return {"type": "line", "left": found.left, "wait_us": max(0, int((self._begins_s - time.monotonic()) * 1e6))}

    def rows(self, count: int) -> list[Message]:
        """Wait until `count` parts of this checkpoint are sealed; return their rows."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._kept) >= count)
            return list(self._kept)

    def sink(self, permission: Permission, *, rank: int, step: int) -> AgentSink:
        """Begin a rank's part: nothing but messages leaves beside it until its end."""
        return AgentSink(self._link, permission, rank=rank, step=step)

    def finish(self, permission: Permission | None, *, step: int, others: Sequence[Message] = ()) -> None:
        """Send that all parts are there; without a permission, that is for one that is not whole, end the line."""
        if permission is not None:
            rows: list[Json] = [dict(row) for row in others]
            self._link.send({"type": "checkpoint", "seq": permission.seq, "step": step, "others": rows})
            return
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def begin(self, paths: Sequence[str] | None, *, step: int, wait_s: float, shared: bool) -> Part | None:
        permission = None if paths is None else self.claim(wait_s)
        if paths is None or permission is None:
            return None
        return PartStream(_OnlySink(self, self._link, permission, step), self.limits, paths)


class AgentSink(PartSink):
    """One part over the link."""

    def __init__(self, link: AgentLink, permission: Permission, *, rank: int, step: int) -> None:
        self._link = link
        previous = None if permission.previous is None else permission.previous.hex()
        link.begin_part({"type": "part", "previous": previous, "rank": rank, "seq": permission.seq, "step": step})

    def data(self, plaintext: memoryview) -> None:
        self._link.part_data(plaintext)

    def end(self, size: int, *, whole: bool) -> None:
        self._link.end_part({"type": "part-end", "bytes": size})


class _OnlySink(AgentSink):
    """The part of a job's only rank; its end is the checkpoint's."""

    def __init__(self, line: AgentLine, link: AgentLink, permission: Permission, step: int) -> None:
        super().__init__(link, permission, rank=0, step=step)
        self._line, self._permission, self._step = line, permission, step

    def end(self, size: int, *, whole: bool) -> None:
        super().end(size, whole=whole)
        self._line.finish(self._permission if whole else None, step=self._step)
