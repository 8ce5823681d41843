"""Serves a place: the machine's end of a channel (spec/place.md).

Laws: it holds no secret but a launch file on its way through; no request makes a call of a runtime to its gate wait for
longer than the start of a process; it ends with its standard input, and the runs go on without it.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from glasshouse.errors import Code, FormatError, GlasshouseError, PeerError, PlatformError, UsageError
from glasshouse.providers.protocol import messages
from glasshouse.providers.protocol.link import MAX_CALLS, Calls, Link
from glasshouse.providers.protocol.order import Order, RelayOrder
from glasshouse.providers.serve.facts import answers
from glasshouse.providers.serve.gate_sockets import GateSockets
from glasshouse.providers.serve.keepers import boot
from glasshouse.providers.serve.runs import MOST_FILES, Runs, numbered, own_folder
from glasshouse.providers.serve.uploads import Upload, Uploads
from glasshouse.wire.canonical import Json

_MAX_REQUESTS = 16
_RAW_S = 0.05
_STUCK_S = 60.0
# Owners repeat their request within a minute. A line can end unreported: a step of Slurm's outlives its srun.
_SILENT_S = 300.0
_HELD_BYTES = 256 << 10
# How often a run's folder is looked at: at its lively beginning and end, and while it trains.
_QUICK_S, _SLOW_S = 0.05, 0.5
_QUICK_FOR_S = 3.0


class _Look(NamedTuple):
    number: int
    run: str
    since: int
    until_s: float
    first: dict[str, int]  # of each folder of sealed files, the first that is named


@dataclass(slots=True)
class _Start:
    """A start whose launch file has not come whole."""

    run: str
    order: Order
    wanted: int
    launch: bytearray


class PlaceServer:
    """One connection's service: of a place's folder, made if need be, over the descriptors of a channel."""

    def __init__(self, folder: Path, reader: int, writer: int) -> None:
        own_folder(folder)
        self._runs, self._uploads = Runs(folder / "runs"), Uploads(folder / "files", boot=boot())
        self._at_once = answers(folder, self._runs, self._uploads)
        self._link = Link(reader, writer)
        self._selector = selectors.DefaultSelector()
        self._calls = Calls(self._link, self._selector)
        self._gates = GateSockets(folder, self._selector, self._call)
        self._next_call = messages.FIRST_CALL
        self._looks: list[_Look] = []
        self._names: dict[str, set[str]] = {}
        self._starts: dict[int, _Start] = {}
        self._upload: tuple[int, Upload] | None = None
        self._reads: deque[tuple[int, str, str, int, int]] = deque()
        # When anything came, when some of an upload did, and when a run last changed.
        self._heard_s = self._came_s = self._moved_s = time.monotonic()
        # Take a request's number and members; return the answer, or None where it comes later.
        self._later: dict[str, Callable[..., tuple[Any, ...] | None]] = {
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
                self._select_writer()
                self._gates.listen(len(self._calls) < MAX_CALLS)  # further calls wait in the kernel's queue
                for key, events in self._selector.select(self._wait_s()):
                    key.data(events)
                self._send_news()
                self._read_on()
                with contextlib.suppress(ChildProcessError):
                    while os.waitpid(-1, os.WNOHANG)[0]:  # keepers that ended are this process's children
                        pass
        except PeerError as error:
            if error.code is Code.SCHEMA:
                with contextlib.suppress(PeerError):
                    self._refuse(0, error)
        finally:
            self._calls.close()
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
        for found in self._link.receive():
            if not isinstance(found, dict):
                self._data(*found)
                continue
            try:
                self._message(found)
            except FormatError as error:
                raise PeerError(Code.SCHEMA, f"a message that this place does not have: {error.message}") from None

    def _select_writer(self) -> None:
        """Select for writing only while there is something to write."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._link.writer)
        if self._link.pending_bytes:
            self._selector.register(self._link.writer, selectors.EVENT_WRITE, self._channel)

    # Requests

    def _message(self, value: dict[str, Json]) -> None:
        if "ask" in value:
            self._request(*messages.read_request(value))
            return
        kind, members = messages.read_message(value)
        if kind not in ("end", "drop"):
            raise FormatError(Code.SCHEMA, f"{kind} is for an owner")
        (self._calls.end if kind == "end" else self._calls.drop)(*members)

    def _request(self, number: int, ask: str, members: tuple[Any, ...]) -> None:
        if len(self._looks) + len(self._starts) + len(self._reads) >= _MAX_REQUESTS:
            raise PeerError(Code.SCHEMA, "more requests at once than a place answers")
        with self._refusing(number, "the machine refused"):
            at_once = self._at_once.get(ask)
            answer = self._later[ask](number, *members) if at_once is None else at_once(*members)
            if answer is not None:
                self._answer(number, ask, answer)

    @contextlib.contextmanager
    def _refusing(self, number: int, what: str) -> Iterator[None]:
        """Answer a request with the error that the block raises; one about the channel itself goes on."""
        try:
            yield
        except (FormatError, PeerError):
            raise
        except GlasshouseError as error:
            self._refuse(number, error)
        except OSError as error:
            self._refuse(number, PlatformError(Code.PLATFORM, f"{what}: {error.strerror}"))

    def _answer(self, number: int, ask: str, members: Any, *, can_wait: bool = False) -> None:
        try:
            self._link.send(messages.message("ok", number, messages.ASKS[ask].answer.write(members)), can_wait=can_wait)
        except ValueError:
            self._refuse(number, PlatformError(Code.PLATFORM, "the machine's answer is longer than a message may be"))

    def _refuse(self, number: int, error: GlasshouseError) -> None:
        whole = f"{error.message} ({error.hint})" if error.hint else error.message
        self._link.send(messages.message("code", number, error.code.value, whole[: messages.MAX_MESSAGE_CHARS]))

    def _put(self, number: int, digest: str, size: int, start: int) -> tuple[()] | None:
        if self._uploads.whole(digest, size):
            return ()
        upload = self._uploads.begin(digest, size, start)
        self._link.send(messages.message("go", number, True))
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
            self._answer(number, "put", ())
        finally:
            upload.close()

    def _prepare(self, _number: int, run: str, relayed: bool) -> tuple[str]:
        self._gates.drop(run)
        if relayed or self._runs[run].relayed:  # its keeper listens, whether an owner is connected or not
            return (f"unix:{self._gates.path(run)}",)
        return (self._gates.open(run),)

    def _call(self, connection: socket.socket) -> None:
        number, self._next_call = (
            self._next_call,
            messages.FIRST_CALL | (self._next_call + 1) & (messages.FIRST_CALL - 1),
        )
        self._link.send(messages.message("call", number))
        self._calls.add(number, connection)

    def _start(
        self,
        number: int,
        run: str,
        package: str,
        launch_bytes: int,
        max_seconds: int,
        ranks: int | None,
        peers: tuple[str, ...],
        relay: RelayOrder | None,
    ) -> None:
        if relay is not None:
            relay = replace(relay, socket=str(self._gates.path(run)))
        order = Order(package=package, max_seconds=max_seconds, ranks=ranks, peers=peers, relay=relay)
        self._starts[number] = _Start(run, order, launch_bytes, bytearray())

    def _data(self, stream: int, data: bytes) -> None:
        if stream >= messages.FIRST_CALL:
            self._calls.data(stream, data)
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
            with self._refusing(stream, "the runtime cannot be started"):
                package = self._uploads.path(start.order.package)
                self._answer(stream, "start", (self._runs[start.run].start(start.order, package, bytes(start.launch)),))
        finally:
            start.launch[:] = bytes(len(start.launch))

    def _look(self, number: int, run: str, since: int, within_ms: int, outputs: int, log: int) -> None:
        self._runs[run].asked()
        until_s = time.monotonic() + within_ms / 1000
        self._looks.append(_Look(number, run, since, until_s, {"outputs": outputs, "log": log}))

    def _send_news(self) -> None:
        now_s = time.monotonic()
        for look in list(self._looks):
            run = self._runs[look.run]
            # In this order: what is there when a run has ended is all of it.
            ended = run.ended()
            files = run.files(look.first)
            more = any(numbered(name, first + MOST_FILES - 1) in files for name, first in look.first.items())
            serial = zlib.crc32(repr((ended, files, more)).encode())
            if self._names.get(look.run) != files.keys():
                # Logs grow all the time; another file means that a step of the run began or ended.
                self._names[look.run], self._moved_s = set(files), now_s
            if serial != look.since or now_s >= look.until_s:
                self._looks.remove(look)
                self._answer(look.number, "look", (ended, files, more, serial))

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

    def _read(self, number: int, run: str, name: str, start: int, most: int) -> None:
        self._runs[run].asked()
        self._reads.append((number, run, name, start, most))

    def _read_on(self) -> None:
        """Answer requests for files as far as the line takes it: calls of runtimes may not wait behind them."""
        while self._reads and self._link.pending_bytes < _HELD_BYTES:
            number, run, name, start, most = self._reads.popleft()
            with self._refusing(number, "the machine refused"):
                data = self._runs[run].read(name, start, most)
                self._link.send_data(number, data, can_wait=True)
                self._answer(number, "read", (len(data),), can_wait=True)

    def _remove(self, _number: int, run: str, package: str | None) -> tuple[()]:
        found = self._runs[run]
        package, relayed = found.package or package, found.relayed
        found.remove()
        self._gates.drop(run)
        if relayed:  # where its keeper was killed
            self._gates.path(run).unlink(missing_ok=True)
        if package is not None:
            self._uploads.drop(package)
        return ()
