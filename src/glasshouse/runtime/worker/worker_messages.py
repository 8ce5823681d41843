"""The messages of a worker to its agent, read strictly, and the frames over a Unix socket that they come in.

The worker runs the owner's script and is not trusted to describe anything but its own work. Laws: every message is one
of the types below, within limits, or `worker-failed`; no text of the worker's goes anywhere but into sealed outputs
(names) and bounded fields of the evidence; plaintext passes through one fixed buffer that is zeroed after every frame,
and is never copied into another object here; the worker cannot make the agent hold more than one frame, nor wait.
"""

from __future__ import annotations

import array
import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias, cast, get_args

from glasshouse.errors import Code, FormatError, RunError
from glasshouse.evidence.events import is_loss
from glasshouse.evidence.receipt import Unit, Work
from glasshouse.runtime.lines.part_messages import PartBegins, PartEnds, PartsThere
from glasshouse.runtime.loop import Loop, interrupted, refuse_descriptors
from glasshouse.wire import frames
from glasshouse.wire.canonical import Codec, Json, decode
from glasshouse.wire.crypto import zero
from glasshouse.wire.record import (
    DECIMAL,
    IDENTIFIER,
    Member,
    Record,
    Sha256,
    choice,
    digest,
    integer,
    one_of,
    table,
    text,
)

MAX_OUTPUT_BYTES = 1 << 44
_HEADER_BYTES = 5
# Per turn of the loop, so that a worker that never stops sending cannot keep signals and alarms waiting. Bytes alone
# bound nothing: with each may come a descriptor, and what closing it costs (an inotify's: a millisecond) is ours.
_BYTES_PER_TURN = 8 << 20
_TURN_S = 0.05
# What a worker that has ended left in the socket is read within this, or not at all.
_DRAIN_S = 5.0
# As the receipt will name it.
_NAME = re.compile(r"[^\x00-\x1f\x7f/\\]+(/[^\x00-\x1f\x7f/\\]+)*")
_DIGEST_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_MAX_DIGESTS = 64

# The reasons a worker may give for its own end; none of the gate's, the agent's or the verifier's.
_FAILURES = frozenset(
    {
        Code.WORKER_FAILED,
        Code.OUT_OF_MEMORY,
        Code.NONFINITE_LOSS,
        Code.MODEL_NOT_FOUND,
        Code.DEVICE_MISSING,
        Code.REQUIREMENT_MISSING,
        Code.SCRIPT_FAILED,
        Code.INTERRUPTED,
        Code.JOB_INVALID,
        Code.ASSET_UNKNOWN,
        Code.ASSET_DIGEST,
        Code.PACKAGE_TAMPERED,
        Code.PACKAGE_TRUNCATED,
        Code.CHECKPOINT_REFUSED,
        Code.CHECKPOINT_TAMPERED,
        Code.DISK_FULL,
        Code.UNSUPPORTED,
        Code.OUTPUT_REFUSED,
        Code.PLATFORM,
        Code.INTERNAL,
        Code.COLLECTIVE_TAMPERED,
        Code.COLLECTIVE_MISMATCH,
        Code.COLLECTIVE_TIMEOUT,
        Code.COLLECTIVE_ABORTED,
        Code.COLLECTIVE_UNSEALED,
        Code.RANK_LOST,
        Code.GROUP_SECRET,
        Code.GROUP_MISMATCH,
    }
)


def _loss(value: Json, where: str) -> str:
    """Read a number as its one text with six significant digits."""
    loss = f"{float(_DECIMAL.read(value, where)):.6g}"
    if not is_loss(loss):
        raise FormatError(Code.SCHEMA, f"{where} is no finite number")
    return loss


def _failure(value: Json, where: str) -> Code:
    """Read a code; one that is unknown, or not the worker's to give, is `worker-failed`."""
    name = _CODE.read(value, where)
    return Code(name) if name in _FAILURES else Code.WORKER_FAILED


