"""The machine's end of a channel: ``glasshouse place serve`` over its standard streams (spec/place.md).

Laws: it holds no secret but a launch file on its way through; no request makes a call of a runtime to its gate
wait for longer than the start of a process; it ends with its standard input, and the runs go on without it.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import selectors
import socket
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from glasshouse.errors import Code, FormatError, GlasshouseError, PeerError, PlatformError, UsageError
from glasshouse.providers.protocol.calls import FIRST_CALL, MAX_CALLS, Streams
from glasshouse.providers.protocol.link import MAX_DATA_BYTES, Link
from glasshouse.providers.protocol.order import Order
from glasshouse.providers.serve.answers import MAX_MACHINES, Answer, Answers, run_field
from glasshouse.providers.serve.gate_sockets import Gates, relay_order
from glasshouse.providers.serve.keeper import boot
from glasshouse.providers.serve.runs import MOST_FILES, Runs, is_name, numbered, own_folder
from glasshouse.providers.serve.uploads import Upload, Uploads
from glasshouse.wire.canonical import encode
from glasshouse.wire.fields import Fields

__all__ = ["OWN_FOLDER", "serve"]

GREETING = "glasshouse-place"
OWN_FOLDER = "-"
VERSION = 1

_NONCE = re.compile(r"[0-9a-f]{16,64}")
_PEER = re.compile(r"[A-Za-z0-9.\[\]:-]{1,255}:[0-9]{1,5}")
_MAX_REQUESTS = 16
_MAX_LAUNCH_BYTES = 1 << 16
_MAX_LOOK_MS = 60_000
_RAW_S = 0.05
_STUCK_S = 60.0
# Owners repeat their request within a minute. A line can end unreported: a step of Slurm's outlives its srun.
_SILENT_S = 300.0
_HELD_BYTES = 256 << 10
_MAX_MESSAGE_CHARS = 1000
# How often a run's folder is looked at: at its lively beginning and end, and while it trains.
_QUICK_S, _SLOW_S = 0.05, 0.5
_QUICK_FOR_S = 3.0


@dataclass(slots=True)
class _Look:
    """A request for changes of a run's files, or its end."""

    number: int
    run: str
    since: int
    until_s: float
    outputs: int
    log: int


@dataclass(slots=True)
class _Start:
    """A start whose launch file has not come whole."""

    number: int
    run: str
    order: Order
    wanted: int
    launch: bytearray


@dataclass(slots=True)
class _Read:
    """A request for a piece of a file."""

    number: int
    run: str
    name: str
    start: int
    most: int


