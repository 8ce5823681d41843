"""Where messages and outputs go: lines and a folder (raw), or frames to the agent (protected)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from glasshouse.errors import Code, FormatError
from glasshouse.wire import frames
from glasshouse.wire.canonical import Json, encode
from glasshouse.wire.crypto import zero

Message = dict[str, Json]
_PIECE_BYTES = frames.MAX_PAYLOAD_BYTES
_RECEIVE_BYTES = 1 << 16
_MAX_DESCRIPTORS = 4
OF_LINE = ("line", "part-kept")
"""The agent's messages about checkpoints."""
_END_PROCESS = os._exit  # a script's own `os._exit` concludes its job first


def _pass_over(_message: Message) -> None:
    pass


class Channel(Protocol):
    """One way out of the worker."""

    stopping: bool  # whether the owner ended the job

    def send(self, message: Message) -> None:
        """Send a message."""

    def output(self, header: Message, source: BinaryIO) -> str:
        """Deliver `source` (``header["bytes"]`` long) and return its SHA-256 in hex."""
        ...


class AgentLink(Channel):
    """The worker's end of the socket to the agent.

    Once `listen` was called, the end of the agent ends this process at once: plaintext must not outlive the process
    that watches over it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.stopping = False
        self._socket = connection
        self._decoder = frames.Decoder()
        self._waiting: list[Message] = []
        self._descriptors: list[int] = []
        self._lock = threading.Lock()  # of one frame, or an output
        self._content = threading.Lock()  # of an output or a part: frames of data do not say what they are of
        self._pid = os.getpid()

    def receive(self) -> Message:
        """Return the agent's next message; raises `EOFError` where it is gone, `FormatError` for any other message."""
        while not self._waiting:
            between = not self._decoder.within
            data, descriptors, flags, _address = socket.recv_fds(self._socket, _RECEIVE_BYTES, _MAX_DESCRIPTORS)
            if between:
                self._drop_descriptors()  # what came beside messages that did not take it
            self._descriptors += descriptors
            if flags & socket.MSG_CTRUNC:
                raise FormatError(Code.TOO_LARGE, "descriptors were lost: this process has as many open as it may")
            if len(self._descriptors) > _MAX_DESCRIPTORS:
                raise FormatError(Code.SCHEMA, "more descriptors than a message takes")
            if not data:
                raise EOFError("the agent is gone")
            for kind, value in self._decoder.feed(data):
                if kind != frames.CONTROL or not isinstance(value, dict):
                    raise FormatError(Code.SCHEMA, "the agent sent something that is no message")
                self._waiting.append(value)
        return self._waiting.pop(0)

    def take_descriptors(self, count: int) -> list[int]:
        """Return the descriptors that came along with the last message, which must be `count`."""
        if len(self._descriptors) != count:
            came = len(self._descriptors)
            self._drop_descriptors()
            raise FormatError(Code.SCHEMA, f"{came} descriptors came where {count} belong")
        taken, self._descriptors = self._descriptors, []
        return taken

    def listen(
        self, on_stop: Callable[[], None] = lambda: None, on_line: Callable[[Message], None] = _pass_over
    ) -> None:
        """From now on, wait in a thread that costs nothing until something comes: `stop`, or about the line."""
        args = (on_stop, on_line)
        threading.Thread(target=self._listen, args=args, name="glasshouse-agent", daemon=True).start()

    def _listen(self, on_stop: Callable[[], None], on_line: Callable[[Message], None] = _pass_over) -> None:
        try:
            while True:
                message = self.receive()
                kind = message.get("type")
                if kind in OF_LINE:
                    on_line(message)
                elif kind == "stop" and not self.stopping:
                    self.stopping = True
                    on_stop()
        except (EOFError, OSError, FormatError):
            _END_PROCESS(1)

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        with unbroken(), self._lock:
            data = frames.control(message)
            if descriptors:
                data = data[socket.send_fds(self._socket, [data], descriptors) :]
            self._write(data)

    def output(self, header: Message, source: BinaryIO) -> str:
        digest = hashlib.sha256()
        # Progress from another thread must not fall between the pieces.
        with unbroken(), self._content, self._lock:
            self._write(frames.control(header))
            for piece in _pieces(header, source):
                digest.update(piece)
                self._write(frames.data_header(len(piece)))
                self._write(piece)
            self._write(frames.control({"type": "output-end", "sha256": digest.hexdigest()}))
        return digest.hexdigest()

    def begin_part(self, header: Message) -> None:
        """Begin a part of a checkpoint; messages may come between its pieces, and outputs wait for its end."""
        with unbroken():
            self._content.acquire()
            try:
                self.send(header)
            except BaseException:
                self._content.release()
                raise

    def part_data(self, data: memoryview) -> None:
        """Send the next bytes of the part."""
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            with unbroken(), self._lock:
                self._write(frames.data_header(len(piece)))
                self._write(piece)

    def end_part(self, message: Message) -> None:
        """End the part."""
        with unbroken():
            try:
                self.send(message)
            finally:
                self._content.release()

    def shut(self) -> None:
        """End the connection, also for another thread that waits in it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket and descriptors that were not taken."""
        self._drop_descriptors()
        self._socket.close()

    def _drop_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _write(self, data: bytes | memoryview) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("only the process that Glasshouse started may report progress or save outputs")
        self._socket.sendall(data)


@contextmanager
def unbroken() -> Iterator[None]:
    """Hold SIGINT back: it stops a script, and half a frame would end the connection with the agent."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class EventLines(Channel):
    """The raw leg: messages as lines of JSON (without `events`, nowhere), outputs as plain files in a folder."""

    def __init__(self, events: BinaryIO | None, outputs: Path) -> None:
        self.stopping = False
        self._events = events
        self._outputs = outputs
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        if self._events is not None:
            with self._lock:
                self._events.write(encode(message) + b"\n")
                self._events.flush()

    def output(self, header: Message, source: BinaryIO) -> str:
        self.send(header)
        target = self._outputs / str(header["name"])
        target.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        with target.open("wb") as out:
            for piece in _pieces(header, source):
                digest.update(piece)
                out.write(piece)
        self.send({"type": "output-end", "sha256": digest.hexdigest()})
        return digest.hexdigest()


def _pieces(header: Message, source: BinaryIO) -> Iterator[memoryview]:
    """Yield the pieces of an output as long as its header has it, in one buffer, which is wiped at the end."""
    left = header["bytes"]
    assert isinstance(left, int)  # noqa: S101 - `Task` made the header
    buffer = bytearray(_PIECE_BYTES)
    view = memoryview(buffer)
    try:
        while left:
            count = source.readinto(view[: min(left, _PIECE_BYTES)])  # type: ignore[attr-defined]
            if not count:
                raise FormatError(Code.SOURCE_CHANGED, "an output became shorter while it was sent")
            yield view[:count]
            left -= count
    finally:
        zero(buffer)
