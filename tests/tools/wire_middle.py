"""Somebody between two hosts who owns every connection: reads each message of the handshake and each frame, and does
with it what an attack wants. Knows no secret.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from glasshouse.collectives.protocol.group_keys import Lane, Membership
from glasshouse.collectives.protocol.headers import HEADER_BYTES, TAG_BYTES, FrameKind, counted
from glasshouse.collectives.protocol.rendezvous import CONFIRM_BYTES, HELLO_BYTES, Rendezvous

__all__ = ["ATTACKS", "Attack", "Middle"]


@dataclass
class Way:
    """One direction of one connection that passes here."""

    into: socket.socket
    sending: threading.Lock = field(default_factory=threading.Lock)
    lane: int = 0
    source: int = -1
    destination: int = -1
    back: Way | None = None

    def send(self, data: bytes) -> None:
        with self.sending:
            self.into.sendall(data)


class Attack:
    """What is done to what passes: nothing. `struck` is set when an attack has done its deed."""

    victim: tuple[int, int] = (2, 0)
    """Source and destination of the connection that is attacked."""
    lane, kind, sequence = Lane.COLLECTIVE, FrameKind.DATA, 6
    """The operation or message whose frames are attacked."""
    hides_ends = False
    """Whether connections with the store seem to stand when they have ended."""

    def __init__(self) -> None:
        self.struck = threading.Event()

    def hello(self, way: Way, message: bytes) -> bytes:
        return message

    def frame(self, way: Way, frame: bytes) -> list[bytes]:
        """Return what to send on in the place of a frame."""
        return [frame]

    def store(self, data: bytes) -> bytes:
        """Return what to send on in the place of bytes from or to the store."""
        return data

    def _due(self, way: Way, frame: bytes) -> bool:
        """Return whether this is the first frame to strike at."""
        return (
            not self.struck.is_set()
            and (way.lane, way.source, way.destination) == (self.lane, *self.victim)
            and frame[1] == self.kind
            and int.from_bytes(frame[24:32], "big") == self.sequence
        )


class Flip(Attack):
    """One bit of a ciphertext."""

    def frame(self, way: Way, frame: bytes) -> list[bytes]:
        if not self._due(way, frame):
            return [frame]
        self.struck.set()
        at = HEADER_BYTES + 1000
        return [frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]]


class FlipHeader(Attack):
    """One bit of what the clear header says of the chunk."""

    def frame(self, way: Way, frame: bytes) -> list[bytes]:
        if not self._due(way, frame):
            return [frame]
        self.struck.set()
        return [frame[:43] + bytes([frame[43] ^ 1]) + frame[44:]]


class Drop(Attack):
    """One frame never arrives; the ones behind it do."""

    def frame(self, way: Way, frame: bytes) -> list[bytes]:
        if not self._due(way, frame):
            return [frame]
        self.struck.set()
        return []


class FlipMessage(Flip):
    """One bit of a point-to-point message."""

    lane = Lane.P2P


class Silence(Attack):
    """From one frame on nothing of one rank arrives any more, and no connection is closed."""

    def frame(self, way: Way, frame: bytes) -> list[bytes]:
        if self._due(way, frame):
            self.struck.set()
        return [] if self.struck.is_set() and way.source == self.victim[0] else [frame]


class Repeat(Attack):
    """One frame arrives twice."""

    def frame(self, way: Way, frame: bytes) -> list[bytes]:
        if not self._due(way, frame):
            return [frame]
        self.struck.set()
        return [frame, frame]


class RepeatOffer(Repeat):
    """A message is offered twice."""

    lane, kind = Lane.P2P, FrameKind.OFFER


class RepeatAccept(Repeat):
    """A message is accepted twice."""

    lane, kind = Lane.P2P, FrameKind.ACCEPT


class Reorder(Attack):
    """One frame arrives behind the one that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self._held = b""

    def frame(self, way: Way, frame: bytes) -> list[bytes]:
        if self._due(way, frame):
            self.struck.set()
            self._held = frame
            return []
        if self._held and (way.lane, way.source, way.destination) == (Lane.COLLECTIVE, *self.victim):
            held, self._held = self._held, b""
            return [frame, held]
        return [frame]


class Overtake(Attack):
    """The last frame for one rank arrives behind the first of those for all: both are genuine, of different streams."""

    def __init__(self) -> None:
        super().__init__()
        self._held = b""

    def frame(self, way: Way, frame: bytes) -> list[bytes]:
        if self._due(way, frame):
            for_all = frame[10:12] == b"\xff\xff"
            if not for_all:
                held, self._held = self._held, frame
                return [held] if held else []
            self.struck.set()
            return [frame, self._held]
        return [frame]


class Reflect(Attack):
    """A rank's own frame comes back to it, addressed as if the other had sent it."""

    def frame(self, way: Way, frame: bytes) -> list[bytes]:
        if self._due(way, frame):
            self.struck.set()
            assert way.back is not None
            way.back.send(frame[:8] + way.back.source.to_bytes(2, "big") + way.source.to_bytes(2, "big") + frame[12:])
        return [frame]


class Splice(Attack):
    """The ciphertext of an old step under the header of the new one."""

    def __init__(self) -> None:
        super().__init__()
        self._old: dict[int, bytes] = {}

    def frame(self, way: Way, frame: bytes) -> list[bytes]:
        if self._due(way, frame) and len(frame) in self._old:
            self.struck.set()
            return [frame[:HEADER_BYTES] + self._old[len(frame)][HEADER_BYTES:]]
        if (way.lane, way.source, way.destination) == (Lane.COLLECTIVE, *self.victim):
            self._old.setdefault(len(frame), frame)
        return [frame]


