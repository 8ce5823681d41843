"""A rank's connection with the worker that started it: joins, and carries progress, outputs and requests.

Source: `wire.ranks` for the first exchange; `rank_server` for what follows.
"""

from __future__ import annotations

import io
import os
import queue
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import BinaryIO, TypeAlias

from glasshouse.errors import Code, FormatError, RunError
from glasshouse.task.channel import AgentLink, Channel, Message
from glasshouse.wire import frames, ranks
from glasshouse.wire.record import Record
from glasshouse.workloads.distributed.rank_messages import PASSING_ON_S, Ask, CallDoor, Dial, Join, RankOutput

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred of unix(7)
_COPY_BYTES = 1 << 20
_MACHINE_DIGITS = 4
_WITH_DESCRIPTOR = ("called", "dialled", "door")
_END_PROCESS = os._exit  # a script's own `os._exit` concludes its job first

_Answers: TypeAlias = "queue.SimpleQueue[tuple[Message, int | None]]"


class RankChannel(Channel):
    """One rank's end; only the process that joined may send (`AgentLink`).

    Raises:
        RunError: `rank-refused`: the worker did not start this process, or not as a rank.
    """

    def __init__(self) -> None:
        self.stopping = False
        self.saved = False  # whether its last part of a checkpoint was whole: the worker still passes it on
        self.on_line: Callable[[Message], None] = lambda _message: None  # takes what the worker passes on of the line
        self._lock = threading.Lock()
        self._asked = 0
        self._waiting: dict[int, _Answers] = {}
        token, inherited = os.environ.pop(ranks.JOIN_TOKEN, ""), os.environ.pop(ranks.CHANNEL, None)
        self.inherited = inherited is not None  # this process has no sockets but those that it is handed
        try:
            if inherited is None:
                connection = _connected(os.environ.get(ranks.SOCKET, ""))
                request = ranks.Request(kind="join", token=bytes.fromhex(token)).frame()
            else:
                connection = _inherited(inherited)
                request = frames.control(Join().to_json())
            self._link = AgentLink(connection)
            connection.sendall(request)
            self.joined = self._link.receive()  # what the worker handed over
        except (EOFError, OSError, ValueError, FormatError):
            raise _refused() from None
        rank, machine = self.joined.get("rank"), self.joined.pop("machine", None)
        if self.joined.get("type") != "joined" or not isinstance(rank, int) or not isinstance(machine, int | None):
            raise _refused()
        self.rank, self.machine = rank, machine  # on this machine; which of several this is

    def take_descriptors(self, count: int) -> list[int]:
        """Return the descriptors that came along, which must be `count`; raises `FormatError`."""
        return self._link.take_descriptors(count)

    def listen(self, on_stop: Callable[[], None]) -> None:
        """From now on, wait for `stop` and for answers in a thread; the worker's end is this process's too."""
        threading.Thread(target=self._listen, args=(on_stop,), name="glasshouse-rank", daemon=True).start()

    def send(self, message: Message) -> None:
        if self.rank == 0 or message.get("type") != "progress":
            self._link.send(message)

    def output(self, header: Message, source: BinaryIO) -> str:
        # As a whole: a file without a name, which the worker reads.
        if self.rank != 0:
            raise RunError(
                Code.OUTPUT_REFUSED,
                f"rank {os.environ.get('RANK', self.rank)} may not save {str(header['name'])[:80]!a}: only the first "
                "rank of a machine saves outputs",
                hint="gather it there, or write it into the output folder, whose files come back whichever rank "
                "wrote them",
            )
        with _as_file(source) as descriptor:
            request = partial(RankOutput, kind=str(header["kind"]), name=str(header["name"]))
            answer, _ = self._ask(request, [descriptor])
        if answer.get("type") == "delivered":
            return str(answer["sha256"])
        raise RunError(Code(str(answer["code"])), str(answer["text"]), hint=str(answer["hint"]))

    def dial(self, machine: int, port: int, timeout_s: float) -> socket.socket:
        """Return a connection, over this machine's loopback, with a listener on another machine's; raises `OSError`."""
        refused = f"machine {machine} cannot be reached at port {port}"
        request = partial(Dial, machine=machine, port=port)
        return socket.socket(fileno=self._connection(request, timeout_s, refused, f"machine {machine} does not answer"))

    def group_secret(self) -> bytes:
        """Return the group's secret, where it is inherited: once; raises `CollectiveError`."""
        answer, _ = self._ask(partial(Ask, kind="group-secret"))
        return ranks.read_secret({name: value for name, value in answer.items() if name != "id"})

    def ask_store(self, question: Message, limit_s: float) -> Message:
        """Return the worker's answer to a question for the ranks' store (`rank_store`).

        Raises:
            queue.Empty: there was none in time; the question is taken back.
            OSError: the worker is gone.
        """
        with self._numbered() as (number, answers):
            self._link.send({"id": number, "type": "store", **question})
            try:
                return answers.get(timeout=limit_s)[0]
            except queue.Empty:
                self._link.send({"id": number, "keys": [], "type": "store", "what": "forget"})
                raise

    def ask(self, request: Callable[..., Record]) -> Message:
        """Return the worker's answer to a request, whenever it comes."""
        return self._ask(request)[0]

    def wait_until_saved(self) -> None:
        """Wait, at this rank's end, until the worker has passed on the checkpoint that it took part in."""
        if self.saved:
            with suppress(queue.Empty, OSError):
                self._ask(partial(Ask, kind="saved"), timeout_s=PASSING_ON_S)

    def tell(self, message: Record, descriptors: Sequence[int]) -> None:
        """Send the worker a message with descriptors, which is not answered."""
        self._link.send(message.to_json(), descriptors)

    def open_door(self) -> tuple[socket.socket, str]:
        """Return a socket on which connections come as descriptors, and the name by which other ranks call it."""
        answer, descriptor = self._ask(partial(Ask, kind="door"))
        if descriptor is None:
            raise ConnectionRefusedError("the worker gave no door")
        return _kept_from_children(descriptor), str(answer["name"])

    def call(self, name: str, timeout_s: float) -> socket.socket:
        """Return a connection that went through another rank's door; raises `OSError`."""
        request, late = partial(CallDoor, name=name), "the worker does not answer"
        return _kept_from_children(self._connection(request, timeout_s, "no rank has that door now", late))

    def _connection(self, request: Callable[..., Record], timeout_s: float, refused: str, late: str) -> int:
        try:
            _, descriptor = self._ask(request, timeout_s=timeout_s)
        except queue.Empty:
            raise TimeoutError(late) from None
        if descriptor is None:
            raise ConnectionRefusedError(refused)
        return descriptor

    def _ask(
        self, request: Callable[..., Record], descriptors: Sequence[int] = (), *, timeout_s: float | None = None
    ) -> tuple[Message, int | None]:
        """Return the worker's answer, and the descriptor that came with it, if one did; raises `queue.Empty`."""
        with self._numbered() as (number, answers):
            self._link.send(request(number=number).to_json(), descriptors)
            return answers.get(timeout=timeout_s)

    @contextmanager
    def _numbered(self) -> Iterator[tuple[int, _Answers]]:
        """Yield the number of a question, and where its answer comes."""
        answers: _Answers = queue.SimpleQueue()
        with self._lock:
            self._asked += 1
            number = self._asked
            self._waiting[number] = answers
        try:
            yield number, answers
        finally:
            with self._lock:
                del self._waiting[number]

    def _listen(self, on_stop: Callable[[], None]) -> None:
        try:
            while True:
                message = self._link.receive()
                if message.get("type") == "line":
                    self.on_line(message)
                elif message.get("type") != "stop":
                    self._take_answer(message)
                elif not self.stopping:
                    self.stopping = True
                    on_stop()
        except FormatError as error:
            os.write(2, f"glasshouse: rank {self.rank}: {error.message}\n".encode())
            _END_PROCESS(1)
        except (EOFError, OSError):
            _END_PROCESS(1)

    def _take_answer(self, message: Message) -> None:
        descriptor = self._link.take_descriptors(1)[0] if message.get("type") in _WITH_DESCRIPTOR else None
        number = message.get("id")
        with self._lock:
            waiting = self._waiting.get(number) if isinstance(number, int) else None
        if waiting is not None:
            waiting.put((message, descriptor))
        elif descriptor is not None:
            os.close(descriptor)  # the thread that asked was interrupted


