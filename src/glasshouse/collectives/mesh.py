"""How the ranks of a group come to be connected: addresses through the store, then two connections for every pair.

Laws: the store is believed in nothing: who is at an address is shown by the handshake on each connection; a stranger
who connects costs a bounded number of bytes and seconds; nothing but hellos, confirmations and sealed frames is ever
written to a connection.
Source: spec/sealed-collectives.md, section 3.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any

from glasshouse.collectives import route
from glasshouse.collectives.addresses import HEAR_OUT_S, Addresses, late, own_address, split
from glasshouse.collectives.dial import (
    Dialler,
    Direct,
    HandedOver,
    check_own_limits,
    dial_near,
    enlarge,
    handed_over,
    looked_up,
    near_address,
    of_this_user,
)
from glasshouse.collectives.hello import Greeting, Meeting
from glasshouse.collectives.keys import Lane, Membership
from glasshouse.collectives.link import Link
from glasshouse.collectives.near import Arena, NearLink, Neighbour, Offer, arena_for
from glasshouse.collectives.sealing import Traffic
from glasshouse.errors import Code, CollectiveError, FormatError

__all__ = ["ADDRESS_VARIABLE", "Mesh"]

ADDRESS_VARIABLE = "GLASSHOUSE_SEALED_ADDRESS"
"""host or host:port at which the other ranks reach this one, where that is not the address on the way to the store."""

_STRANGER_S = 5.0
"""How long a connection may take to say who it is."""
_STRANGERS = 32
"""Connections that have not said so yet, beside those of the ranks that are due."""
_DIAL_S = 4.0
"""How long one attempt to reach a rank may take; less than what a stranger may."""
_RETRY_S = 0.05


class Mesh:
    """The connections and keys of one rank in one group.

    Args:
        membership: the group.
        traffic: its keys.
        collective: one link a peer, for the collectives.
        p2p: one link a peer, for messages and last words.
        arena: what peers on this machine read frames from.
    """

    __slots__ = ("arena", "collective", "membership", "p2p", "traffic")

    def __init__(
        self,
        membership: Membership,
        traffic: Traffic,
        collective: Sequence[Link],
        p2p: Sequence[Link],
        arena: Arena | None = None,
    ) -> None:
        self.membership = membership
        self.arena = arena
        self.traffic = traffic
        # Each rank begins with the one after it, so that not all send to the same rank first.
        size, rank = membership.size, membership.rank
        self.collective = sorted(collective, key=lambda link: (link.peer - rank) % size)
        self.p2p = sorted(p2p, key=lambda link: (link.peer - rank) % size)

    @classmethod
    def connect(
        cls,
        store: Any,
        membership: Membership,
        secret: bytes | bytearray | memoryview,
        *,
        timeout_s: float,
        address: str | None = None,
        dialler: Dialler | None = None,
    ) -> Mesh:
        """Meet the other ranks.

        Args:
            store: a torch.distributed store that all ranks have, for their addresses.
            membership: the group.
            secret: its secret, 32 bytes; not kept.
            timeout_s: how long the others may take to come.
            address: where the others reach this rank, instead of what `GLASSHOUSE_SEALED_ADDRESS` or the route to
                the store says.
            dialler: how the others are reached; by default as `route` says, and else through the network.

        Raises:
            CollectiveError: `collective-timeout`, a rank did not come; `group-mismatch`, `collective-tampered`, one
                that does not fit; `rank-lost`, one that left on the way, or the store did; `collective-aborted`, this
                process cannot take part.
        """
        meeting = Meeting(membership, secret)
        if membership.size == 1:
            return cls(membership, Traffic(meeting.schedule()), [], [])
        with contextlib.closing(
            _Gathering(store, membership, meeting, dialler or route.chosen() or Direct(), time.monotonic() + timeout_s)
        ) as gathering:
            gathering.listen(address or os.environ.get(ADDRESS_VARIABLE) or own_address(store, timeout_s))
            gathering.call()
            gathering.meet()
            return gathering.mesh()

    def abandon(self) -> None:
        """Let go of connections and shared memory in a forked child."""
        if self.arena is not None:
            self.arena.abandon()
        for link in (*self.collective, *self.p2p):
            link.abandon()


class _Talk:
    """One connection on its way through the handshake."""

    __slots__ = ("confirmed", "connection", "got", "greeting", "near", "since", "to_send", "waiting")

    def __init__(self, connection: socket.socket, greeting: Greeting, now: float, *, near: bool) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.near = near
        """Whether the two met without the network."""
        self.greeting = greeting
        self.since = now
        self.got = bytearray()
        self.to_send = bytearray(greeting.begin())
        self.confirmed = False
        self.waiting = False
        """Whether the other end's confirmation has come before ours was made."""


