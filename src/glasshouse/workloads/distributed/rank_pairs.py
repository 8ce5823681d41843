"""Ranks of a machine that gives no namespaces: each inherits its connection, and every further one is handed over it.

Torchelastic wants sessions and ports, so this module starts, waits for and ends them in its place, with the variables
that a rank finds there (torch.distributed.elastic).

The worker and its ranks may there bind and connect to no socket's name (`runtime.confine.seccomp`, `isolated`), so
nothing outside reaches them by one, nor they anything outside. On its channel a rank requests what it else finds by a
name:

```
rank → worker   {"type": "join"}                 first, when it has closed itself; answered as `rank_server` does
rank → worker   {"id", "type": "group-secret"}   answered once in the life of a rank
rank → worker   {"id", "type": "door"}
worker → rank   {"id", "name", "type": "door"}   with a descriptor, on which connections come beside one byte each
rank → worker   {"id", "name", "type": "call"}
worker → rank   {"id", "type": "called"}         with the connection, whose other end went through the door of that name
worker → rank   {"id", "type": "unreachable"}    no such door, or its rank or the worker takes no more now
rank → worker   {"type": "store", …}             `rank_store`
```
Laws: a connection is a pair of Unix sockets that this process makes and keeps no end of; nothing is handed over before
the process that was started has been tried to be read, and refused; when all ranks begin again, the connections of
the earlier ones are shut, and messages that they had sent are not carried out; a rank inherits one end of a pair and
nothing else that its worker holds; it is ended by a descriptor, never by a number that may be another process's; when
one rank has failed the others are ended, and all are gone before they begin again. What a rank starts itself is ended
with the worker.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from threading import Thread

from glasshouse.errors import Code, FormatError
from glasshouse.task.channel import AgentLink, Channel, Message
from glasshouse.task.handle import Task
from glasshouse.wire import ranks
from glasshouse.wire.canonical import b64encode
from glasshouse.workloads.distributed.rank_messages import DOOR_NAME_CHARS, Ask, CallDoor, Join
from glasshouse.workloads.distributed.rank_server import Given, RankLinks, first_message, is_closed_child, send_or_shut
from glasshouse.workloads.distributed.rank_store import KeyValues

# Those that fail because of the same thing are distinguished from those that are ended because of them.
_TOGETHER_S = 0.1
# As torchelastic leaves to a rank that handles SIGTERM.
_ENDING_S = 30.0
# Of one rank: one for each group that it is joining.
_MOST_DOORS = 1 << 10


class PairServer(RankLinks):
    """One job's ranks, each at its inherited end; leaving the block closes the others."""

    def __init__(self, given: Given, task: Task, channel: Channel) -> None:
        super().__init__(given, task, channel)
        self._doors: dict[str, tuple[int, socket.socket]] = {}
        self._store = KeyValues()
        self._asked_secret: set[int] = set()

    def __enter__(self) -> PairServer:
        return self

    def __exit__(self, *_error: object) -> None:
        self._close_doors()

    def begin(self) -> None:
        """Forget what an earlier start of the ranks left: its store, its doors, its failures."""
        with self._joining, self._lock:
            self._start += 1
            # What an earlier rank left behind, such as a process that it forked, may hold its end.
            for link in self._ranks:
                link.shut()
            self._store = KeyValues()
            self._asked_secret.clear()
            self.failures.clear()
        self._close_doors()

    def connect(self, rank: int, pid: int, own: socket.socket) -> None:
        """Wait, in a thread, for a rank that was started, and inherited the other end of `own`, to join."""
        args = (rank, pid, own, self._start)
        Thread(target=self._admit, args=args, name=f"glasshouse-rank-{rank}", daemon=True).start()

    def _admit(self, rank: int, pid: int, own: socket.socket, start: int) -> None:
        try:
            # It takes as long as its interpreter does; its end ends the waiting.
            Join.from_json(first_message(own, None))
            if is_closed_child(pid, or_open=not self._given.closed_to_others):
                self.join(rank, own, start)
                return
            own.sendall(ranks.refuse(Code.RANK_REFUSED))
        except (EOFError, OSError, FormatError):
            pass  # the launcher has its exit status
        own.close()

    def _take(self, rank: int, link: AgentLink, message: Message, start: int) -> None:
        with self._lock:
            self._require_start(start)
            store = self._store
        kind = message.get("type")
        if kind == "store":
            store.take(rank, message, partial(send_or_shut, link))
        elif kind == "group-secret":
            link.send(self._secret(rank, message, start))
        elif kind == "door":
            self._open_door(rank, link, message, start)
        elif kind == "call":
            self._call(link, message)
        else:
            super()._take(rank, link, message, start)

    def _secret(self, rank: int, message: Message, start: int) -> Message:
        number = Ask.from_json(message).number
        with self._lock:
            self._require_start(start)
            again = rank in self._asked_secret
            self._asked_secret.add(rank)
        if again:
            return {"code": Code.RANK_REFUSED.value, "id": number, "type": "refused"}
        return {"id": number, "secret": b64encode(self._given.secret), "type": "group-secret"}

    def _open_door(self, rank: int, link: AgentLink, message: Message, start: int) -> None:
        number = Ask.from_json(message).number
        try:
            own, theirs = socket.socketpair()
        except OSError:  # as many descriptors as this process may have
            link.send({"id": number, "type": "unreachable"})
            return
        own.setblocking(False)  # before Python 3.13 `send_fds` ignores its flags
        with theirs:
            name = secrets.token_hex(DOOR_NAME_CHARS // 2)
            with self._lock:
                self._require_start(start)
                for old in [old for old, (owner, door) in self._doors.items() if owner == rank and _is_shut(door)]:
                    self._doors.pop(old)[1].close()
                self._doors[name] = rank, own
                if sum(owner == rank for owner, _ in self._doors.values()) > _MOST_DOORS:
                    raise FormatError(Code.TOO_LARGE, "a rank that joins more groups at once than there can be")
            link.send({"id": number, "name": name, "type": "door"}, [theirs.fileno()])

    def _call(self, link: AgentLink, message: Message) -> None:
        asked = CallDoor.from_json(message)
        unreachable: Message = {"id": asked.number, "type": "unreachable"}
        try:
            ours, theirs = socket.socketpair()
        except OSError:
            link.send(unreachable)
            return
        with ours, theirs:
            if self._pass_through(asked.name, theirs):
                link.send({"id": asked.number, "type": "called"}, [ours.fileno()])
            else:
                link.send(unreachable)

    def _pass_through(self, name: str, connection: socket.socket) -> bool:
        with self._lock:
            if name not in self._doors:
                return False
            try:
                socket.send_fds(self._doors[name][1], [b"c"], [connection.fileno()])
            except OSError:
                return False  # its rank has shut it, or has many to take
        return True

    def _close_doors(self) -> None:
        with self._lock:
            for _, door in self._doors.values():
                door.close()
            self._doors.clear()


def _is_shut(door: socket.socket) -> bool:
    """Return whether the other end of a door, on which a rank never sends anything, is closed."""
    try:
        return not door.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def launch(server: PairServer, command: Sequence[str], count: int, *, max_restarts: int) -> Mapping[int, int]:
    """Start the ranks, again if one fails and it is allowed, and wait for the last; raises `OSError`.

    Returns:
        the exit codes of those that failed in the last start, negative for a signal.
    """
    variables = {
        # A script may look at these two; no listener is behind them.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": str(count),
        "ROLE_NAME": "rank",
        "ROLE_WORLD_SIZE": str(count),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": secrets.token_hex(8),
        "WORLD_SIZE": str(count),
    }
    for start in range(max_restarts + 1):
        server.begin()
        failed = _launch_once(server, command, count, variables | {"TORCHELASTIC_RESTART_COUNT": str(start)})
        server.settle()
        if not failed or server.stopped:
            return failed
    return failed


def _launch_once(
    server: PairServer, command: Sequence[str], count: int, variables: Mapping[str, str]
) -> dict[int, int]:
    started: list[_Rank] = []
    try:
        for rank in range(count):
            started.append(_Rank(server, command, rank, variables))
        _wait(started, to_failure=True)
        _wait(started, until=time.monotonic() + _TOGETHER_S)
        return {one.rank: one.code for one in started if one.code}
    finally:
        _end(started)


class _Rank:
    """One process."""

    def __init__(self, server: PairServer, command: Sequence[str], rank: int, variables: Mapping[str, str]) -> None:
        self.rank = rank
        self.code: int | None = None  # how it ended
        own, theirs = socket.socketpair()
        with theirs:
            number, channel = str(rank), theirs.fileno()
            numbers = {"LOCAL_RANK": number, "RANK": number, "ROLE_RANK": number, ranks.CHANNEL: str(channel)}
            try:
                self._process = subprocess.Popen(
                    command, env={**os.environ, **variables, **numbers}, pass_fds=[channel]
                )
            except BaseException:
                own.close()
                raise
        # Not waited for yet: the number is its own.
        self.pidfd = os.pidfd_open(self._process.pid)
        server.connect(rank, self._process.pid, own)

    def poll(self) -> bool:
        """Return whether it has ended."""
        if self.code is None:
            self.code = self._process.poll()
        return self.code is not None

    def close(self) -> None:
        """Wait for its end, which was ordered or has come."""
        self.code = self._process.wait()
        os.close(self.pidfd)


def _wait(started: Iterable[_Rank], *, to_failure: bool = False, until: float | None = None) -> None:
    """Wait until all have ended, or one has failed, or the time (monotonic, s) is up."""
    while True:
        living = [one for one in started if not one.poll()]
        if not living or (to_failure and any(one.code for one in started)):
            return
        left_s = None if until is None else until - time.monotonic()
        if left_s is not None and left_s <= 0:
            return
        poll = select.poll()
        for one in living:
            poll.register(one.pidfd, select.POLLIN)
        poll.poll(None if left_s is None else left_s * 1000)


def _end(started: Sequence[_Rank]) -> None:
    """Leave none of them: first by SIGTERM, which a script may handle, and then for good."""
    for number, patience_s in ((signal.SIGTERM, _ENDING_S), (signal.SIGKILL, 0.0)):
        for one in started:
            if not one.poll():
                signal.pidfd_send_signal(one.pidfd, number)
        _wait(started, until=time.monotonic() + patience_s)
    for one in started:
        one.close()
