"""Moves the frames of one group: whatever can be sent and taken now, on every connection, without waiting.

Laws: all frames of an operation leave and arrive before those of the next one on each connection, so no two operations
block each other; a frame that is not exactly the expected one ends the group, after its sender's reason was looked for.
Used by one thread at a time. Source: spec/sealed-collectives.md, sections 7 and 8.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn, TypeAlias, TypeVar

from glasshouse.collectives.engine.failure import explain, opened
from glasshouse.collectives.engine.poller import Poller
from glasshouse.collectives.operations.communicator import Communicator
from glasshouse.collectives.operations.exchange import Exchange
from glasshouse.collectives.operations.flows import ChunkRun, Inflow, Outflow
from glasshouse.collectives.operations.point_to_point import Mailbox, P2PMessage
from glasshouse.collectives.protocol.headers import HEADER_BYTES, FrameHeader, FrameKind, frame_bytes
from glasshouse.collectives.transport.mesh import Mesh
from glasshouse.collectives.transport.peer_link import Closed, PeerLink
from glasshouse.errors import Code, CollectiveError

_LAST_FRAME_S = 1.0  # how long a failing rank tries to send the others the reason
_REASON_S = 0.5  # how long a rank whose peer is gone looks for the reason that the peer or another rank may have sent
_LAST_FRAMES = (FrameKind.ALERT, FrameKind.BYE)

Submission: TypeAlias = Exchange | P2PMessage
_Flow = TypeVar("_Flow", Outflow, Inflow)


@dataclass(eq=False)
class _Course:
    """One collective connection: the operations to come, and the place in the first in each direction."""

    link: PeerLink
    outgoing: deque[tuple[Exchange, deque[ChunkRun[Outflow]]]] = field(default_factory=deque)
    incoming: deque[tuple[Exchange, deque[ChunkRun[Inflow]]]] = field(default_factory=deque)
    went: int = 0  # how many chunks of the first run have gone out
    took: int = 0  # how many have been taken

    def untouched(self, work: Exchange) -> bool:
        """Return whether no frame has come of those that the peer sends as soon as it begins an operation."""
        for due, runs in self.incoming:
            if due is work:
                # A frame may lie here until those of lower ranks have been added.
                if due is self.incoming[0][0] and (self.took or self.link.have):
                    return False
                flow, low, _ = runs[0]
                # Frames of a later phase wait for other ranks.
                return (
                    len(runs) == len(work.incoming[self.link.peer]) and FrameHeader.parse(flow.expected(low)).phase == 0
                )
        return False


class ProgressEngine:
    """The operations on one rank's connections; `done` is called with each, and for a message with its peer's rank."""

    def __init__(self, mesh: Mesh, communicator: Communicator, done: Callable[[Submission, int | None], None]) -> None:
        self._mesh = mesh
        self._done = done
        self._communicator = communicator
        self._courses = [_Course(link) for link in mesh.collective]
        self._p2p = list(mesh.p2p)
        self._mailbox = Mailbox(communicator, done)
        self._links = [*mesh.collective, *mesh.p2p]
        self._poller = Poller(self._links)

    def wait(self, timeout_s: float | None) -> None:
        """Wait for a connection or for `wake`, so many seconds or, with None, for ever.

        Raises:
            CollectiveError: `rank-lost`, a rank of this machine is gone that has not copied its frames.
        """
        gone = self._poller.wait_for_memory(timeout_s, self._communicator.short)
        if gone is not None:
            self._lost(gone)

    def wake(self) -> None:
        """End a `wait` of another thread."""
        self._poller.wake()

    def admit(self, work: Submission) -> None:
        """Begin with an operation, behind those that were begun before; a message must fit the offer that waits."""
        if isinstance(work, P2PMessage):
            self._mailbox.post(work)
            return
        work.left = len(work.outgoing) + len(work.incoming)
        if not work.left:
            self._done(work, None)
            return
        for course in self._courses:
            peer = course.link.peer
            if peer in work.outgoing:
                course.outgoing.append((work, deque(work.outgoing[peer])))
            if peer in work.incoming:
                course.incoming.append((work, deque(work.incoming[peer])))

    def step(self) -> bool:
        """Move the frames that can be moved without waiting; return whether there were any."""
        progress = False
        for course in self._courses:
            if course.outgoing and self._send(course):
                progress = True
            if course.incoming and self._receive(course):
                progress = True
        for link in self._p2p:
            if (link.sending or self._mailbox.busy(link.peer)) and self._send_message(link):
                progress = True
            if link.readable and self._receive_message(link):
                progress = True
        return progress

    def awaited(self, work: Submission) -> list[int]:
        """Return the ranks that an operation waits for."""
        if isinstance(work, P2PMessage):
            return [] if work.peer is None else [work.peer]
        takes = [course.link.peer for course in self._courses if course.incoming]
        return sorted(takes or (course.link.peer for course in self._courses if course.outgoing))

    def missing(self, work: Submission) -> list[int]:
        """Return the ranks that an operation waits for and that have not begun it: no frame of it has come."""
        if isinstance(work, P2PMessage):
            return self.awaited(work)
        return sorted(course.link.peer for course in self._courses if course.incoming and course.untouched(work))

    def send_last(self, kind: FrameKind, payload: bytes = b"") -> None:
        """Send a last frame, as far as the connections take it: an alert on those for messages, a goodbye on all."""
        links = self._p2p if kind is FrameKind.ALERT else self._links
        until = time.monotonic() + _LAST_FRAME_S
        for link in links:
            with suppress(Closed, CollectiveError):
                link.flush(until)
                if link.sending:
                    continue
                header = FrameHeader(kind=kind, source=self._mesh.membership.rank, destination=link.peer).encode()
                frame = memoryview(bytearray(frame_bytes(len(payload))))
                self._mesh.traffic.sealer(link.lane, link.peer).seal_into(header, payload, frame[HEADER_BYTES:])
                frame[:HEADER_BYTES] = header
                link.begin(frame)
                link.flush(until)

    def end(self) -> None:
        """Drop the operations under way, and send nothing more; what was sent still arrives."""
        for course in self._courses:
            course.outgoing.clear()
            course.incoming.clear()
        for link in self._links:
            link.finish()

    def close(self) -> None:
        """Close the connections."""
        for link in self._links:
            link.close()
        self._poller.close()

    def abandon(self) -> None:
        """Release everything in a forked child: the connections are the parent's."""
        self._mesh.abandon()
        self._poller.close()

    def _send(self, course: _Course) -> bool:
        link = course.link
        if not link.writable:
            return False
        work, runs = course.outgoing[0]
        flow, low, high = runs[0]
        chunk = low + course.went
        if not link.sending:
            if work.queue is None:
                frame = flow.frame(chunk, link.out_buffer)
            else:
                with work.queue.within():
                    frame = flow.frame(chunk, link.out_buffer)
            if frame is None:
                return False
            link.begin(frame, flow.release(chunk))
        try:
            whole = link.push()
        except Closed:
            # The peer may have sent the reason before it went.
            link.readable = True
            while course.incoming and self._receive(course):
                pass
            self._lost(link)
        if not whole:
            return link.writable
        course.went += 1
        if chunk + 1 == high:
            course.went = 0
            self._run_done(course.outgoing)
        return True

    def _receive(self, course: _Course) -> bool:
        link = course.link
        work, runs = course.incoming[0]
        flow, low, high = runs[0]
        chunk = low + course.took
        if not link.wanted or link.have < link.wanted:
            if not link.readable:
                return False
            try:
                if not link.pull(frame_bytes(flow.span.size(chunk))):
                    return link.readable
            except Closed:
                self._lost(link)
        source, sink = flow.source, flow.sink
        if not sink.ready(source, chunk):
            return False
        frame = link.frame
        expected = flow.expected(chunk)
        if frame[:HEADER_BYTES] != expected:
            explain(self._mesh.traffic, link, expected)
        if work.queue is None:
            sink.take(source, chunk, flow.opener, frame)
        else:
            with work.queue.within():
                sink.take(source, chunk, flow.opener, frame)
        link.taken()
        course.took += 1
        if chunk + 1 == high:
            course.took = 0
            self._run_done(course.incoming)
        return True

    def _run_done(self, queue: deque[tuple[Exchange, deque[ChunkRun[_Flow]]]]) -> None:
        """Go on to the next run of a connection's first operation, or to the next operation."""
        work, runs = queue[0]
        runs.popleft()
        if not runs:
            queue.popleft()
            work.left -= 1
            if not work.left:
                self._done(work, None)

    def _send_message(self, link: PeerLink) -> bool:
        if not link.writable:
            return False
        if not link.sending:
            frame = self._mailbox.frame(link.peer, link.out_buffer)
            if frame is None:
                return False
            link.begin(frame)
        try:
            if link.push():
                self._mailbox.sent(link.peer)
        except Closed:
            self._lost(link)
        return link.writable

    def _receive_message(self, link: PeerLink) -> bool:
        try:
            if not link.pull(frame_bytes(0)):
                return link.readable
        except Closed:
            link.ended, link.readable = True, False
            # After a goodbye, frames that the peer sent on the other connection may still be there: that one decides
            # whether the peer is missed. Without one, the way that alerts come was cut.
            if not link.bye_received or self._mailbox.waits_for(link.peer):
                self._lost(link)
            return False
        if link.frame[1] in _LAST_FRAMES:
            explain(self._mesh.traffic, link)
        else:
            self._mailbox.take(link.peer, link.frame)
        link.taken()
        return True

    def _lost(self, link: PeerLink) -> NoReturn:
        """Raise for a connection that ended: the reason that another rank sends, if one does soon."""
        until = time.monotonic() + _REASON_S
        while True:
            for each in self._p2p:
                self._drain(each)
            left = until - time.monotonic()
            # A rank that received an alert from another one passes it on before it goes.
            if left <= 0 or all(each.ended for each in self._p2p):
                break
            self._poller.wait(min(left, _REASON_S / 10))
        left_well = any(each.bye_received for each in self._links if each.peer == link.peer)
        how = "left the group" if left_well else "is gone: its connection ended"
        raise CollectiveError(Code.RANK_LOST, f"{self._mesh.membership.called(link.peer)} {how}", rank=link.peer)

    def _drain(self, link: PeerLink) -> None:
        """Read the frames that have come on a connection for messages; only an alert still counts."""
        try:
            while link.readable and not link.ended:
                if link.have and link.have >= link.wanted:
                    link.taken()
                if link.pull(frame_bytes(0)):
                    if link.frame[1] in _LAST_FRAMES:
                        explain(self._mesh.traffic, link)
                    else:
                        opened(self._mesh.traffic, link)  # the next frame's counter follows this one's
                    link.taken()
        except Closed:
            link.ended = True
