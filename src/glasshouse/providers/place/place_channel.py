"""The owner's end of a channel: a command whose standard streams lead to a place (spec/place.md).

Laws: each wait has its limit; a channel that breaks raises one error, `place-unreachable`, with what the command
printed last; its holder opens another and goes on; the other side gets no more memory and descriptors than were asked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import select
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from glasshouse.errors import Code, FormatError, PeerError, PlatformError, RunError, UsageError
from glasshouse.providers.place.ways import ELSE, SILENT, hint_of
from glasshouse.providers.protocol.link import MAX_CALLS, Calls, Link, Message
from glasshouse.providers.protocol.messages import ASKS, FIRST_CALL, GREETING, VERSION, message, read_message
from glasshouse.wire.canonical import Json

# For an answer to anything that a place does at once; a line that is slow, or down for a moment, takes some of it.
ANSWER_S = 30.0
_GREETING_S = 30.0
_GREETING_BYTES = 1 << 16
_WORDS_BYTES = 4096
_DRAIN_S = 0.001
_STUCK_S = 60.0
# For the answer after the last byte of an upload: what pipes, ssh and the network still hold then, over a slow line.
_ARRIVED_S = 300.0
_END_S = 2.0
_SENT_AT_ONCE, _COPIED_AT_ONCE = 1 << 20, 64 << 10

_REFUSALS: dict[Code, type[PlatformError | RunError]] = {Code.PLATFORM: PlatformError, Code.DISK_FULL: RunError}


class PlaceChannel:
    """One connection; that there is a place at its other end shows with the first answer.

    Attributes:
        lost: whether it was given up.
        silent: whether it was because nothing at all came.

    Args:
        command: what leads to the place; its nonce is added as the last argument.
        connect: returns a socket that is connected to the gate, for the calls of runtimes.

    Raises:
        PeerError: `place-unreachable`: the command cannot be started.
    """

    def __init__(self, command: Sequence[str], *, connect: Callable[[], socket.socket]) -> None:
        self.lost = self.silent = False
        self._nonce = secrets.token_hex(16)
        self._connect = connect
        self._printed = b""
        try:
            self._process = subprocess.Popen(
                [*command, self._nonce],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C in the terminal is for this process alone
            )
        except OSError as error:
            raise PeerError(Code.PLACE_UNREACHABLE, f"{command[0]} cannot be started: {error.strerror}") from None
        assert self._process.stdin and self._process.stdout and self._process.stderr  # noqa: S101, PT018
        self._errors = self._process.stderr.fileno()
        os.set_blocking(self._errors, False)
        self._selector = selectors.DefaultSelector()
        self._link = Link(os.dup(self._process.stdout.fileno()), os.dup(self._process.stdin.fileno()))
        self._process.stdout.close()
        self._process.stdin.close()
        with contextlib.suppress(OSError, AttributeError):  # where pipes are not that large it is a little slower
            fcntl.fcntl(self._link.writer, fcntl.F_SETPIPE_SZ, _SENT_AT_ONCE)
        self._calls = Calls(self._link, self._selector)
        self._next = 1
        # Of each request that has no answer yet, what it asks and how many bytes may come with it; and what came.
        self._open: dict[int, tuple[str, int]] = {}
        self._answers: dict[int, Any] = {}
        self._bytes: dict[int, bytearray] = {}
        self._going: set[int] = set()
        # What came before the place greets; None once it has. Until then nothing is written to whatever else it is.
        self._before: bytes | None = b""
        self._greeting_s = time.monotonic() + _GREETING_S
        self._link.hold()
        self._selector.register(self._link.reader, selectors.EVENT_READ, self._channel)
        self._selector.register(self._errors, selectors.EVENT_READ, self._read_errors)

    # Requests

    def ask(self, ask: str, *members: Any, within_s: float = ANSWER_S) -> Any:
        """Ask, and wait for the answer; members of both as of `messages.ASKS`.

        Raises:
            PeerError: `place-unreachable`: there was none in time, or the channel is gone; `place-outdated`.
            UsageError, PlatformError, RunError: the place refused.
        """
        return self.answer(self.post(ask, *members), within_s=within_s)

    def post(self, ask: str, *members: Any, data: bytes = b"", expect: int = 0) -> int:
        """Ask, and return the number of the request.

        Args:
            data: belongs to the request.
            expect: how many bytes may come before the answer.
        """
        number, self._next = self._next, self._next % (FIRST_CALL - 2) + 1
        self._open[number] = ask, expect
        request: dict[str, Json] = ASKS[ask].request.write(members)  # type: ignore[assignment]  # an object
        self._link.send({"ask": ask, "id": number, **request})
        self._link.send_data(number, data)
        return number

    @property
    def busy(self) -> bool:
        """Whether it was given up, or a request has no answer yet, or a call is carried."""
        return self.lost or bool(self._open) or bool(len(self._calls))

    def answered(self, number: int) -> bool:
        """Return whether a request has its answer."""
        return number in self._answers

    def answer(self, number: int, *, within_s: float = ANSWER_S) -> Any:
        """Wait for the answer to a request; raises as `ask`."""
        deadline_s = time.monotonic() + within_s
        while number not in self._answers:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise self._unreachable(f"no answer within {within_s:g} s")
            self.pump(left_s)
        found = self._answers.pop(number)
        if isinstance(found, Exception):
            raise found
        return found

    def data(self, number: int) -> bytes:
        """Return, once, the bytes that came before an answer."""
        return bytes(self._bytes.pop(number, b""))

    def put(self, path: Path, digest: str, on_progress: Callable[[int, int], None]) -> None:
        """Send a file, or what of it is not there yet.

        Args:
            digest: its BLAKE3, as `digest_of` returns it.
            on_progress: called with how many bytes are there, and how many it has.

        Raises:
            PeerError, UsageError, RunError: as `ask`.
        """
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            (start,) = self.ask("has", digest, size)
            if start > size:
                raise PeerError(Code.SCHEMA, "the place has more of a file than there is")
            number = self.post("put", digest, size, start)
            # A part that is there is hashed again first.
            deadline_s = time.monotonic() + ANSWER_S + start / 50e6
            while number not in self._going and number not in self._answers and time.monotonic() < deadline_s:
                self.pump(1.0)
            if number in self._going:
                self._going.discard(number)
                on_progress(start, size)
                while self._link.pending_bytes:
                    self.pump(ANSWER_S)
                self._link.hold()  # frames would become bytes of the file
                try:
                    self._send_all(file.fileno(), start, size, number, on_progress)
                finally:
                    self._link.let_go()
            self.answer(number, within_s=_ARRIVED_S)

    def _send_all(self, file: int, start: int, size: int, number: int, on_progress: Callable[[int, int], None]) -> None:
        """Send bytes without frames, and take what comes meanwhile."""
        moved_s = time.monotonic()
        while start < size and number not in self._answers:
            _, ready, _ = select.select([], [self._link.writer], [], 0.5)
            sent = 0
            if ready:
                try:
                    sent = _pass_on(file, start, min(_SENT_AT_ONCE, size - start), self._link.writer)
                except BlockingIOError:
                    pass
                except OSError as error:
                    raise self._unreachable(error.strerror or "it is gone") from None
                if sent:
                    start, moved_s = start + sent, time.monotonic()
                    on_progress(start, size)
            if time.monotonic() - moved_s > _STUCK_S:
                raise self._unreachable(f"an upload that has not moved for {_STUCK_S:g} s")
            # A pipe that was filled is left to drain: as soon as a page is free it would be writable.
            self.pump(0 if sent == _SENT_AT_ONCE else _DRAIN_S)

    # The wire

    def pump(self, timeout_s: float) -> None:
        """Take what comes within a time, and return at the first; raises `PeerError` `place-unreachable`."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._link.writer)
        if self._before is not None:
            left_s = self._greeting_s - time.monotonic()
            if left_s <= 0:
                self.silent = not self._before
                raise self._unreachable("nothing there answers as a place" + _first(self._before))
            timeout_s = min(timeout_s, left_s)
        elif self._link.pending_bytes:
            self._selector.register(self._link.writer, selectors.EVENT_WRITE, lambda _events: self._link.flush())
        try:
            for key, events in self._selector.select(timeout_s):
                key.data(events)
        except PeerError as error:
            raise error if error.code is Code.PLACE_OUTDATED else self._unreachable(error.message) from None
        except FormatError as error:
            raise self._unreachable(f"the place sent what is no message: {error.message}") from None

    def close(self) -> None:
        """End the connection; runs go on. May be called twice."""
        if self._process.stderr is None or self._process.stderr.closed:
            return
        self._calls.close()
        self._selector.close()
        self._link.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stderr.close()

    def _channel(self, _events: int) -> None:
        if self._before is None:
            self._messages(self._link.receive())
        else:
            self._greet(self._before)

    def _messages(self, messages: Iterator[Message]) -> None:
        for found in messages:
            if not isinstance(found, dict):
                self._data(*found)
                continue
            match read_message(found):
                case "call", (number,):
                    self._call(number)
                case "end", (number,):
                    self._calls.end(number)
                case "drop", (number,):
                    self._calls.drop(number)
                case "go", (number, _):
                    self._asked(number)
                    self._going.add(number)
                case "ok", (number, answer):
                    self._answers[number] = ASKS[self._asked(number)].answer.read(answer, "answer")
                    del self._open[number]
                case _, (number, code, why):
                    if number == 0 or code not in set(Code):
                        raise PeerError(Code.SCHEMA, f"the place ended the channel: {why}")
                    self._asked(number)
                    del self._open[number]
                    self._answers[number] = _REFUSALS.get(Code(code), UsageError)(Code(code), why)

    def _asked(self, number: int) -> str:
        if number not in self._open:
            raise PeerError(Code.SCHEMA, "an answer to what was not asked")
        return self._open[number][0]

    def _data(self, stream: int, data: bytes) -> None:
        if stream >= FIRST_CALL:
            self._calls.data(stream, data)
            return
        kept = self._bytes.setdefault(stream, bytearray())
        kept += data
        if len(kept) > self._open.get(stream, ("", 0))[1]:
            raise PeerError(Code.SCHEMA, "the place sent more bytes than it was asked for")

    def _call(self, number: int) -> None:
        if number in self._calls or len(self._calls) >= MAX_CALLS:
            raise PeerError(Code.SCHEMA, "a call that is open already, or one too many")
        try:
            connection = self._connect()
        except OSError:
            self._link.send(message("drop", number))
        else:
            self._calls.add(number, connection)

    def _greet(self, before: bytes) -> None:
        """Skip what comes before the greeting, such as a login shell's banner."""
        try:
            data = os.read(self._link.reader, _GREETING_BYTES)
        except BlockingIOError:
            return
        came = before + data
        for line in came.split(b"\n")[:-1]:
            words = line.decode("utf-8", "replace").split(" ")
            if len(words) == 3 and words[0] == GREETING and words[2] == self._nonce:
                if words[1] != str(VERSION):
                    why = f"the place there has version {words[1][:16]} of the channel, and this side {VERSION}"
                    hint = "install the same version of Glasshouse on both sides"
                    raise PeerError(Code.PLACE_OUTDATED, why, hint=hint)
                self._before = None
                self._link.let_go()
                self._messages(self._link.feed(came.partition(line + b"\n")[2]))
                return
        if not data or len(came) > _GREETING_BYTES:
            how = "nothing there answers as a place" if data else "the command ended"
            raise PeerError(Code.PLACE_UNREACHABLE, how + _first(came))
        self._before = came

    def _read_errors(self, _events: int = 0) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._errors, _WORDS_BYTES)
            self._printed = (self._printed + data)[-_WORDS_BYTES:]
            if not data:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(self._errors)

    def _unreachable(self, why: str) -> PeerError:
        with contextlib.suppress(OSError):
            self._read_errors()
        printed = self._printed.decode("utf-8", "replace")
        lines = [line for line in printed.splitlines() if line.strip()]
        last = f"; it printed: {lines[-1][:300]}" if lines else ""
        hint = hint_of(printed, SILENT if self.silent else ELSE)
        self.lost = True
        return PeerError(Code.PLACE_UNREACHABLE, f"the place cannot be reached: {why}{last}", hint=hint)


def _first(came: bytes) -> str:
    line = came.strip().partition(b"\n")[0].decode("utf-8", "replace")[:200]
    return f"; the first line from there was: {line}" if line else ""


def _pass_on(file: int, start: int, most: int, out: int) -> int:
    """Write bytes of a file to a pipe and return how many; raises `OSError`."""
    if sys.platform == "linux":
        return os.sendfile(out, file, start, most)
    # Elsewhere that call is for sockets alone.
    return os.write(out, os.pread(file, min(most, _COPIED_AT_ONCE), start))