_DECIMAL, _CODE = text(48, DECIMAL), text(128, IDENTIFIER)
Loss: TypeAlias = Annotated[str, Codec(_loss)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sandbox:
    """The launcher's report, whole, for `sandbox` to read."""

    report: Json


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready(Record, constants={"type": "ready"}):
    """The worker has closed itself to debuggers and waits."""

    pid: Annotated[int, integer(1, 2**31 - 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported(Record, constants={"type": "imported"}):
    """Third-party frameworks are loaded."""

    us: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened(Record, constants={"type": "opened"}):
    """The grant was understood and the inputs are usable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Running(Record, constants={"type": "running"}):
    """Training begins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress(Record, constants={"type": "progress"}):
    """How far the work is."""

    done: int
    total: int | None
    unit: Unit
    loss: Loss | None
    elapsed_us: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputBegins(Record, constants={"type": "output"}):
    """An output of `size` bytes follows in data frames."""

    name: Annotated[str, text(128, _NAME)]
    kind: Annotated[str, choice(("checkpoint", "output"))]
    content: Annotated[str, Member("class"), choice(("file", "weights"))]
    size: Annotated[int, Member("bytes"), integer(0, MAX_OUTPUT_BYTES)]

    def __post_init__(self) -> None:
        if any(part in (".", "..") for part in self.name.split("/")):
            raise FormatError(Code.SCHEMA, "an output whose name leaves its folder")


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputEnds(Record, constants={"type": "output-end"}):
    """The output is complete."""

    sha256: Sha256  # as the worker computed it


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses(Record):
    """The first loss that was reported, and the last."""

    first: Loss
    final: Loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished(Record, constants={"type": "finished"}):
    """The work is complete."""

    work: Work
    loss: Losses | None
    trainable: int | None  # how many parameters were trained
    digests: Annotated[dict[str, bytes], table(_MAX_DIGESTS, text(64, _DIGEST_NAME), digest())]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed(Record, constants={"type": "failed"}):
    """The worker gives up; why is in the sealed log."""

    code: Annotated[Code, Codec(_failure, str)]


OfWork: TypeAlias = Progress | OutputBegins | OutputEnds | PartBegins | PartEnds | PartsThere | Finished
Message: TypeAlias = Sandbox | Ready | Imported | Opened | Running | OfWork | Failed
_MESSAGE = one_of("type", Ready, Imported, Opened, Running, *get_args(OfWork), Failed)


def parse(value: Json) -> Message:
    """Read one control message; raises `RunError`: `worker-failed`: not a message, or beyond its limits."""
    if isinstance(value, dict) and value.get("type") == "sandbox":
        return Sandbox(report=value)
    try:
        return cast(Message, _MESSAGE.read(value, "worker message"))
    except FormatError:
        # Its text may quote the worker, so it goes no further.
        raise RunError(Code.WORKER_FAILED, "the worker sent a message that it must not send") from None


class WorkerLink:
    """The agent's end of the control socket.

    It owns `connection`. What `on_data` is called with is valid until that returns; `on_closed` is called once.
    """

    def __init__(
        self,
        connection: socket.socket,
        loop: Loop,
        *,
        on_message: Callable[[Message], None],
        on_data: Callable[[memoryview], None],
        on_closed: Callable[[], None],
    ) -> None:
        self._socket, self._loop = connection, loop
        self._on_message, self._on_data, self._on_closed = on_message, on_data, on_closed
        self._header = bytearray(_HEADER_BYTES)
        self._payload = bytearray(frames.MAX_PAYLOAD_BYTES)
        self._target = memoryview(self._header)
        self._filled = self._kind = 0
        refuse_descriptors(connection)
        connection.setblocking(False)
        loop.watch(connection.fileno(), self._turn)

    def send(self, message: Json, descriptors: Sequence[int] = ()) -> None:
        """Send a control message, with descriptors beside it; raises `RunError`: `worker-killed`: it reads no more."""
        data = frames.control(message)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            sent = self._socket.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
        except OSError:
            sent = 0
        # The agent sends a few short things to a worker that is reading: less than all means that it is not.
        if sent != len(data):
            raise RunError(Code.WORKER_KILLED, "the worker no longer reads")

    def drain(self) -> None:
        """Handle what the worker had sent before it went away."""
        until_s = time.monotonic() + _DRAIN_S
        while self._socket.fileno() >= 0 and time.monotonic() < until_s and self._turn():
            continue

    def close(self) -> None:
        """Close the socket and zero the buffers."""
        if self._socket.fileno() >= 0:
            self._loop.unwatch(self._socket.fileno())
            with interrupted():
                self._socket.close()
        zero(self._payload)
        zero(self._header)

    def _turn(self) -> bool:
        """Receive for one turn; return whether there may be more."""
        left, until_s = _BYTES_PER_TURN, time.monotonic() + _TURN_S
        while left > 0:
            try:
                with interrupted():
                    count = self._socket.recv_into(self._target[self._filled :])
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:
                count = 0
            if not count:
                self.close()
                self._on_closed()
                return False
            left -= count
            self._filled += count
            if self._filled == len(self._target):
                self._completed()
                if self._socket.fileno() < 0:
                    return False
            if time.monotonic() >= until_s:
                break
        return True

    def _completed(self) -> None:
        whole, self._filled = self._target, 0
        if self._kind == 0:
            length, self._kind = int.from_bytes(self._header[:4], "big"), self._header[4]
            limits = {frames.CONTROL: frames.MAX_CONTROL_BYTES, frames.DATA: frames.MAX_PAYLOAD_BYTES}
            if not 0 < length <= limits.get(self._kind, 0):
                raise RunError(Code.WORKER_FAILED, "the worker sent what is not a frame")
            self._target = memoryview(self._payload)[:length]
            return
        kind, self._kind = self._kind, 0
        self._target = memoryview(self._header)
        if kind == frames.DATA:
            try:
                self._on_data(whole)
            finally:
                zero(whole)
            return
        try:
            message = decode(whole, max_bytes=frames.MAX_CONTROL_BYTES)
        except FormatError:
            raise RunError(Code.WORKER_FAILED, "the worker sent a message that is not canonical JSON") from None
        self._on_message(parse(message))