class _Gathering:
    """A mesh in the making.

    Args:
        store: where the ranks leave their addresses.
        membership: the group.
        meeting: the handshake.
        dialler: how ranks are reached.
        until: when to give up (monotonic, s).
    """

    def __init__(self, store: Any, membership: Membership, meeting: Meeting, dialler: Dialler, until: float) -> None:
        self._addresses = Addresses(store, membership, until)
        self._dialler = dialler
        self._membership = membership
        self._meeting = meeting
        self._until = until
        self._selector = selectors.DefaultSelector()
        self._listeners: list[socket.socket] = []
        self._talks: list[_Talk] = []
        self._kept = False
        self._left: tuple[CollectiveError, float] | None = None
        """A rank that has left, and when that becomes the reason to give up."""

    def close(self) -> None:
        self._selector.close()
        if not self._kept:
            # Somebody may have failed after the keys were derived.
            with contextlib.suppress(ValueError, CollectiveError):
                self._meeting.schedule().forget()
        self._meeting.forget()
        for listener in self._listeners:
            listener.close()
        if not self._kept:
            for talk in self._talks:
                talk.connection.close()

    def listen(self, address: str) -> None:
        """Open the listener and leave its address in the store.

        Raises:
            CollectiveError: `collective-aborted`, this rank cannot listen there; `collective-timeout`, the store takes
                no address.
        """
        try:
            if isinstance(self._dialler, HandedOver):
                self._addresses.leave(self._await(self._dialler))
            else:
                self._addresses.leave(self._listen(*split(address)))
        except (OSError, ValueError) as error:
            check_own_limits(error)
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise CollectiveError(
                Code.COLLECTIVE_ABORTED,
                f"this rank cannot listen at {address!r}: {why}",
                hint=f"{ADDRESS_VARIABLE} is the host, or host:port, by which the other ranks find this one",
            ) from None

    def _listen(self, host: str, port: int) -> str:
        """Open the listeners; return what others are told."""
        info = looked_up(host, port, self._remaining())
        listener = socket.socket(info[0], socket.SOCK_STREAM)
        self._listeners.append(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        enlarge(listener)
        try:
            listener.bind(info[4])
        except OSError:
            # An address that others reach this rank by need not be one of this machine's own.
            listener.bind(("::" if info[0] == socket.AF_INET6 else "0.0.0.0", info[4][1]))  # noqa: S104
        host, bound = self._dialler.address(host, listener.getsockname()[1])
        said = f"{host} {bound}{self._listen_near()}"
        for each in self._listeners:
            each.listen(1024)
            self._attend_to(each)
        return said

    def _await(self, dialler: HandedOver) -> str:
        """Have connections handed over; return what others are told."""
        listener, name = dialler.listen()
        self._listeners.append(listener)
        self._attend_to(listener)
        host, port = dialler.address("", 0)
        return f"{host} {port} {name}"

    def _attend_to(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, listener)

    def _listen_near(self) -> str:
        """Open the listener for ranks of this machine; return what to add to the address."""
        if not self._dialler.near:
            return ""
        name = secrets.token_hex(16)
        with contextlib.ExitStack() as undone:
            try:
                listener = undone.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                listener.bind(near_address(name))
            except OSError:
                return ""  # a sandbox that allows no such sockets or names
            undone.pop_all()
        self._listeners.append(listener)
        return f" {name}"

    def call(self) -> None:
        """Connect to every rank below this one, twice."""
        for peer in range(self._membership.rank):
            address = self._addresses.of(peer, self._hear)
            for lane in Lane:
                connection, near = self._connect(peer, address)
                greeting = Greeting(self._meeting, lane=lane, peer=peer)
                self._add(_Talk(connection, greeting, time.monotonic(), near=near))

    def meet(self) -> None:
        """Go through the handshake on all connections."""
        due = len(Lane) * len(self._membership.peers)
        while True:
            if not self._meeting.missing:
                self._confirm()
            if sum(talk.greeting.done and not talk.to_send for talk in self._talks) == due:
                return
            left = self._remaining()
            if left <= 0:
                raise self._nobody_came()
            self._attend(left)

    def _hear(self, wait_s: float) -> None:
        """Serve the connections for so long, whatever comes on them: who waits for something else asks no sooner."""
        until = time.monotonic() + wait_s
        while True:
            self._attend(max(0.0, until - time.monotonic()))
            if time.monotonic() >= until:
                return

    def _attend(self, wait_s: float) -> None:
        """Serve the connections once, after waiting for them a while.

        Raises:
            CollectiveError: a rank that does not fit, or that has left.
        """
        if self._left is not None:
            error, until = self._left
            if (left := until - time.monotonic()) <= 0:
                raise error
            wait_s = min(wait_s, left)
        for key, events in self._selector.select(min(wait_s, 1.0)):
            if isinstance(key.data, _Talk):
                self._serve(key.data, events)
            else:
                self._accept(key.data)
        self._drop_the_slow()

    def mesh(self) -> Mesh:
        """Return what came of it."""
        with contextlib.ExitStack() as undone:
            arena, neighbours = self._share(undone)
            links: dict[Lane, list[Link]] = {lane: [] for lane in Lane}
            for talk in self._talks:
                lane, peer = talk.greeting.lane, talk.greeting.peer
                if not talk.greeting.done or lane is None or peer is None:
                    talk.connection.close()
                elif peer in neighbours:
                    links[lane].append(NearLink(talk.connection, lane, neighbours[peer]))
                else:
                    links[lane].append(Link(talk.connection, peer, lane))
            traffic = Traffic(self._meeting.schedule())
            mesh = Mesh(self._membership, traffic, links[Lane.COLLECTIVE], links[Lane.P2P], arena)
            undone.pop_all()
            self._kept = True
            return mesh

    def _share(self, undone: contextlib.ExitStack) -> tuple[Arena | None, dict[int, Neighbour]]:
        """Give the ranks of this machine the memory that they read frames from, and take theirs.

        Args:
            undone: closes what they gave, unless the mesh comes about.

        Raises:
            CollectiveError: `rank-lost`, one of them is gone; `collective-timeout`, it has sent nothing.
        """
        met = {(talk.greeting.peer, talk.greeting.lane): talk for talk in self._talks if talk.near}
        peers = [peer for peer in self._membership.peers if all((peer, lane) in met for lane in Lane)]
        if not peers:
            return None, {}
        neighbours: dict[int, Neighbour] = {}
        arena = arena_for(len(peers))
        with contextlib.ExitStack() as asked:
            if arena is not None:
                asked.callback(arena.shut)
            peer = peers[0]
            try:
                offers = []
                for peer in peers:
                    connection, connected = met[peer, Lane.COLLECTIVE].connection, peer < self._membership.rank
                    offers.append(asked.enter_context(Offer(connection, peer, arena, self._until, connected=connected)))
                for peer, offer in zip(peers, offers, strict=True):
                    neighbours[peer] = undone.enter_context(contextlib.closing(offer.answer()))
            except TimeoutError:
                raise late(self._membership, [peer]) from None
            except (OSError, ValueError) as error:
                check_own_limits(error)
                raise self._lost(peer) from None
        return arena, neighbours

    def _remaining(self) -> float:
        """Return the seconds until it is time to give up."""
        return self._until - time.monotonic()

    def _connect(self, peer: int, address: tuple[str, int, str]) -> tuple[socket.socket, bool]:
        """Connect to a listener, and say whether without the network.

        One that is not there yet, or no more, is tried again until the time is up.
        """
        while True:
            host, port, name = address
            if name and (connection := self._dial_near(name)) is not None:
                return connection, True
            left = self._remaining()
            if left <= 0:
                raise late(self._membership, [peer])
            try:
                # No longer at a time: meanwhile no other is heard.
                return self._dialler.dial(host, port, min(left, _DIAL_S)), False
            except UnicodeError:
                raise self._addresses.wrong(peer) from None
            except OSError as error:
                check_own_limits(error)
                # Not there yet; or what the store says is what an earlier run left, and will be replaced.
                self._hear(min(_RETRY_S, left))
                address = self._addresses.of(peer, self._hear)

    def _dial_near(self, name: str) -> socket.socket | None:
        """Return a connection with a rank of this machine, None where there is none by that name."""
        if isinstance(self._dialler, HandedOver):
            with contextlib.suppress(OSError):
                return self._dialler.call(name, max(0.0, min(self._remaining(), _DIAL_S)))
            return None
        return dial_near(name) if self._dialler.near else None

    def _add(self, talk: _Talk) -> None:
        if not talk.near:
            talk.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # At once: who says nothing for some seconds is a stranger, and others may keep this rank waiting.
        with contextlib.suppress(OSError):
            del talk.to_send[: talk.connection.send(talk.to_send)]
        self._talks.append(talk)
        self._selector.register(talk.connection, selectors.EVENT_READ | selectors.EVENT_WRITE, talk)

    def _accept(self, listener: socket.socket) -> None:
        handed = isinstance(self._dialler, HandedOver)
        try:
            connection = handed_over(listener) if handed else listener.accept()[0]
        except OSError as error:
            check_own_limits(error)
            return
        if connection is None:
            self._selector.unregister(listener)  # the process that hands over is gone, and this one soon
            return
        near = listener.family == socket.AF_UNIX
        if near and not of_this_user(connection):
            connection.close()
            return
        unknown = [talk for talk in self._talks if not talk.greeting.met and talk.greeting.peer is None]
        if len(unknown) >= len(Lane) * len(self._membership.peers) + _STRANGERS:
            # The one that has said nothing for the longest: a rank says who it is at once.
            self._drop(unknown[0])
        self._add(_Talk(connection, Greeting(self._meeting), time.monotonic(), near=near))

    def _serve(self, talk: _Talk, events: int) -> None:
        if talk not in self._talks:
            return  # dropped since the selector saw it
        try:
            if events & selectors.EVENT_WRITE and talk.to_send:
                del talk.to_send[: talk.connection.send(talk.to_send)]
            self._read(talk)
        except BlockingIOError:
            pass
        except FormatError:
            self._stranger(talk)
        except OSError:
            self._gone(talk)
        self._watch(talk)

    def _read(self, talk: _Talk) -> None:
        greeting = talk.greeting
        if greeting.met and not talk.confirmed:
            # Its confirmation is judged after ours has been made; until then it may only be seen to leave.
            if not talk.connection.recv(1, socket.MSG_PEEK):
                raise ConnectionResetError
            talk.waiting = True
            return
        while wants := greeting.wants:
            data = talk.connection.recv(wants - len(talk.got))
            if not data:
                raise ConnectionResetError
            talk.got += data
            if len(talk.got) < wants:
                return
            message, talk.got = bytes(talk.got), bytearray()
            try:
                talk.to_send += greeting.receive(message)
            except CollectiveError as error:
                self._refuse(talk, message, error)
            if greeting.met and not talk.confirmed:
                return

    def _refuse(self, talk: _Talk, message: bytes, error: CollectiveError) -> None:
        """Let a rank that does not fit see why before this one gives up."""
        if not talk.greeting.met and talk.greeting.peer is None:
            with contextlib.suppress(OSError, FormatError):
                talk.connection.send(talk.greeting.answer(message))
                talk.connection.shutdown(socket.SHUT_WR)
        raise error

    def _confirm(self) -> None:
        for talk in self._talks:
            if talk.greeting.met and not talk.confirmed:
                talk.confirmed = True
                talk.to_send += talk.greeting.confirm()
                self._watch(talk)

    def _watch(self, talk: _Talk) -> None:
        """Ask the selector for what the connection can use now."""
        if talk not in self._talks:
            return
        reads = bool(talk.greeting.wants) and not (talk.waiting and not talk.confirmed)
        events = (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if talk.to_send else 0)
        with contextlib.suppress(KeyError):
            self._selector.unregister(talk.connection)
        if events:
            self._selector.register(talk.connection, events, talk)

    def _stranger(self, talk: _Talk) -> None:
        """Drop a stranger; one that this rank was sent to is an error."""
        peer = talk.greeting.peer
        self._drop(talk)
        if peer is not None:
            raise CollectiveError(
                Code.COLLECTIVE_TAMPERED,
                f"what listens where the store says {self._membership.called(peer)} is, is no rank of a sealed group",
            )

    def _drop(self, talk: _Talk) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(talk.connection)
        self._talks.remove(talk)
        talk.connection.close()

    def _gone(self, talk: _Talk) -> None:
        """Take note that a connection ended: a stranger's is dropped, a rank's is an error."""
        peer = talk.greeting.peer
        self._drop(talk)
        if peer is not None and self._left is None:
            # Its other connection may say why.
            self._left = self._lost(peer), time.monotonic() + HEAR_OUT_S

    def _lost(self, peer: int) -> CollectiveError:
        who = self._membership.called(peer)
        return CollectiveError(Code.RANK_LOST, f"{who} left while the ranks of the group were meeting", rank=peer)

    def _drop_the_slow(self) -> None:
        now = time.monotonic()
        for talk in [talk for talk in self._talks if talk.greeting.peer is None]:
            if now - talk.since > _STRANGER_S:
                self._drop(talk)

    def _nobody_came(self) -> CollectiveError:
        missing = list(self._meeting.missing) or [
            talk.greeting.peer
            for talk in self._talks
            if talk.greeting.peer is not None and not talk.greeting.done and talk.greeting.lane is Lane.COLLECTIVE
        ]
        return late(self._membership, missing)
