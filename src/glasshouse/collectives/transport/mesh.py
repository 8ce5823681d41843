"""The connections and keys of one rank in one group: two connections for every pair (spec, section 3)."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from glasshouse.collectives.protocol.frame_memory import allocate
from glasshouse.collectives.protocol.group_keys import Lane, Membership
from glasshouse.collectives.protocol.rendezvous import Rendezvous
from glasshouse.collectives.protocol.traffic import Traffic
from glasshouse.collectives.transport.dial import Dialler, Direct
from glasshouse.collectives.transport.endpoint import ADDRESS_VARIABLE, own_address
from glasshouse.collectives.transport.joining import Joining
from glasshouse.collectives.transport.peer_link import PeerLink
from glasshouse.collectives.transport.send_pool import SendPool


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
            joining.listen(os.environ.get(ADDRESS_VARIABLE) or own_address(store, timeout_s))
            joining.call()
            joining.meet()
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