class OtherMachines:
    """Leads the connections of sealed groups to ranks of other machines through the worker (`dial.Dialler`).

    A rank's address in the store is its machine and the port on that machine's loopback.
    """

    local = True

    def __init__(self, channel: RankChannel, machine: int) -> None:
        self._channel, self._machine = channel, machine

    def address(self, _host: str, port: int) -> tuple[str, int]:
        """Return what other ranks call a listener of this one."""
        return f"machine-{self._machine}", port

    def dial(self, host: str, port: int, timeout_s: float) -> socket.socket:
        """Return a connection with the listener of that address; raises `OSError`."""
        machine = host.removeprefix("machine-")
        if not (machine.isascii() and machine.isdigit() and len(machine) <= _MACHINE_DIGITS and 0 < port < 65536):
            raise ConnectionRefusedError("the store holds no address of that rank")
        if int(machine) == self._machine:
            connection = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
        else:
            connection = self._channel.dial(int(machine), port, timeout_s)
        connection.settimeout(None)
        return connection


def _inherited(number: str) -> socket.socket:
    """Return the inherited end; raises `OSError` or `ValueError` where there is none."""
    connection = _kept_from_children(int(number))
    if connection.family != socket.AF_UNIX:
        connection.detach()
        raise ValueError("another descriptor than the worker's")
    return connection


def _kept_from_children(descriptor: int) -> socket.socket:
    """Return a socket that no program which this process starts inherits."""
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    return connection


def _connected(path: str) -> socket.socket:
    """Connect to the worker; raises `OSError`, also where another user's process listens at the path."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(raw)[1] not in (os.geteuid(), 0):
            raise PermissionError("not the worker's socket")
    except OSError:
        connection.close()
        raise
    return connection


def _refused() -> RunError:
    return RunError(
        Code.RANK_REFUSED,
        "this process is no rank that the job's worker started, and is given nothing",
        hint="ranks are started by `glasshouse run --ranks N`, each once",
    )


@contextmanager
def _as_file(source: BinaryIO) -> Iterator[int]:
    """Yield the descriptor of a file that holds `source`: its own, or that of a copy in the workspace."""
    try:
        yield source.fileno()
    except io.UnsupportedOperation:
        with tempfile.TemporaryFile() as copy:
            shutil.copyfileobj(source, copy, _COPY_BYTES)
            copy.flush()
            yield copy.fileno()
