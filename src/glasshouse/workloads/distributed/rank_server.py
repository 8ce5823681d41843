"""The worker's connections with the ranks that it started, and the named socket at which they join.

Each rank sends its one-time token, is checked (`RankServer._is_own`), and then receives the descriptors of the grant;
the connection stays as its way out. Where a socket may have no name, a rank inherits its connection
(`rank_pairs.PairServer`), and the rest is the same (`RankLinks`). Laws:
- a token is good for one request, whatever comes of it;
- nothing is handed to a process that this one did not start itself, or, under the protected leg, that lets another
  process of its user read its memory;
- the first rank of this machine reports for the run: its progress and its outputs are passed on, another rank's
  progress is not, and its outputs are refused.
Source: spec/key-release.md, section 5.4.
"""

from __future__ import annotations

import hmac
import os
import secrets
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from typing import NamedTuple

from glasshouse.errors import Code, FormatError, GlasshouseError, RunError
from glasshouse.task.channel import AgentLink, Channel, Message
from glasshouse.task.checkpoints import Restored
from glasshouse.task.handle import Task
from glasshouse.task.lines import AgentLine
from glasshouse.wire import frames, ranks
from glasshouse.wire.canonical import Json
from glasshouse.workloads.distributed.machine_group import MachineGroup
from glasshouse.workloads.distributed.rank_checkpoints import OF_CHECKPOINTS, RankCheckpoints
from glasshouse.workloads.distributed.rank_messages import Dial, RankFailed, RankOutput, Report

# A rank sends its request as soon as it is connected; one that does not keeps the others waiting no longer.
_ASKING_S = 5.0
_SETTLING_S = 2.0
_BACKLOG = 128
_STOP: Message = {"type": "stop"}
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred of unix(7)
_MOST_TEXT = 1000
# A rank that does not read keeps the others waiting no longer.
_TAKING_S = 5
_TIME = struct.Struct("ll")  # seconds, microseconds: struct timeval


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """What each rank is handed."""

    secret: bytes = field(repr=False)  # of the group
    message: Mapping[str, Json]  # how to use the descriptors, for `rank`
    descriptors: tuple[int, ...] = ()  # secret memory and package, under the protected leg
    closed_to_others: bool  # whether a rank must be, before it is handed anything
    machines: MachineGroup | None = None  # the others of the group
    line: AgentLine | None = None  # where checkpoints go
    first: int = 0  # the number in the job of this machine's first rank
    restored: Mapping[int, Restored] = field(default_factory=dict)  # what each rank of the job goes on from


class Failure(NamedTuple):
    """How a rank failed, by its own message: the code, and a line for the sealed log."""

    rank: int
    code: Code
    words: str = ""