class Place:
    """One connection's service.

    Args:
        folder: the place's, made if need be.
        reader, writer: the channel.
    """

    def __init__(self, folder: Path, reader: int, writer: int) -> None:
        own_folder(folder)
        self._folder = folder
        self._runs, self._uploads = Runs(folder / "runs"), Uploads(folder / "files", boot=boot())
        self._answers = Answers(folder, self._runs, self._uploads).by_name
        self._link = Link(reader, writer)
        self._selector = selectors.DefaultSelector()
        self._streams = Streams(self._link, self._selector)
        self._next_call = FIRST_CALL
        self._looks: list[_Look] = []
        self._names: dict[str, set[str]] = {}
        self._starts: dict[int, _Start] = {}
        self._upload: tuple[int, Upload] | None = None
        self._reads: deque[_Read] = deque()
        self._gates = Gates(folder)
        self._moved_s = self._came_s = self._heard_s = time.monotonic()
        self._asks: dict[str, Callable[[int, Fields], Answer | None]] = {
            "put": self._put,
            "prepare": self._prepare,
            "start": self._start,
            "look": self._look,
            "read": self._read,
            "remove": self._remove,
        }

    def serve(self) -> None:
        """Answer until the channel ends."""
        self._selector.register(self._link.reader, selectors.EVENT_READ, self._channel)
        try:
            while True:
                self._listen_to_writer()
                self._take_calls()
                for key, events in self._selector.select(self._wait_s()):
                    key.data(events)
                self._send_news()
                self._read_on()
                self._reap()
        except PeerError as error:
            if error.code is Code.SCHEMA:
                with contextlib.suppress(PeerError):
                    self._link.send({"code": error.code.value, "id": 0, "message": error.message})
        finally:
            self._close()

    def _close(self) -> None:
        self._streams.close()
        for listener in self._gates.listeners:
            with contextlib.suppress(KeyError):
                self._selector.unregister(listener)
        self._gates.close()
        if self._upload is not None:
            self._upload[1].close()
        self._selector.close()

    def _channel(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._link.flush()
        if not events & selectors.EVENT_READ:
            return
        self._heard_s = time.monotonic()
        if self._upload is not None:
            self._take_raw(*self._upload)
            return
        for message in self._link.receive():
            if isinstance(message, dict):
                self._message(message)
            else:
                self._data(*message)

    def _listen_to_writer(self) -> None:
        """Wait until more can be written only while there is something to write."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._link.writer)
        if self._link.pending_bytes:
            self._selector.register(self._link.writer, selectors.EVENT_WRITE, self._channel)

    # Requests

    def _message(self, message: Answer) -> None:
        fields = Fields(message, "request")
        try:
            if fields.has("ask"):
                self._request(fields)
            elif fields.has("end"):
                self._streams.end(fields.integer("end"))
            else:
                self._streams.drop(fields.integer("drop"))
        except FormatError as error:
            raise PeerError(Code.SCHEMA, f"a message that this place does not have: {error.message}") from None

    def _request(self, fields: Fields) -> None:
        number = fields.integer("id", low=1, high=FIRST_CALL - 1)
        ask = fields.choice("ask", [*self._answers, *self._asks])
        if len(self._looks) + len(self._starts) + len(self._reads) >= _MAX_REQUESTS:
            raise PeerError(Code.SCHEMA, "more requests at once than a place answers")
        try:
            answer = self._answers[ask](fields) if ask in self._answers else self._asks[ask](number, fields)
        except OSError as error:
            self._refuse(number, PlatformError(Code.PLATFORM, f"the machine refused: {error.strerror}"))
        except FormatError:
            raise
        except GlasshouseError as error:
            self._refuse(number, error)
        else:
            if answer is not None:
                self._answer(number, answer)

    def _answer(self, number: int, answer: Answer, *, can_wait: bool = False) -> None:
        try:
            self._link.send({"id": number, "ok": answer}, can_wait=can_wait)
        except ValueError:
            self._refuse(number, PlatformError(Code.PLATFORM, "the machine's answer is longer than a message may be"))

    def _refuse(self, number: int, error: GlasshouseError) -> None:
        self._link.send({"code": error.code.value, "id": number, "message": _whole(error)})

    def _put(self, number: int, fields: Fields) -> Answer | None:
        digest, size, start = fields.digest("blake3").hex(), fields.integer("bytes"), fields.integer("from")
        fields.end()
        if self._uploads.whole(digest, size):
            return {}
        upload = self._uploads.begin(digest, size, start)
        self._link.send({"go": True, "id": number})
        self._upload, self._came_s = (number, upload), time.monotonic()
        self._finish_upload(number, upload)
        return None

    def _take_raw(self, number: int, upload: Upload) -> None:
        """Take what comes for a moment: a turn of the loop around this takes as long as some 64 KiB of the file."""
        until_s = time.monotonic() + _RAW_S
        while upload.left and time.monotonic() < until_s:
            if not select.select([self._link.reader], [], [], _RAW_S)[0]:
                return
            try:
                count = upload.read(self._link.reader)
            except (BlockingIOError, InterruptedError):
                continue
            except PlatformError as error:
                self._refuse(number, error)
                raise PeerError(Code.PLACE_UNREACHABLE, "an upload that cannot be kept") from None
            if not count:
                raise PeerError(Code.PLACE_UNREACHABLE, "the channel ended in the middle of an upload")
            self._came_s = time.monotonic()
        self._finish_upload(number, upload)

    def _finish_upload(self, number: int, upload: Upload) -> None:
        if upload.left:
            return
        self._upload = None
        try:
            upload.finish()
        except UsageError as error:
            self._refuse(number, error)
        else:
            self._link.send({"id": number, "ok": {}})
        finally:
            upload.close()

    def _prepare(self, _number: int, fields: Fields) -> Answer:
        run, relayed = run_field(fields), fields.has("relayed") and fields.flag("relayed")
        fields.end()
        self._drop_gate(run)
        if relayed or self._runs[run].relayed:  # its keeper listens, whether an owner is connected or not
            return {"gate": f"unix:{self._gates.path(run)}"}
        return {"gate": self._gates.open(run)}

    def _take_calls(self) -> None:
        """Wait for calls while there is room for another: the others wait in the kernel's queue."""
        room = len(self._streams) < MAX_CALLS
        for listener in self._gates.listeners:
            with contextlib.suppress(KeyError):
                self._selector.unregister(listener)
            if room:
                self._selector.register(listener, selectors.EVENT_READ, partial(self._call, listener))

    def _call(self, listener: socket.socket, _events: int) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        number, self._next_call = self._next_call, FIRST_CALL | (self._next_call + 1) & (FIRST_CALL - 1)
        self._link.send({"call": number})
        self._streams.add(number, connection)

    def _start(self, number: int, fields: Fields) -> None:
        run = run_field(fields)
        order = Order(
            package=fields.digest("package").hex(),
            max_seconds=fields.integer("max_seconds", low=1),
            ranks=fields.integer_or_null("ranks"),
            peers=tuple(fields.texts("peers", max_items=MAX_MACHINES)),
            relay=relay_order(fields.child("relay"), self._gates.path(run)) if fields.has("relay") else None,
        )
        wanted = fields.integer("launch_bytes", low=1, high=_MAX_LAUNCH_BYTES)
        fields.end()
        if not all(_PEER.fullmatch(peer) for peer in order.peers):
            raise FormatError(Code.SCHEMA, "request.peers is no list of host:port")
        self._starts[number] = _Start(number, run, order, wanted, bytearray())

    def _data(self, stream: int, data: bytes) -> None:
        if stream >= FIRST_CALL:
            self._streams.data(stream, data)
            return
        start = self._starts.get(stream)
        if start is None or len(start.launch) + len(data) > start.wanted:
            raise PeerError(Code.SCHEMA, "bytes without a request for them")
        start.launch += data
        if len(start.launch) < start.wanted:
            return
        del self._starts[stream]
        self._moved_s = time.monotonic()
        try:
            package = self._uploads.path(start.order.package)
            pid = self._runs[start.run].start(start.order, package, bytes(start.launch))
        except GlasshouseError as error:
            self._refuse(stream, error)
        except OSError as error:
            self._refuse(stream, PlatformError(Code.PLATFORM, f"the runtime cannot be started: {error.strerror}"))
        else:
            self._link.send({"id": stream, "ok": {"pid": pid}})
        finally:
            start.launch[:] = bytes(len(start.launch))

    def _look(self, number: int, fields: Fields) -> None:
        run, since = run_field(fields), fields.integer("since")
        within_ms = fields.integer("within_ms", high=_MAX_LOOK_MS)
        outputs, log = fields.integer("outputs"), fields.integer("log")
        fields.end()
        self._runs[run].asked()
        self._looks.append(_Look(number, run, since, time.monotonic() + within_ms / 1000, outputs, log))

    def _send_news(self) -> None:
        now_s = time.monotonic()
        for look in list(self._looks):
            run = self._runs[look.run]
            # In this order: what is there when a run has ended is all of it.
            ended = run.ended()
            files = run.files(outputs=look.outputs, log=look.log)
            more = any(numbered(name, first + MOST_FILES - 1) in files for name, first in _firsts(look))
            news: Answer = {"ended": ended, "files": {**files}, "more": more}
            serial = zlib.crc32(encode(news))
            if self._names.get(look.run) != files.keys():
                # Logs grow all the time; another file means that a step of the run began or ended.
                self._names[look.run], self._moved_s = set(files), now_s
            if serial != look.since or now_s >= look.until_s:
                self._looks.remove(look)
                self._link.send({"id": look.number, "ok": news | {"serial": serial}})

    def _wait_s(self) -> float | None:
        if self._upload is not None:
            if time.monotonic() - self._came_s > _STUCK_S:
                raise PeerError(Code.PLACE_UNREACHABLE, "an upload of which nothing comes")
            return _STUCK_S / 4
        silent_s = time.monotonic() - self._heard_s
        if silent_s > _SILENT_S:
            raise PeerError(Code.PLACE_UNREACHABLE, "nothing came from the owner for five minutes")
        if not self._looks:
            return _SILENT_S - silent_s
        quick = time.monotonic() - self._moved_s < _QUICK_FOR_S
        return _QUICK_S if quick else _SLOW_S

    def _read(self, number: int, fields: Fields) -> None:
        run, name = run_field(fields), fields.text("name")
        start, most = fields.integer("from"), fields.integer("most", low=1, high=MAX_DATA_BYTES)
        fields.end()
        if not is_name(name):
            raise FormatError(Code.SCHEMA, "request.name is no file of a run")
        self._runs[run].asked()
        self._reads.append(_Read(number, run, name, start, most))

    def _read_on(self) -> None:
        """Answer requests for files as far as the line takes it: calls of runtimes may not wait behind them."""
        while self._reads and self._link.pending_bytes < _HELD_BYTES:
            read = self._reads.popleft()
            try:
                data = self._runs[read.run].read(read.name, read.start, read.most)
            except GlasshouseError as error:
                self._refuse(read.number, error)
            except OSError as error:
                self._refuse(read.number, PlatformError(Code.PLATFORM, f"the machine refused: {error.strerror}"))
            else:
                self._link.send_data(read.number, data, can_wait=True)
                self._answer(read.number, {"bytes": len(data)}, can_wait=True)

    def _remove(self, _number: int, fields: Fields) -> Answer:
        run = run_field(fields)
        package = None if fields.null("package") else fields.digest("package").hex()
        fields.end()
        found = self._runs[run]
        package, relayed = found.package or package, found.relayed
        found.remove()
        self._drop_gate(run)
        if relayed:  # where its keeper was killed
            self._gates.path(run).unlink(missing_ok=True)
        if package is not None:
            self._uploads.drop(package)
        return {}

    def _drop_gate(self, run: str) -> None:
        listener = self._gates.listener(run)
        if listener is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(listener)
            self._gates.drop(run)

    def _reap(self) -> None:
        """Collect keepers that ended: they are this process's children."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _firsts(look: _Look) -> tuple[tuple[str, int], ...]:
    return (("outputs", look.outputs), ("log", look.log))


def _whole(error: GlasshouseError) -> str:
    return (f"{error.message} ({error.hint})" if error.hint else error.message)[:_MAX_MESSAGE_CHARS]


def serve(folder: Path, nonce: str, *, reader: int = 0, writer: int = 1) -> None:
    """Greet, and answer until the channel ends.

    Args:
        folder: the place's.
        nonce: the owner's, for the greeting.
        reader, writer: the channel.

    Raises:
        UsageError: `usage`: no nonce.
    """
    if not _NONCE.fullmatch(nonce):
        raise UsageError(Code.USAGE, "a place is served for a program: glasshouse run JOB --on MACHINE")
    place = Place(folder, reader, writer)
    os.set_blocking(writer, True)
    # On a line of its own, whatever a login has printed before.
    os.write(writer, f"\n{GREETING} {VERSION} {nonce}\n".encode())
    os.set_blocking(writer, False)
    place.serve()
