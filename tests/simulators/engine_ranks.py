"""Ranks of a sealed group as threads of one process, over real connections, and somebody on one of these."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from glasshouse.collectives.engine.engine import Engine
from glasshouse.collectives.operations.communicator import Communicator
from glasshouse.collectives.protocol.frame_memory import CHUNK_BYTES
from glasshouse.collectives.protocol.group_keys import Lane, Membership
from glasshouse.collectives.protocol.headers import HEADER_BYTES, TAG_BYTES, FrameKind, counted
from glasshouse.collectives.protocol.rendezvous import CONFIRM_BYTES, HELLO_BYTES
from glasshouse.collectives.transport.dial import Direct
from glasshouse.collectives.transport.mesh import Mesh

__all__ = ["SECRET", "Ended", "Middle", "connect", "ended", "in_ranks", "operate", "world"]

SECRET = bytes(range(32))


@dataclass
class Ended:
    """How a rank's story ended."""

    value: Any = None
    error: BaseException | None = None


def connect(store: Any, rank: int, size: int, **options: Any) -> Mesh:
    """Meet the other ranks as rank `rank`."""
    given = {"secret": SECRET, "group": "world", "incarnation": 0, "timeout_s": 20.0, **options}
    membership = Membership(
        group=given.pop("group"), ranks=tuple(range(size)), rank=rank, incarnation=given.pop("incarnation")
    )
    return Mesh.connect(store, membership, given.pop("secret"), **given)


def ended(size: int, story: Callable[[int], Any]) -> list[Ended]:
    """Let each rank live its story in a thread; return how each ended."""
    ends = [Ended() for _ in range(size)]

    def live(rank: int) -> None:
        try:
            ends[rank].value = story(rank)
        except BaseException as error:
            ends[rank].error = error

    threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    return ends


def world(
    size: int,
    story: Callable[[Engine], Any],
    *,
    timeout_s: float = 20.0,
    chunk_bytes: int = CHUNK_BYTES,
    kind: type[Communicator] = Communicator,
    middle: Middle | None = None,
) -> list[Ended]:
    """Let each rank of a group live its story with its engine, and close that; return how each ended."""
    store = dist.HashStore()

    def live(rank: int) -> Any:
        dialler = None if middle is None or rank != middle.of[0] else middle
        mesh = connect(store, rank, size, dialler=dialler)
        communicator = kind(mesh.membership, mesh.traffic, chunk_bytes=chunk_bytes, shared=mesh.shared)
        engine = Engine(mesh, timeout_s=timeout_s, communicator=communicator)
        try:
            return story(engine)
        finally:
            engine.close()

    return ended(size, live)


def in_ranks(size: int, story: Callable[[Engine], Any], **options: Any) -> list[Any]:
    """Let each rank live its story; return what each returned, or raise what the first raised."""
    ends = world(size, story, **options)
    for end in ends:
        if end.error is not None:
            raise end.error
    return [end.value for end in ends]


def operate(engine: Engine, *operations: Any) -> None:
    """Carry operations out, one after the other."""
    for operation in operations:
        engine.submit(operation, background=False).wait()


@dataclass
class Middle(Direct):
    """Sits on the collective connection between two ranks, the first of which connects to the second.

    Args:
        of: these two.
        attack: what is done to the n-th data frame on its way to the first: what to send on in its place.
    """

    local = False
    of: tuple[int, int]
    attack: Callable[[int, bytes], Sequence[bytes]]
    _seen: int = 0
    _stop: list[socket.socket] = field(default_factory=list)

    def dial(self, host: str, port: int, timeout_s: float) -> socket.socket:
        there = super().dial(host, port, timeout_s)
        here, near = _loopback_pair()
        threading.Thread(target=self._carry, args=(near, there, False), daemon=True).start()
        threading.Thread(target=self._carry, args=(there, near, True), daemon=True).start()
        return here

    def _carry(self, source: socket.socket, into: socket.socket, attacked: bool) -> None:
        source.settimeout(None)
        into.settimeout(None)
        with contextlib.suppress(OSError, EOFError):
            hello = _read(source, HELLO_BYTES)
            into.sendall(hello)
            into.sendall(_read(source, CONFIRM_BYTES))
            attacked = attacked and hello[10] == Lane.COLLECTIVE and int.from_bytes(hello[12:14], "big") == self.of[1]
            while True:
                header = _read(source, HEADER_BYTES)
                frame = header + _read(source, counted(header)[0] + TAG_BYTES)
                for part in self._changed(frame) if attacked else (frame,):
                    into.sendall(part)
        for end in (source, into):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _changed(self, frame: bytes) -> Sequence[bytes]:
        if frame[1] != FrameKind.DATA:
            return [frame]
        self._seen += 1
        return self.attack(self._seen - 1, frame)


def _loopback_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    return here, there


def _read(source: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = source.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
