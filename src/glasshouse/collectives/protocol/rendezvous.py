"""The handshake of a group's ranks: a hello and a confirmation both ways on every connection, bytes in and bytes out.

Laws: nothing of an unauthenticated hello is kept; a message has a fixed length and is read once; a group is complete
when every peer has sent a hello on both lanes, and confirmed when every peer has proved that it derived the same keys.
Bytes of a stranger are a `FormatError`: drop the connection. A rank that does not fit is a `CollectiveError`: end the
group. Source: spec/sealed-collectives.md, section 3.
"""

from __future__ import annotations

import hmac
import os
import struct
from dataclasses import dataclass, fields

from glasshouse.collectives.protocol.group_keys import (
    CONTRIBUTION_BYTES,
    SECRET_BYTES,
    Lane,
    Membership,
    Schedule,
    forget_in_children,
    hello_key,
)
from glasshouse.errors import Code, CollectiveError, FormatError
from glasshouse.wire.crypto import zero

MAGIC = b"\x89GHC\r\n\x1a\n"
VERSION = 1
HELLO_BYTES = 128
CONFIRM_BYTES = 32
_FIELDS = struct.Struct(">8sHBxHHIxxxxQ32s32s")
_MAC_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message of a rank on a connection. Law: ``Hello.parse(h.encode(key)) == h``."""

    lane: Lane
    source: int
    destination: int
    size: int
    incarnation: int
    group: bytes
    contribution: bytes

    def encode(self, key: bytes | bytearray) -> bytes:
        """Return the `HELLO_BYTES`, authenticated under the hello key."""
        packed = _FIELDS.pack(MAGIC, VERSION, *(getattr(self, field.name) for field in fields(self)))
        return packed + hmac.digest(key, packed, "sha256")

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview) -> Hello:
        """Read a hello whose authenticity is yet to be checked.

        Raises:
            FormatError: `wrong-type`, a stranger; `unsupported`, another version; `schema-invalid`.
        """
        if len(data) != HELLO_BYTES:
            raise FormatError(Code.SCHEMA, f"a hello has {HELLO_BYTES} bytes")
        magic, version, lane, *values = _FIELDS.unpack_from(data)
        if magic != MAGIC:
            raise FormatError(Code.WRONG_TYPE, "not a rank of a sealed group")
        if version != VERSION:
            raise FormatError(Code.UNSUPPORTED, f"a rank of protocol version {version}, this one has {VERSION}")
        if lane not in set(Lane) or any(data[11:12]) or any(data[20:24]):
            raise FormatError(Code.SCHEMA, "a hello that is not in its one form")
        return cls(lane=Lane(lane), **dict(zip([field.name for field in fields(cls)][1:], values, strict=True)))


class Rendezvous:
    """One rank's part in the handshake: its contribution, the peers' hellos, and at last the keys.

    The secret is not kept beyond `schedule`; a contribution is given by vectors only, and drawn at random otherwise.
    """

    def __init__(
        self, membership: Membership, secret: bytes | bytearray | memoryview, *, contribution: bytes | None = None
    ) -> None:
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a group secret has {SECRET_BYTES} bytes")
        self.membership = membership
        self._secret = bytearray(secret)
        self._key = bytearray(hello_key(secret))
        self._digest = membership.digest()
        self._contributions = {membership.rank: contribution or os.urandom(CONTRIBUTION_BYTES)}
        self._greeted: set[tuple[Lane, int]] = set()
        self._schedule: Schedule | None = None
        forget_in_children(self)

    def hello(self, lane: Lane, destination: int) -> bytes:
        """Return the first message of a connection with `destination`."""
        if not self._secret:
            raise ValueError("the rendezvous is over, or the process was forked")
        return Hello(
            lane=lane,
            source=self.membership.rank,
            destination=destination,
            size=self.membership.size,
            incarnation=self.membership.incarnation,
            group=self._digest,
            contribution=self._contributions[self.membership.rank],
        ).encode(self._key)

    def meet(self, data: bytes | bytearray | memoryview, *, lane: Lane | None, peer: int | None) -> Hello:
        """Check a hello and keep its contribution; lane and peer are None on a connection that this rank accepted.

        Raises:
            FormatError: not a hello, or one of another version.
            CollectiveError: `group-mismatch`, an honest rank that does not fit, as far as that can be decided;
                `collective-tampered`, a hello that was repeated, reflected, or brought to another rank.
        """
        hello = Hello.parse(data)
        self._check_secret(hello, data, peer)
        self._check_group(hello)
        self._check_place(hello, lane, peer)
        known = self._contributions.setdefault(hello.source, hello.contribution)
        if known != hello.contribution or (hello.lane, hello.source) in self._greeted:
            what = f"{self.membership.called(hello.source)} sent two different hellos: an old one was repeated"
            raise CollectiveError(Code.COLLECTIVE_TAMPERED, what, rank=hello.source)
        self._greeted.add((hello.lane, hello.source))
        return hello

    @property
    def missing(self) -> tuple[int, ...]:
        """The peers whose hello has not come on both lanes yet."""
        return tuple(peer for peer in self.membership.peers if not all((lane, peer) in self._greeted for lane in Lane))

    def schedule(self) -> Schedule:
        """Return the keys, once no rank is missing; the secret is dropped then."""
        if self._schedule is None:
            if self.missing or not self._secret:
                raise ValueError("there are no keys before the hello of every rank")
            parts = [self._contributions[index] for index in range(self.membership.size)]
            if len(set(parts)) != len(parts):
                raise CollectiveError(Code.COLLECTIVE_TAMPERED, "two ranks made the same contribution")
            self._schedule = Schedule(self.membership, self._secret, parts)
            self.forget()
        return self._schedule

    def forget(self) -> None:
        """Drop the secret and the hello key; a schedule that was made keeps its keys."""
        zero(self._secret)
        zero(self._key)
        self._secret = bytearray()

    def _check_secret(self, hello: Hello, data: bytes | bytearray | memoryview, peer: int | None) -> None:
        expected = hmac.digest(self._key, bytes(data[:-_MAC_BYTES]), "sha256")
        if not self._secret or not hmac.compare_digest(expected, bytes(data[-_MAC_BYTES:])):
            who = self.membership.called(hello.source if peer is None else peer)
            what = f"what calls itself {who} holds another group secret, or its hello was changed on the way"
            hint = "every rank of a job must be given the same group secret"
            raise CollectiveError(Code.GROUP_MISMATCH, what, hint=hint, rank=peer)

    def _check_group(self, hello: Hello) -> None:
        own = self.membership
        if hello.size != own.size:
            differs = f"counts {hello.size} ranks where {own.called(own.rank)} counts {own.size}"
        elif hello.group != self._digest:
            differs = f"is in another group than {own.group!r} of {own.size}, or has its ranks in another order"
        elif hello.incarnation != own.incarnation:
            theirs, ours = (
                f"initialisation {each & 0xFFFFFFFF} after restart {each >> 32}"
                for each in (hello.incarnation, own.incarnation)
            )
            differs = f"is at {theirs} of group {own.group!r}, and {own.called(own.rank)} at {ours}"
        else:
            return
        hint = "every rank must call the same initialisations in the same order"
        what = f"{own.called(hello.source)} {differs}"
        raise CollectiveError(Code.GROUP_MISMATCH, what, hint=hint, rank=hello.source)

    def _check_place(self, hello: Hello, lane: Lane | None, peer: int | None) -> None:
        own = self.membership
        # The higher rank connects: all that a rank which accepts can check.
        source_fits = own.rank < hello.source < own.size if peer is None else hello.source == peer
        if not source_fits or hello.destination != own.rank or lane not in (None, hello.lane):
            route = f"from {own.called(hello.source)} to {own.called(hello.destination)} came to {own.called(own.rank)}"
            what = f"a hello {route}: it was rerouted or reflected between the ranks"
            raise CollectiveError(Code.COLLECTIVE_TAMPERED, what, rank=hello.source)


class ConnectionHandshake:
    """The handshake on one connection: what to read next, and what to write.

    Feed `receive` with exactly `wants` bytes until `met`; when the rendezvous is complete, send `confirm()`, and feed
    `receive` again until `done`. The rank that connected gives lane and peer; the other takes them from the hello.
    """

    def __init__(self, rendezvous: Rendezvous, *, lane: Lane | None = None, peer: int | None = None) -> None:
        if (lane is None) != (peer is None):
            raise ValueError("lane and peer are both known or both not")
        self._rendezvous = rendezvous
        self._schedule: Schedule | None = None
        self.lane = lane
        self.peer = peer
        self.met = False
        self.done = False

    @property
    def wants(self) -> int:
        """How many bytes `receive` takes next; 0 when there is nothing more to read."""
        return 0 if self.done else CONFIRM_BYTES if self.met else HELLO_BYTES

    def begin(self) -> bytes:
        """Return the first bytes to write: the hello of the rank that connected, else nothing."""
        return b"" if self.lane is None or self.peer is None else self._rendezvous.hello(self.lane, self.peer)

    def receive(self, data: bytes | bytearray | memoryview) -> bytes:
        """Take the next message; return the answer to write, which may be empty.

        Raises:
            FormatError: a stranger.
            CollectiveError: `group-mismatch` or `collective-tampered`.
            ValueError: out of turn.
        """
        if len(data) != self.wants:
            raise ValueError(f"{len(data)} bytes where {self.wants} are due")
        if not self.met:
            accepted = self.peer is None
            hello = self._rendezvous.meet(data, lane=self.lane, peer=self.peer)
            self.lane, self.peer, self.met = hello.lane, hello.source, True
            return self._rendezvous.hello(hello.lane, hello.source) if accepted else b""
        if self._schedule is None or self.lane is None or self.peer is None:
            raise ValueError("a confirmation is judged after the own one has been made")
        if not self._schedule.confirms(self.lane, self.peer, data):
            who = self._rendezvous.membership.called(self.peer)
            what = f"{who} has other keys, though the same secret: a hello was changed or repeated between the ranks"
            raise CollectiveError(Code.COLLECTIVE_TAMPERED, what, rank=self.peer)
        self.done = True
        return b""

    def answer(self, data: bytes | bytearray | memoryview) -> bytes:
        """Return the hello for a rank whose own was refused, so that it can name the difference; any peer gets it."""
        hello = Hello.parse(data)
        return self._rendezvous.hello(hello.lane, hello.source)

    def confirm(self) -> bytes:
        """Return the confirmation to write, once the rendezvous is complete."""
        if self.lane is None or self.peer is None or not self.met:
            raise ValueError("no rank has been met here yet")
        self._schedule = self._rendezvous.schedule()
        return self._schedule.confirmation(self.lane, self._rendezvous.membership.rank, self.peer)