class RankLinks:
    """The connections with a job's ranks that have joined; `task` and `channel` take rank 0's outputs and progress."""

    def __init__(self, given: Given, task: Task, channel: Channel) -> None:
        self.report = Report()  # of rank 0, at its end
        self.failures: list[Failure] = []  # in the order in which they were reported
        self.stopped = False  # whether the owner ended the job
        self.checkpoints: RankCheckpoints | None = None  # takes theirs, where the job has a line
        self._given, self._task, self._channel = given, task, channel
        self._ranks: list[AgentLink] = []
        self._threads: list[Thread] = []
        # Which start of all ranks this is: connections of an earlier one lead nowhere.
        self._start = 0
        self._lock = Lock()
        self._joining = Lock()

    def join(self, rank: int, connection: socket.socket, start: int = 0) -> None:
        """Hand a rank what the job has, and listen to it from now on; raises `OSError` where it is gone."""
        place: Message = {"rank": rank, "type": "joined", "workspace": str(self._task.workspace)}
        if self._given.machines is not None:
            place["machine"] = self._given.machines.machine
        if (resume := self._given.restored.get(self._given.first + rank)) is not None:
            place["resume"] = {"path": str(resume.path or ""), "step": resume.step}
        joined = frames.control({**place, **self._given.message})
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(_TAKING_S, 0))
        with self._joining:
            if start != self._start:
                raise ConnectionRefusedError("a rank of an earlier start")
            socket.send_fds(connection, [joined], self._given.descriptors)
            link = AgentLink(connection)
            args, name = (rank, link, start), f"glasshouse-rank-{rank}"
            thread = Thread(target=self._receive, args=args, name=name, daemon=True)
            with self._lock:
                self._ranks.append(link)
                self._threads.append(thread)
                stopped = self.stopped
            thread.start()
            if self._given.line is not None:
                send_or_shut(link, self._given.line.now())
            if stopped:
                send_or_shut(link, _STOP)

    def permit(self, message: Message) -> None:
        """Pass the agent's permission on to every rank."""
        with self._lock:
            links = list(self._ranks)
        for link in links:
            send_or_shut(link, message)

    def stop(self) -> None:
        """Stop every rank, also those that join later, because the owner ended the job."""
        with self._lock:
            self.stopped = True
            links = list(self._ranks)
        for link in links:
            send_or_shut(link, _STOP)

    def settle(self) -> None:
        """Wait until every message of ranks that have ended is read."""
        with self._joining:  # one that has joined meanwhile may have reported and ended since
            threads = list(self._threads)
        for thread in threads:
            thread.join(_SETTLING_S)

    def _receive(self, rank: int, link: AgentLink, start: int) -> None:
        try:
            while True:
                self._take(rank, link, link.receive(), start)
        except (EOFError, OSError, FormatError):
            with self._lock:
                self._ranks.remove(link)
            if self.checkpoints is not None:
                self.checkpoints.gone(rank)
            link.close()

    def _require_start(self, start: int) -> None:
        if start != self._start:  # what it sent before its link was shut is still read
            raise EOFError("a rank of an earlier start")

    def _take(self, rank: int, link: AgentLink, message: Message, start: int) -> None:
        self._require_start(start)
        kind = message.get("type")
        if kind == "output":
            link.send(self._output(rank, message, link.take_descriptors(1)[0]))
        elif self.checkpoints is not None and kind in OF_CHECKPOINTS:
            self.checkpoints.take(rank, message, link, partial(send_or_shut, link))
        elif kind == "dial":
            # Not here: a machine that is slow to answer would keep this rank's other messages waiting.
            asked = Dial.from_json(message)
            Thread(target=self._dial, args=(link, asked), name="glasshouse-dial", daemon=True).start()
        elif kind == "failed":
            failed = RankFailed.from_json(message)
            with self._lock:
                self.failures.append(Failure(rank, failed.code, failed.words))
        elif rank == 0 and kind == "ended":
            self.report = Report.from_json(message)
        elif rank == 0 and kind == "progress":
            self._channel.send(message)

    def _dial(self, link: AgentLink, asked: Dial) -> None:
        """Answer a rank that wants a connection with another machine's."""
        try:
            if self._given.machines is None:
                raise ConnectionRefusedError("a job on one machine")
            connection = self._given.machines.dial(asked.machine, asked.port)
        except OSError:
            send_or_shut(link, {"id": asked.number, "type": "unreachable"})
            return
        with connection:
            send_or_shut(link, {"id": asked.number, "type": "dialled"}, [connection.fileno()])

    def _output(self, rank: int, message: Message, descriptor: int) -> Message:
        """Deliver an output, and return the answer."""
        with open(descriptor, "rb") as content:
            asked = RankOutput.from_json(message)
            try:
                if rank != 0:
                    raise RunError(Code.OUTPUT_REFUSED, "only the first rank of a machine saves outputs")
                digest = self._task.pass_on(asked.name, asked.kind, content)
            except GlasshouseError as error:
                text, hint = error.message[:_MOST_TEXT], error.hint[:_MOST_TEXT]
                return {"code": error.code.value, "hint": hint, "id": asked.number, "text": text, "type": "refused"}
        return {"id": asked.number, "sha256": digest, "type": "delivered"}


