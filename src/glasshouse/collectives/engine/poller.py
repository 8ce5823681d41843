"""Waits for connections: edge-triggered readiness, a wakeup from other threads, memory that local peers give back."""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from contextlib import suppress

from glasshouse.collectives.transport.local_link import LocalLink
from glasshouse.collectives.transport.peer_link import PeerLink

_LONG_S = 3600.0  # the longest that one call waits: the system takes no longer times


class Poller:
    """Waits for the connections of one group, and marks them; used by one thread at a time, but for `wake`."""

    def __init__(self, links: Sequence[PeerLink]) -> None:
        self._poll = select.epoll()
        self._links = {link.fileno: link for link in links}
        self._local_links = [link for link in links if isinstance(link, LocalLink)]
        self._local_peers = {link.local_peer.fileno: link.local_peer for link in self._local_links}
        for fileno in self._links:
            self._poll.register(fileno, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET)
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._wakeup, select.EPOLLIN)

    def wait_for_memory(self, timeout_s: float | None, short: bool) -> PeerLink | None:
        """Wait, for acknowledgements too where memory is `short`; return a link whose peer left frames uncopied."""
        if not self._local_peers or not (short or any(link.short for link in self._local_links)):
            self.wait(timeout_s)
            return None
        found = [local_peer.collect() for local_peer in self._local_peers.values()]  # of every one, also behind a hit
        if any(found):
            return None
        for link in self._local_links:
            if link.local_peer.gone and link.lends:
                return link
        there = [fileno for fileno, local_peer in self._local_peers.items() if not local_peer.gone]
        for fileno in there:
            self._poll.register(fileno, select.EPOLLIN | select.EPOLLET)
        try:
            self.wait(timeout_s)
        finally:
            for fileno in there:
                self._poll.unregister(fileno)
        return None

    def wait(self, timeout_s: float | None) -> None:
        """Wait for a connection or a `wake`, so many seconds or, with None, an hour at most."""
        for fileno, event in self._poll.poll(None if timeout_s is None else min(timeout_s, _LONG_S)):
            if fileno == self._wakeup:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wakeup)
                continue
            if (local_peer := self._local_peers.get(fileno)) is not None:
                local_peer.collect()
                continue
            link = self._links[fileno]
            if event & ~select.EPOLLOUT:
                link.readable = True
            if event & (select.EPOLLOUT | select.EPOLLERR | select.EPOLLHUP):
                link.writable = True

    def wake(self) -> None:
        """End a `wait` of another thread."""
        if self._wakeup >= 0:
            os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Close the descriptors that this class opened, once: after that the numbers may belong to others."""
        self._poll.close()
        wakeup, self._wakeup = self._wakeup, -1
        if wakeup >= 0:
            os.close(wakeup)