class Inject(Attack):
    """A frame that rank 3 made for the same operation, in the name of rank 2."""

    def __init__(self) -> None:
        super().__init__()
        self._theirs = b""
        self._arrived = threading.Event()

    def frame(self, way: Way, frame: bytes) -> list[bytes]:
        place = (way.lane, way.source, way.destination)
        if place == (Lane.COLLECTIVE, 3, self.victim[1]) and int.from_bytes(frame[24:32], "big") == self.sequence:
            self._theirs = self._theirs or frame
            self._arrived.set()
        if not self._due(way, frame):
            return [frame]
        self._arrived.wait(10)
        self.struck.set()
        return [frame[:HEADER_BYTES] + self._theirs[HEADER_BYTES:]]


class Impostor(Attack):
    """Somebody without the secret answers in the place of rank 0."""

    def hello(self, way: Way, message: bytes) -> bytes:
        if (way.source, way.destination) != (0, 2):
            return message
        self.struck.set()
        member = Membership(group="0", ranks=tuple(range(4)), rank=0, incarnation=0)
        return Rendezvous(member, os.urandom(32)).hello(Lane(way.lane), 2)


class Replay(Attack):
    """The hellos of rank 2 from an earlier job with the same secret."""

    def __init__(self, kept: dict[tuple[int, int, int], bytes]) -> None:
        super().__init__()
        self._kept = kept

    def hello(self, way: Way, message: bytes) -> bytes:
        place = (way.lane, way.source, way.destination)
        old = self._kept.setdefault(place, message)
        if way.source != self.victim[0] or old == message:
            return message
        self.struck.set()
        return old


class Reroute(Attack):
    """A store that names rank 1's address for rank 0 and rank 0's for rank 1."""

    def __init__(self, ports: tuple[bytes, bytes]) -> None:
        super().__init__()
        self._ports = ports

    def store(self, data: bytes) -> bytes:
        one, other = self._ports
        if one in data or other in data:
            self.struck.set()
        return b"".join({one: other, other: one}.get(part, part) for part in re.split(b"(%b|%b)" % (one, other), data))


class MuteStore(Attack):
    """A store that was asked for a listener's address, and neither says anything any more nor ends."""

    hides_ends = True

    def __init__(self, address: bytes) -> None:
        super().__init__()
        self._address = address

    def store(self, data: bytes) -> bytes:
        if self._address in data:
            self.struck.set()
        return b"" if self.struck.is_set() else data


ATTACKS: Mapping[str, Callable[..., Attack]] = {
    "none": Attack,
    "flip": Flip,
    "flip-header": FlipHeader,
    "flip-message": FlipMessage,
    "repeat-offer": RepeatOffer,
    "repeat-accept": RepeatAccept,
    "drop": Drop,
    "silence": Silence,
    "repeat": Repeat,
    "reorder": Reorder,
    "overtake": Overtake,
    "reflect": Reflect,
    "splice": Splice,
    "inject": Inject,
    "impostor": Impostor,
    "replay": Replay,
    "reroute": Reroute,
    "mute-store": MuteStore,
}


class Middle:
    """Takes connections in the place of one host and makes them to the other.

    Args:
        listeners: for each port, a listening socket that one host takes for the other's.
        upstream: the host that is meant.
        store_port: the one whose bytes are no frames.
        attack: what is done.
    """

    def __init__(self, listeners: Mapping[int, socket.socket], upstream: str, store_port: int, attack: Attack) -> None:
        self._upstream = upstream
        self._store_port = store_port
        self._attack = attack
        for port, listener in listeners.items():
            self._begin(self._accept, port, listener)

    def _begin(self, work: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()

    def _accept(self, port: int, listener: socket.socket) -> None:
        while True:
            near, _ = listener.accept()
            self._begin(self._join, port, near)

    def _join(self, port: int, near: socket.socket) -> None:
        """Connect to who is meant, as soon as it listens, and pass on what both say."""
        until = time.monotonic() + 20
        while True:
            try:
                far = socket.create_connection((self._upstream, port), timeout=10)
                break
            except OSError:
                if time.monotonic() > until:
                    near.close()
                    return
                time.sleep(0.02)
        far.settimeout(None)
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        forth, back = Way(far), Way(near)
        forth.back, back.back = back, forth
        pump = self._pass_store if port == self._store_port else self._pass_frames
        self._begin(pump, near, forth)
        self._begin(pump, far, back)

    def _pass_store(self, source: socket.socket, way: Way) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                way.send(self._attack.store(data))
        if not self._attack.hides_ends:
            with contextlib.suppress(OSError):
                way.into.shutdown(socket.SHUT_WR)

    def _pass_frames(self, source: socket.socket, way: Way) -> None:
        with contextlib.suppress(EOFError, OSError):
            hello = _exactly(source, HELLO_BYTES)
            way.lane = hello[10]
            way.source, way.destination = int.from_bytes(hello[12:14], "big"), int.from_bytes(hello[14:16], "big")
            way.send(self._attack.hello(way, hello))
            way.send(_exactly(source, CONFIRM_BYTES))
            while True:
                header = _exactly(source, HEADER_BYTES)
                size, _ = counted(header)
                frame = header + _exactly(source, size + TAG_BYTES)
                for each in self._attack.frame(way, frame):
                    way.send(each)
        with contextlib.suppress(OSError):
            way.into.shutdown(socket.SHUT_WR)


def _exactly(source: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = source.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)
