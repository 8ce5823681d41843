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
from glasshouse.wire.aead import zero
from glasshouse.wire.canonical import Json, encode

__all__ = ["AgentLink", "Channel", "EventLines", "Message", "Silent", "unbroken"]

Message = dict[str, Json]
_PIECE_BYTES = frames.MAX_PAYLOAD_BYTES
_RECEIVE_BYTES = 1 << 16
_MAX_DESCRIPTORS = 4
_END_PROCESS = os._exit  # a script's own `os._exit` concludes its job first


class Channel(Protocol):
    """One way out of the worker."""

    stopping: bool

    def send(self, message: Message) -> None: ...

    def output(self, header: Message, source: BinaryIO) -> str:
        """Deliver `source` (``header["bytes"]`` long) and return its SHA-256 in hex."""
        ...


class AgentLink:
    """The worker's end of the socket to the agent.

    Once `listen` was called, the end of the agent ends this process at once: plaintext must not
    outlive the process that watches over it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.stopping = False
        self._socket = connection
        self._decoder = frames.Decoder()
        self._waiting: list[Message] = []
        self._descriptors: list[int] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def receive(self) -> Message:
        """Return the agent's next message.

        Raises:
            EOFError: the agent is gone.
            FormatError: it sent something that is no control message.
        """
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

    def listen(self, on_stop: Callable[[], None] | None = None) -> None:
        """From now on, wait for `stop` in a thread that costs nothing until it comes, and call `on_stop` then."""
        threading.Thread(target=self._listen, args=(on_stop,), name="glasshouse-agent", daemon=True).start()

    def _listen(self, on_stop: Callable[[], None] | None) -> None:
        try:
            while True:
                if self.receive().get("type") == "stop" and not self.stopping:
                    self.stopping = True
                    if on_stop is not None:
                        on_stop()
        except (EOFError, OSError, FormatError):
            _END_PROCESS(1)

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message, with file descriptors beside it."""
        with unbroken(), self._lock:
            data = frames.control(message)
            if descriptors:
                data = data[socket.send_fds(self._socket, [data], descriptors) :]
            self._write(data)

    def output(self, header: Message, source: BinaryIO) -> str:
        digest = hashlib.sha256()
        piece = bytearray(_PIECE_BYTES)
        view = memoryview(piece)
        with unbroken(), self._lock:  # progress from another thread must not fall between the pieces
            self._write(frames.control(header))
            try:
                left = _declared(header)
                while left:
                    count = _read(source, view[: min(left, _PIECE_BYTES)])
                    digest.update(view[:count])
                    self._write(frames.data_header(count))
                    self._write(view[:count])
                    left -= count
            finally:
                zero(piece)
            self._write(frames.control({"type": "output-end", "sha256": digest.hexdigest()}))
        return digest.hexdigest()

    def shut(self) -> None:
        """End the conversation, also one that another thread waits in."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
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
    """Hold SIGINT back: it stops a script, and half a frame would end the conversation with the agent."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class EventLines:
    """The raw leg: the same messages as lines of JSON, outputs as plain files in a folder."""

    def __init__(self, events: BinaryIO, outputs: Path) -> None:
        self.stopping = False
        self._events = events
        self._outputs = outputs
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        with self._lock:
            self._events.write(encode(message) + b"\n")
            self._events.flush()

    def output(self, header: Message, source: BinaryIO) -> str:
        self.send(header)
        digest = _store(self._outputs / str(header["name"]), source, _declared(header))
        self.send({"type": "output-end", "sha256": digest})
        return digest


class Silent:
    """A script that is tried out by hand: outputs are files, messages go nowhere."""

    def __init__(self, outputs: Path) -> None:
        self.stopping = False
        self._outputs = outputs

    def send(self, message: Message) -> None:
        pass

    def output(self, header: Message, source: BinaryIO) -> str:
        return _store(self._outputs / str(header["name"]), source, _declared(header))


def _store(target: Path, source: BinaryIO, size: int) -> str:
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    view = memoryview(bytearray(_PIECE_BYTES))
    with target.open("wb") as out:
        while size:
            count = _read(source, view[: min(size, _PIECE_BYTES)])
            digest.update(view[:count])
            out.write(view[:count])
            size -= count
    return digest.hexdigest()


def _declared(header: Message) -> int:
    size = header["bytes"]
    assert isinstance(size, int)  # noqa: S101 - we built the header
    return size


def _read(source: BinaryIO, destination: memoryview) -> int:
    count = source.readinto(destination)  # type: ignore[attr-defined]
    if not count:
        raise FormatError(Code.SOURCE_CHANGED, "an output became shorter while it was sent")
    return int(count)