class RankServer(RankLinks):
    """One job's named socket, at which ranks join by their tokens; leaving the block ends it."""

    def __init__(self, given: Given, task: Task, channel: Channel) -> None:
        super().__init__(given, task, channel)
        self._tokens: dict[tuple[str, bytes], int] = {}
        # A short name under both legs: the address of a Unix socket has 108 bytes.
        self._folder = tempfile.mkdtemp(prefix="glasshouse-ranks-", dir="/tmp")
        self.path = self._folder + "/socket"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(_BACKLOG)

    def __enter__(self) -> RankServer:
        Thread(target=self._serve, name="glasshouse-ranks", daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def issue_tokens(self, rank: int) -> dict[str, str]:
        """Return fresh tokens for a rank that is about to be started, as its environment."""
        join, secret = secrets.token_bytes(ranks.TOKEN_BYTES), secrets.token_bytes(ranks.TOKEN_BYTES)
        with self._lock:
            # A rank that starts again has no use for the tokens and failures of its earlier start.
            self._tokens = {key: owner for key, owner in self._tokens.items() if owner != rank}
            self._tokens |= {("join", join): rank, ("group-secret", secret): rank}
            self.failures = [failure for failure in self.failures if failure.rank != rank]
        return {ranks.JOIN_TOKEN: join.hex(), ranks.SECRET_TOKEN: secret.hex()}

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # the job is over
            try:
                self._answer(connection)
            except (EOFError, OSError, FormatError):
                connection.close()

    def _answer(self, connection: socket.socket) -> None:
        request = ranks.Request.from_json(first_message(connection, time.monotonic() + _ASKING_S))
        rank = self._redeem(request)
        if rank is None or not self._is_own(connection):
            answer = ranks.refuse(Code.RANK_REFUSED)
        elif request.kind == "join":
            self.join(rank, connection)
            return
        else:
            answer = ranks.give_secret(self._given.secret)
        connection.sendall(answer)
        connection.close()

    def _redeem(self, request: ranks.Request) -> int | None:
        """Take a token back, whatever becomes of it; return whose it was. Every comparison takes the same time."""
        with self._lock:
            found = [
                key for key in self._tokens if key[0] == request.kind and hmac.compare_digest(key[1], request.token)
            ]
            return self._tokens.pop(found[0]) if found else None

    def _is_own(self, connection: socket.socket) -> bool:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        return uid == os.geteuid() and is_closed_child(pid, or_open=not self._given.closed_to_others)


def first_message(connection: socket.socket, until: float | None) -> Json:
    """Return the first message of a peer that has not proved itself, by a time (monotonic, s), however it trickles in.

    Raises:
        EOFError, OSError, FormatError: no control message; nothing in time; no frame.
    """
    decoder, received = frames.Decoder(), 0
    while received <= ranks.MAX_FRAME_BYTES:
        connection.settimeout(None if until is None else max(until - time.monotonic(), 0.001))
        data = connection.recv(ranks.MAX_FRAME_BYTES)
        if not data:
            break
        received += len(data)
        for kind, value in decoder.feed(data):
            if kind == frames.CONTROL and not isinstance(value, bytearray):
                return value
    raise EOFError("a peer that sent no message")


def is_closed_child(pid: int, *, or_open: bool) -> bool:
    """Return whether a number is that of this process's child, and the child closed to others.

    Args:
        pid: as it is here. Where the machine's own /proc is shown, the numbers there are the machine's: the last of
            the child's own ``NSpid`` is this one.
        or_open: whether it need not be closed.
    """
    for thread in os.listdir("/proc/self/task"):  # noqa: PTH208 - as everywhere that /proc is read
        for number in _words(f"/proc/self/task/{thread}/children"):
            numbers = _words(f"/proc/{number}/status", of="NSpid:")
            if numbers and int(numbers[-1]) == pid:
                return or_open or _is_unreadable(f"/proc/{number}/environ")
    return False


def _words(path: str, *, of: str = "") -> list[str]:
    """Return the words of a file of /proc, or of the line that begins so; none where that is gone."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return []
    return [word for line in lines if line.startswith(of) for word in line.removeprefix(of).split()]


def _is_unreadable(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except PermissionError:
        return True  # tried without a capability, as any other process here would have to
    except OSError:
        return False
    return False


def send_or_shut(link: AgentLink, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send a rank a message, from any thread; the link to one that has ended, or does not read in time, is shut."""
    try:
        link.send(message, descriptors)
    except OSError:
        link.shut()
