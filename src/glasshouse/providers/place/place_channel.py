"""The owner's end of a channel: a command whose standard streams lead to a place (spec/place.md).

Laws: nothing waits for longer than it was told; a channel that breaks says so by one error, `place-unreachable`, with
what the command printed last; its holder opens another and goes on; the other side is given no more memory and no
more descriptors than it was asked for.
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

import blake3

from glasshouse.errors import Code, FormatError, PeerError, PlatformError, RunError, UsageError
from glasshouse.providers.protocol.calls import FIRST_CALL, MAX_CALLS, Streams
from glasshouse.providers.protocol.link import Link, Message
from glasshouse.wire.canonical import Json
from glasshouse.wire.fields import Fields

__all__ = ["ANSWER_S", "Channel", "digest_of", "hint_of"]

# For an answer to anything that a place does at once; a line that is slow, or down for a moment, takes some of it.
ANSWER_S = 30.0
_GREETING = "glasshouse-place"
_VERSION = 1
_GREETING_S = 30.0
_GREETING_BYTES = 1 << 16
_WORDS_BYTES = 4096
_SENT_AT_ONCE, _DRAIN_S = 1 << 20, 0.001
_COPIED_AT_ONCE = 64 << 10
_STUCK_S = 60.0
# For the answer after the last byte of an upload: what pipes, ssh and the network still hold then, over a slow line.
_ARRIVED_S = 300.0
_MAX_SAID_CHARS = 1000
_END_S = 2.0

# What ssh or the machine prints, and what to do about it.
_PYTHON = "name an interpreter of that machine that has it: glasshouse machine add --python"
_OVER = (
    "the job is over, and nothing runs there any more: submit another; for a run that it had: glasshouse stop --give-up"
)
_HINTS = (
    ("pending execution", "wait until the job runs: squeue"),
    ("batch script is at", "its job has to run what `glasshouse machine slurm` prints, with the same --folder here"),
    ("Invalid job id", _OVER),
    ("has expired", _OVER),
    ("already completing", _OVER),
    ("node configuration is not available", "name a node that the job has: squeue --format='%i %N'"),
    ("srun: command not found", "name the cluster's login node: glasshouse machine list"),
    ("No module named", f"install this version of Glasshouse there, or {_PYTHON}"),
    ("SyntaxError", f"that Python is too old, Glasshouse needs 3.11: {_PYTHON}"),
    ("IDENTIFICATION HAS CHANGED", "the machine has another host key than before: find out why before you go on"),
    ("Host key verification failed", "compare the machine's host key once by hand, with ssh and the same name"),
    ("Permission denied", "log in once by hand with ssh and the same name: the user, or the key, is not accepted"),
    ("cannot be used", "make room there, or name another folder: glasshouse machine add --folder"),
    ("not found", _PYTHON),
    ("No such file or directory", _PYTHON),
    ("Could not resolve hostname", "look at the address: glasshouse machine list"),
    ("Connection refused", "see that sshd runs there, and at this port"),
    ("timed out", "see that the machine is up, and that ssh with the same name reaches it"),
    ("unreachable", "see that this machine has a network, and that ssh with the same name reaches the other"),
)
_SILENT = (
    "log in by hand with ssh and the same name; if that hangs too, end a shared connection that is dead: ssh -O exit"
)

_ELSE = (
    "see that the machine is up and stays up: log in by hand with ssh and the same name; one that is rented has its "
    "log on the provider's page"
)

Answer = dict[str, Json]
Refusal = PlatformError | UsageError | RunError
_REFUSALS: dict[Code, type[Refusal]] = {Code.PLATFORM: PlatformError, Code.DISK_FULL: RunError}


class Channel:
    """One connection.

    It is there at once; whether a place is at its other end shows with the first answer.

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
        self._words = b""
        try:
            self._process = subprocess.Popen(
                [*command, self._nonce],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C in the terminal reaches us, and we say what it means
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
        self._streams = Streams(self._link, self._selector)
        self._next = 1
        self._answers: dict[int, Answer | Refusal] = {}
        self._going: set[int] = set()
        # Of each question that has no answer yet, how many bytes may come with it; and what came.
        self._open: dict[int, int] = {}
        self._bytes: dict[int, bytearray] = {}
        # What came before the place greets; None once it has. Until then nothing is written to whatever else it is.
        self._before: bytes | None = b""
        self._greeting_s = time.monotonic() + _GREETING_S
        self._link.hold()
        self._selector.register(self._link.reader, selectors.EVENT_READ, self._channel)
        self._selector.register(self._errors, selectors.EVENT_READ, self._listen)

    # Questions

    def ask(self, ask: str, *, within_s: float = ANSWER_S, **members: Json) -> Fields:
        """Ask, and wait for the answer.

        Raises:
            PeerError: `place-unreachable`: there was none in time, or the channel is gone; `place-outdated`.
            UsageError, PlatformError, RunError: the place refused.
        """
        return self.answer(self.post(ask, **members), within_s=within_s)

    def post(self, ask: str, expect: int = 0, /, **members: Json) -> int:
        """Ask, and return the number of the question.

        Args:
            ask: what.
            expect: how many bytes may come before the answer.
            members: further ones of the request.
        """
        number, self._next = self._next, self._next % (FIRST_CALL - 2) + 1
        self._open[number] = expect
        message: dict[str, Json] = {"ask": ask, "id": number, **members}
        self._link.send(message)
        return number

    @property
    def busy(self) -> bool:
        """Whether it was given up, or a question has no answer yet, or a call is carried."""
        return self.lost or bool(self._open) or bool(len(self._streams))

    def answered(self, number: int) -> bool:
        """Return whether a question has its answer."""
        return number in self._answers

    def answer(self, number: int, *, within_s: float = ANSWER_S) -> Fields:
        """Wait for the answer to a question; raises as `ask`."""
        deadline_s = time.monotonic() + within_s
        while number not in self._answers:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise self._unreachable(f"no answer within {within_s:g} s")
            self.pump(left_s)
        found = self._answers.pop(number)
        if isinstance(found, Exception):
            raise found
        return Fields(found, "answer")

    def data(self, number: int) -> bytes:
        """Return, once, the bytes that came before an answer."""
        return bytes(self._bytes.pop(number, b""))

    def send(self, number: int, data: bytes) -> None:
        """Send the bytes that belong to a question."""
        self._link.send_data(number, data)

    def put(
        self, path: Path, digest: str, *, on_progress: Callable[[int, int], None] = lambda _sent, _size: None
    ) -> None:
        """Send a file, or what of it is not there yet.

        Args:
            path: of the file.
            digest: what `digest_of` returned.
            on_progress: called with how many bytes are there, and how many it has.

        Raises:
            PeerError, UsageError, RunError: as `ask`.
        """
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = self.ask("has", blake3=digest, bytes=size).integer("bytes", high=size)
            asked: dict[str, Json] = {"blake3": digest, "bytes": size, "from": start}
            number = self.post("put", **asked)
            # A part that is there is hashed again first.
            deadline_s = time.monotonic() + ANSWER_S + start / 50e6
            while number not in self._going and number not in self._answers and time.monotonic() < deadline_s:
                self.pump(1.0)
            if number in self._going:
                self._raw(file.fileno(), start, size, number, on_progress)
            self.answer(number, within_s=_ARRIVED_S)

    def _raw(self, file: int, start: int, size: int, number: int, on_progress: Callable[[int, int], None]) -> None:
        """Send bytes without frames, and hear what comes meanwhile."""
        self._going.discard(number)
        on_progress(start, size)
        while self._link.pending_bytes:
            self.pump(ANSWER_S)
        self._link.hold()  # frames would become bytes of the file
        try:
            self._send_all(file, start, size, number, on_progress)
        finally:
            self._link.let_go()

    def _send_all(self, file: int, start: int, size: int, number: int, on_progress: Callable[[int, int], None]) -> None:
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
        """Take what comes within a time; returns at the first that came.

        Raises:
            PeerError: `place-unreachable`.
        """
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

    def close(self) -> None:
        """End the connection; runs go on. May be called twice."""
        if self._process.stderr is None or self._process.stderr.closed:
            return
        self._streams.close()
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
        for message in messages:
            if isinstance(message, dict):
                self._take(message)
            else:
                self._data(*message)

    def _take(self, message: Answer) -> None:
        fields = Fields(message, "message")
        try:
            if fields.has("call"):
                self._call(fields.integer("call", low=FIRST_CALL, high=2 * FIRST_CALL - 1))
            elif fields.has("end"):
                self._streams.end(fields.integer("end"))
            elif fields.has("drop"):
                self._streams.drop(fields.integer("drop"))
            else:
                self._answered(fields)
        except FormatError as error:
            raise PeerError(Code.SCHEMA, f"the place sent what is no message: {error.message}") from None

    def _answered(self, fields: Fields) -> None:
        number = fields.integer("id", high=FIRST_CALL - 1)
        if number and number not in self._open:
            raise FormatError(Code.SCHEMA, "an answer to what was not asked")
        if fields.has("go"):
            self._going.add(number)
            return
        self._open.pop(number, None)
        if fields.has("ok"):
            found = fields.any("ok")
            if not isinstance(found, dict):
                raise FormatError(Code.SCHEMA, "an answer that is no object")
            self._answers[number] = found
            return
        code, message = fields.text("code", max_chars=64), fields.text("message", max_chars=_MAX_SAID_CHARS)
        if number == 0 or code not in set(Code):
            raise PeerError(Code.SCHEMA, f"the place ended the channel: {message}")
        self._answers[number] = _REFUSALS.get(Code(code), UsageError)(Code(code), message)

    def _data(self, stream: int, data: bytes) -> None:
        if stream >= FIRST_CALL:
            self._streams.data(stream, data)
        else:
            kept = self._bytes.setdefault(stream, bytearray())
            kept += data
            if len(kept) > self._open.get(stream, 0):
                raise PeerError(Code.SCHEMA, "the place sent more bytes than it was asked for")

    def _call(self, number: int) -> None:
        if number in self._streams or len(self._streams) >= MAX_CALLS:
            raise FormatError(Code.SCHEMA, "a call that is open already, or one too many")
        try:
            connection = self._connect()
        except OSError:
            self._link.send({"drop": number})
        else:
            self._streams.add(number, connection)

    def _greet(self, before: bytes) -> None:
        """Skip what comes before the greeting, such as a login shell's banner."""
        try:
            data = os.read(self._link.reader, _GREETING_BYTES)
        except BlockingIOError:
            return
        said = before + data
        for line in said.split(b"\n")[:-1]:
            words = line.decode("utf-8", "replace").split(" ")
            if len(words) == 3 and words[0] == _GREETING and words[2] == self._nonce:
                _check_version(words[1])
                self._before = None
                self._link.let_go()
                self._messages(self._link.feed(said.partition(line + b"\n")[2]))
                return
        if not data or len(said) > _GREETING_BYTES:
            how = "nothing there answers as a place" if data else "the command ended"
            raise PeerError(Code.PLACE_UNREACHABLE, how + _first(said))
        self._before = said

    def _listen(self, _events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._errors, _WORDS_BYTES)
            self._words = (self._words + data)[-_WORDS_BYTES:]
            if not data:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(self._errors)

    def _unreachable(self, why: str) -> PeerError:
        with contextlib.suppress(OSError):
            self._listen(0)
        words = self._words.decode("utf-8", "replace")
        lines = [line for line in words.splitlines() if line.strip()]
        said = f"; it printed: {lines[-1][:300]}" if lines else ""
        hint = hint_of(words, _SILENT if self.silent else _ELSE)
        self.lost = True
        return PeerError(Code.PLACE_UNREACHABLE, f"the place cannot be reached: {why}{said}", hint=hint)


def hint_of(words: str, otherwise: str) -> str:
    """Return what to do about what a command printed before its connection ended."""
    return next((hint for word, hint in _HINTS if word in words), otherwise)


def _check_version(told: str) -> None:
    if told != str(_VERSION):
        raise PeerError(
            Code.PLACE_OUTDATED,
            f"the place there speaks version {told[:16]} of the channel, and this side {_VERSION}",
            hint="install the same version of Glasshouse on both sides",
        )


def _pass_on(file: int, start: int, most: int, out: int) -> int:
    """Write bytes of a file to a pipe and return how many; raises `OSError`."""
    if sys.platform == "linux":
        return os.sendfile(out, file, start, most)
    # Elsewhere that call is for sockets alone.
    return os.write(out, os.pread(file, min(most, _COPIED_AT_ONCE), start))


def _first(said: bytes) -> str:
    line = said.strip().partition(b"\n")[0].decode("utf-8", "replace")[:200]
    return f"; the first line from there was: {line}" if line else ""


def digest_of(path: Path) -> str:
    """Return the BLAKE3 of a file, hexadecimal, by which a place keeps it; of 1 GiB it takes a third of a second."""
    digest, buffer = blake3.blake3(), bytearray(_SENT_AT_ONCE)
    with path.open("rb", buffering=0) as file:
        while found := file.readinto(buffer):
            digest.update(memoryview(buffer)[:found])
    return digest.hexdigest()
