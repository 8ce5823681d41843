"""Connects the ranks of a group: two connections for every pair, each through the handshake.

Laws: the handshake on a connection proves which rank is at its other end; a connection of a stranger costs a bounded
number of bytes and seconds; nothing but hellos and confirmations is written before the mesh is complete.
Source: spec/sealed-collectives.md, section 3.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from glasshouse.collectives.protocol.frame_memory import allocate
from glasshouse.collectives.protocol.group_keys import Lane, Membership
from glasshouse.collectives.protocol.rendezvous import ConnectionHandshake, Rendezvous
from glasshouse.collectives.protocol.traffic import Traffic
from glasshouse.collectives.transport.dial import Dialler, Direct, check_own_limits
from glasshouse.collectives.transport.endpoint import (
    ADDRESS_VARIABLE,
    HEAR_OUT_S,
    Addresses,
    Endpoint,
    late,
    lost,
    own_address,
)
from glasshouse.collectives.transport.local_link import LocalLink, share_pools
from glasshouse.collectives.transport.peer_link import PeerLink
from glasshouse.collectives.transport.send_pool import SendPool
from glasshouse.errors import Code, CollectiveError, FormatError

_STRANGER_S = 5.0  # how long a connection may take until its hello has come
_STRANGERS = 32  # connections without a hello, beside those of the ranks that are due
_DIAL_S = 4.0  # how long one attempt to reach a rank may take; less than `_STRANGER_S`
_RETRY_S = 0.05


@dataclass(eq=False)
class _Pending:
    """One connection on its way through the handshake; `local` if it was made without the network."""

    connection: socket.socket
    handshake: ConnectionHandshake
    local: bool
    since: float = field(default_factory=time.monotonic)
    got: bytearray = field(default_factory=bytearray)
    confirmed: bool = False
    waiting: bool = False  # whether the other end's confirmation has come before ours was made

    def __post_init__(self) -> None:
        self.connection.setblocking(False)
        self.to_send = bytearray(self.handshake.begin())


class Joining:
    """The connections of one rank while the group comes together, until a time to give up (monotonic, s)."""

    def __init__(
        self, store: Any, membership: Membership, rendezvous: Rendezvous, dialler: Dialler, until: float
    ) -> None:
        self._addresses = Addresses(store, membership, until)
        self._dialler = dialler
        self._membership = membership
        self._rendezvous = rendezvous
        self._until = until
        self._selector = selectors.DefaultSelector()
        self._endpoint = Endpoint(dialler, self._selector)
        self._pending: list[_Pending] = []
        self._kept = False
        self._left: tuple[CollectiveError, float] | None = None  # who left, and when to give up for it

    def close(self) -> None:
        """Close what the mesh did not take over, and drop the keys if there is none."""
        self._selector.close()
        self._endpoint.close()
        if not self._kept:
            with contextlib.suppress(ValueError, CollectiveError):  # the keys may have been derived before the failure
                self._rendezvous.schedule().forget()
            for pending in self._pending:
                pending.connection.close()
        self._rendezvous.forget()

    def join(self, own: str) -> None:
        """Listen, connect to every rank below this one, twice, and go through the handshake on all connections.

        Raises:
            CollectiveError: as of `Mesh.connect`.
        """
        self._endpoint.listen(own, self._until - time.monotonic(), self._addresses.leave)
        for peer in range(self._membership.rank):
            address = self._addresses.of(peer, self._serve_for)
            for lane in Lane:
                connection, local = self._connect(peer, address)
                self._add(connection, ConnectionHandshake(self._rendezvous, lane=lane, peer=peer), local=local)
        due = len(Lane) * len(self._membership.peers)
        while True:
            if not self._rendezvous.missing:
                for pending in self._pending:
                    if pending.handshake.met and not pending.confirmed:
                        pending.confirmed = True
                        pending.to_send += pending.handshake.confirm()
                        self._watch(pending)
            if sum(pending.handshake.done and not pending.to_send for pending in self._pending) == due:
                return
            left = self._until - time.monotonic()
            if left <= 0:
                missing = list(self._rendezvous.missing) or [
                    each.peer
                    for each in (pending.handshake for pending in self._pending)
                    if each.peer is not None and not each.done and each.lane is Lane.COLLECTIVE
                ]
                raise late(self._membership, missing)
            self._serve_once(left)

    def finish(self) -> tuple[Traffic, dict[Lane, list[PeerLink]], SendPool | None]:
        """Return keys, links and the memory that peers on this machine read from, once `join` has returned.

        Raises:
            CollectiveError: `rank-lost` or `collective-timeout`, a rank of this machine shared nothing.
        """
        with contextlib.ExitStack() as undone:
            met = {(each.handshake.peer, each.handshake.lane): each for each in self._pending if each.local}
            near = [peer for peer in self._membership.peers if all((peer, lane) in met for lane in Lane)]
            connections = {peer: met[peer, Lane.COLLECTIVE].connection for peer in near}
            send_pool, local_peers = share_pools(self._membership, connections, self._until, undone)
            links: dict[Lane, list[PeerLink]] = {lane: [] for lane in Lane}
            for pending in self._pending:
                lane, peer = pending.handshake.lane, pending.handshake.peer
                if not pending.handshake.done or lane is None or peer is None:
                    pending.connection.close()
                elif peer in local_peers:
                    links[lane].append(LocalLink(pending.connection, lane, local_peers[peer]))
                else:
                    links[lane].append(PeerLink(pending.connection, peer, lane))
            traffic = Traffic(self._rendezvous.schedule())
            undone.pop_all()
            self._kept = True
            return traffic, links, send_pool

    def _serve_for(self, wait_s: float) -> None:
        """Serve the connections for so long, whatever comes on them."""
        until = time.monotonic() + wait_s
        while True:
            self._serve_once(max(0.0, until - time.monotonic()))
            if time.monotonic() >= until:
                return

    def _serve_once(self, wait_s: float) -> None:
        """Serve the connections once, after waiting for them a while."""
        if self._left is not None:
            error, until = self._left
            if (left := until - time.monotonic()) <= 0:
                raise error
            wait_s = min(wait_s, left)
        for key, events in self._selector.select(min(wait_s, 1.0)):
            if isinstance(key.data, _Pending):
                self._serve(key.data, events)
            else:
                self._accept(key.data)
        now = time.monotonic()
        for pending in [each for each in self._pending if each.handshake.peer is None]:
            if now - pending.since > _STRANGER_S:
                self._drop(pending)

    def _connect(self, peer: int, address: tuple[str, int, str]) -> tuple[socket.socket, bool]:
        """Connect to a listener; return the connection, and whether it is without the network.

        One that is not there yet, or no more, is tried again until the time is up.
        """
        while True:
            host, port, name = address
            left = self._until - time.monotonic()
            # No longer at a time: meanwhile no other connection is served.
            limit_s = max(0.0, min(left, _DIAL_S))
            if name and (connection := self._endpoint.dial_local(name, limit_s)) is not None:
                return connection, True
            if left <= 0:
                raise late(self._membership, [peer])
            try:
                return self._dialler.dial(host, port, limit_s), False
            except UnicodeError:
                raise self._addresses.wrong(peer) from None
            except OSError as error:
                check_own_limits(error)
                # Not there yet; or the store has what an earlier run left, which will be replaced.
                self._serve_for(min(_RETRY_S, left))
                address = self._addresses.of(peer, self._serve_for)

    def _add(self, connection: socket.socket, handshake: ConnectionHandshake, *, local: bool) -> None:
        pending = _Pending(connection, handshake, local)
        if not local:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # At once: a connection that is silent for some seconds is a stranger's, and others may keep this rank waiting.
        with contextlib.suppress(OSError):
            del pending.to_send[: connection.send(pending.to_send)]
        self._pending.append(pending)
        self._selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, pending)

    def _accept(self, listener: socket.socket) -> None:
        accepted = self._endpoint.accept(listener)
        if accepted is None:
            return
        unknown = [pending for pending in self._pending if not pending.handshake.met and pending.handshake.peer is None]
        if len(unknown) >= len(Lane) * len(self._membership.peers) + _STRANGERS:
            # The one that has sent nothing for the longest: a rank sends its hello at once.
            self._drop(unknown[0])
        self._add(accepted[0], ConnectionHandshake(self._rendezvous), local=accepted[1])

    def _serve(self, pending: _Pending, events: int) -> None:
        if pending not in self._pending:
            return  # dropped since the selector saw it
        peer = pending.handshake.peer
        try:
            if events & selectors.EVENT_WRITE and pending.to_send:
                del pending.to_send[: pending.connection.send(pending.to_send)]
            self._read(pending)
        except BlockingIOError:
            pass
        except FormatError:
            self._drop(pending)
            if peer is not None:  # not a stranger, but where this rank was sent to
                raise CollectiveError(
                    Code.COLLECTIVE_TAMPERED,
                    f"what listens at the address of {self._membership.called(peer)} is no rank of a sealed group",
                ) from None
        except OSError:
            peer = pending.handshake.peer
            self._drop(pending)
            if peer is not None and self._left is None:
                # Its other connection may bring the reason.
                self._left = lost(self._membership, peer), time.monotonic() + HEAR_OUT_S
        self._watch(pending)

    def _read(self, pending: _Pending) -> None:
        handshake = pending.handshake
        if handshake.met and not pending.confirmed:
            # Its confirmation is judged after ours has been made; until then only its leaving is noticed.
            if not pending.connection.recv(1, socket.MSG_PEEK):
                raise ConnectionResetError
            pending.waiting = True
            return
        while wants := handshake.wants:
            data = pending.connection.recv(wants - len(pending.got))
            if not data:
                raise ConnectionResetError
            pending.got += data
            if len(pending.got) < wants:
                return
            message, pending.got = bytes(pending.got), bytearray()
            try:
                pending.to_send += handshake.receive(message)
            except CollectiveError:
                if not handshake.met and handshake.peer is None:
                    # The rank that does not fit gets our hello, to name the difference, before this one gives up.
                    with contextlib.suppress(OSError, FormatError):
                        pending.connection.send(handshake.answer(message))
                        pending.connection.shutdown(socket.SHUT_WR)
                raise
            if handshake.met and not pending.confirmed:
                return

    def _watch(self, pending: _Pending) -> None:
        """Register the connection for the events that it can use now."""
        if pending not in self._pending:
            return
        reads = bool(pending.handshake.wants) and not (pending.waiting and not pending.confirmed)
        events = (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if pending.to_send else 0)
        with contextlib.suppress(KeyError):
            self._selector.unregister(pending.connection)
        if events:
            self._selector.register(pending.connection, events, pending)

    def _drop(self, pending: _Pending) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(pending.connection)
        self._pending.remove(pending)
        pending.connection.close()


class Mesh:
    """The connections and keys of one rank in one group; `send_pool` is what peers on this machine read frames from."""

    def __init__(
        self,
        membership: Membership,
        traffic: Traffic,
        collective: Sequence[PeerLink],
        p2p: Sequence[PeerLink],
        send_pool: SendPool | None = None,
    ) -> None:
        self.membership = membership
        self.traffic = traffic
        self.send_pool = send_pool
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
        dialler: Dialler | None = None,
    ) -> Mesh:
        """Connect to the other ranks.

        Args:
            store: a torch.distributed store that all ranks have, for their addresses.
            secret: its secret, 32 bytes; not kept.
            timeout_s: how long the others may take to come.
            dialler: how the others are reached; by default through the network.

        Raises:
            CollectiveError: `collective-timeout`, a rank did not come; `group-mismatch`, `collective-tampered`, one
                that does not fit; `rank-lost`, one that left on the way, or the store did; `collective-aborted`, this
                process cannot take part.
        """
        rendezvous = Rendezvous(membership, secret)
        if membership.size == 1:
            return cls(membership, Traffic(rendezvous.schedule()), [], [])
        until = time.monotonic() + timeout_s
        with contextlib.closing(Joining(store, membership, rendezvous, dialler or Direct(), until)) as joining:
            joining.join(os.environ.get(ADDRESS_VARIABLE) or own_address(store, timeout_s))
            traffic, links, send_pool = joining.finish()
            return cls(membership, traffic, links[Lane.COLLECTIVE], links[Lane.P2P], send_pool)

    @property
    def shared(self) -> Callable[[int], memoryview]:
        """Allocates memory for a frame that every peer is sent: in the send pool, where there is one."""
        return allocate if self.send_pool is None else self.send_pool.shared

    def abandon(self) -> None:
        """Release connections and shared memory in a forked child."""
        if self.send_pool is not None:
            self.send_pool.abandon()
        for link in (*self.collective, *self.p2p):
            link.abandon()
