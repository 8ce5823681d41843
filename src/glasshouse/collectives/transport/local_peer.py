"""The resources that two ranks of one machine share: send pools, and a socket that acknowledges copies.

Law: nothing that came from the peer can make a call wait. Source: spec, section 3.3.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Callable, Mapping

from glasshouse.collectives.protocol.group_keys import Lane, Membership
from glasshouse.collectives.transport.addresses import late, lost
from glasshouse.collectives.transport.dial import check_own_limits
from glasshouse.collectives.transport.send_pool import PeerPool, SendPool, send_pool_for
from glasshouse.errors import Code, CollectiveError

__all__ = ["LocalPeer", "PoolExchange", "not_a_rank", "share_pools"]

_MOST_DESCRIPTORS = 2  # an acknowledgement socket and a send pool
_RETRY_S = 0.01
_LONG_S = 3600.0


class LocalPeer:
    """A peer on this machine.

    Args:
        peer: its rank.
        send_pool: the own memory, None where the system has none.
        window: the peer's, likewise.
        acks: connected with the peer; carries one byte, the lane, for each frame that was copied.
    """

    __slots__ = ("_acks", "fileno", "gone", "peer", "returned", "send_pool", "window")

    def __init__(self, peer: int, send_pool: SendPool | None, window: PeerPool | None, acks: socket.socket) -> None:
        self.peer = peer
        self.send_pool = send_pool
        self.window = window
        self._acks = acks
        self.fileno = acks.fileno()
        self.gone = False
        """Whether its acknowledgements have ended: what it has not copied is never given back."""
        self.returned: dict[int, Callable[[], bool]] = {}
        """By lane, takes back the memory of a frame; False where none is lent."""

    def acknowledge(self, lane: Lane) -> None:
        """Acknowledge the copy of one frame of a lane; if this fails, only the peer loses memory."""
        with contextlib.suppress(OSError):
            self._acks.send(bytes([lane]), socket.MSG_DONTWAIT)

    def collect(self) -> bool:
        """Take back the memory of the frames that the peer has acknowledged; return whether there were any.

        Raises:
            CollectiveError: `collective-tampered`, the peer was not sent so many.
        """
        found = False
        while not self.gone:
            try:
                lanes = self._acks.recv(256, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                lanes = b""
            self.gone = not lanes
            found = found or not self.gone
            for lane in lanes:
                if lane not in self.returned or not self.returned[lane]():
                    raise not_a_rank(self.peer)
        return found

    def close(self) -> None:
        """Close the socket and unmap the peer's memory; closing twice is allowed."""
        self._acks.close()
        if self.window is not None:
            self.window.close()


class PoolExchange:
    """Sends a peer the own send pool, and receives the peer's.

    Args:
        connection: a Unix stream socket past the handshake, of which nothing else is read in between.
        peer: the rank at the other end.
        send_pool: the own memory.
        until: how long to wait (monotonic, s).
        connected: whether this rank makes the acknowledgement socket.

    Raises:
        OSError: the peer is gone, or this process has no more room for descriptors.
    """

    __slots__ = ("_acks", "_connection", "_peer", "_send_pool", "_until")

    def __init__(
        self, connection: socket.socket, peer: int, send_pool: SendPool | None, until: float, *, connected: bool
    ) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._peer = peer
        self._send_pool = send_pool
        self._until = until
        self._acks: socket.socket | None = None
        theirs: socket.socket | None = None
        try:
            if connected:
                self._acks, theirs = socket.socketpair()
            given = [] if theirs is None else [theirs.fileno()]
            self._send([*given, *([] if send_pool is None else [send_pool.fileno])])
        except BaseException:
            self.close()
            raise
        finally:
            if theirs is not None:
                theirs.close()

    def answer(self) -> LocalPeer:
        """Return the peer, with the descriptors that it sent.

        Raises:
            TimeoutError: the peer has sent nothing in time.
            OSError, ValueError: the peer is gone, or has sent what no rank sends; or this process has no more room
                for descriptors or memory (`dial.check_own_limits`).
        """
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        if not poll.poll(min(max(0.0, self._until - time.monotonic()), _LONG_S) * 1000):
            raise TimeoutError
        data, taken, flags, _ = socket.recv_fds(self._connection, 1, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        try:
            cut = bool(flags & socket.MSG_CTRUNC)
            if cut and len(taken) < _MOST_DESCRIPTORS:
                raise OSError(errno.EMFILE, "there was no room for the peer's descriptors")
            given = self._acks is None
            if cut or data != bytes([len(taken)]) or not given <= len(taken) <= given + 1:
                raise ValueError("not what a rank sends")
            self._acks = acks = self._acks or socket.socket(fileno=taken[0])
            if given:
                del taken[0]  # the socket's own now
            if acks.family != socket.AF_UNIX:
                # To close another kind may take as long as its giver likes.
                raise ValueError("not an acknowledgement socket")
            window = PeerPool(taken[0]) if taken else None
            self._acks = None
            return LocalPeer(self._peer, self._send_pool, window, acks)
        finally:
            for descriptor in taken:
                os.close(descriptor)

    def close(self) -> None:
        """Close the socket of an exchange that was not answered."""
        if self._acks is not None:
            self._acks.close()

    def _send(self, given: list[int]) -> None:
        while True:
            try:
                socket.send_fds(self._connection, [bytes([len(given)])], given)
                return
            except OSError as error:
                # A user may have only so many descriptors under way; the others' are being taken.
                if error.errno != errno.ETOOMANYREFS or time.monotonic() > self._until:
                    raise
                time.sleep(_RETRY_S)


def share_pools(
    membership: Membership, connections: Mapping[int, socket.socket], until: float, undone: contextlib.ExitStack
) -> tuple[SendPool | None, dict[int, LocalPeer]]:
    """Exchange send pools with the ranks of this machine.

    Args:
        membership: the group.
        connections: for each of these ranks a Unix stream socket past the handshake.
        until: when to give up (monotonic, s).
        undone: closes what they sent, unless the caller takes it over.

    Raises:
        CollectiveError: `rank-lost`, one of them is gone; `collective-timeout`, it has sent nothing.
    """
    if not connections:
        return None, {}
    local_peers: dict[int, LocalPeer] = {}
    send_pool = send_pool_for(len(connections))
    with contextlib.ExitStack() as asked:
        if send_pool is not None:
            asked.callback(send_pool.shut)
        peer = next(iter(connections))
        try:
            exchanges = []
            for peer, connection in connections.items():
                exchange = PoolExchange(connection, peer, send_pool, until, connected=peer < membership.rank)
                exchanges.append(asked.enter_context(contextlib.closing(exchange)))
            for peer, exchange in zip(connections, exchanges, strict=True):
                local_peers[peer] = undone.enter_context(contextlib.closing(exchange.answer()))
        except TimeoutError:
            raise late(membership, [peer]) from None
        except (OSError, ValueError) as error:
            check_own_limits(error)
            raise lost(membership, peer) from None
    return send_pool, local_peers


def not_a_rank(peer: int) -> CollectiveError:
    """Return the error for what no rank sends on the connections with one of this machine."""
    message = f"on the connection with rank {peer} came what no rank of this machine sends"
    return CollectiveError(Code.COLLECTIVE_TAMPERED, message, rank=peer)
