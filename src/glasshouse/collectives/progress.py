"""Moves the frames of one group: what can be sent and taken now, on every connection, without waiting.

Laws: all frames of an operation leave and arrive before those of the next one on each connection, so no two operations
block each other; a frame that is not exactly the expected one ends the group, after its sender has been heard out. Used
by one thread at a time.
Source: spec/sealed-collectives.md, sections 7 and 8.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn, TypeAlias

from glasshouse.collectives.alerts import Alert
from glasshouse.collectives.frames import HEADER_BYTES, Header, Kind
from glasshouse.collectives.link import Closed, Link
from glasshouse.collectives.memory import frame_bytes
from glasshouse.collectives.mesh import Mesh
from glasshouse.collectives.near import NearLink, Neighbour
from glasshouse.collectives.operations.exchange import Exchange
from glasshouse.collectives.operations.flows import Inflow, Outflow, Run
from glasshouse.collectives.operations.party import Party
from glasshouse.collectives.operations.point import Mailbox, Message
from glasshouse.errors import Code, CollectiveError

__all__ = ["Progress", "ToldError", "Work"]

_LAST_WORDS_S = 1.0
"""How long a failing rank tries to tell the others why."""
_LONG_S = 3600.0
"""As long as one call waits at most: those of the system take no longer times."""
_HEAR_OUT_S = 0.5
"""How long a rank whose peer is gone looks for the reason that the peer or another rank may have sent."""

Work: TypeAlias = Exchange | Message


class ToldError(CollectiveError):
    """What another rank found."""

    def __init__(self, alert: Alert) -> None:
        told = alert.error()
        super().__init__(told.code, told.message, rank=told.rank)
        self.alert = alert


class _Course:
    """The way of one collective connection: the operations to come, and the place in the first in each direction."""

    __slots__ = ("incoming", "link", "outgoing", "took", "went")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.outgoing: deque[tuple[Exchange, deque[Run[Outflow]]]] = deque()
        self.incoming: deque[tuple[Exchange, deque[Run[Inflow]]]] = deque()
        self.went = 0
        """How many chunks of the first run have gone out."""
        self.took = 0

    def untouched(self, work: Exchange) -> bool:
        """Return whether nothing came of what the peer sends as soon as it begins an operation."""
        for due, runs in self.incoming:
            if due is work:
                # A frame may lie here until those of lower ranks have been added.
                if due is self.incoming[0][0] and (self.took or self.link.have):
                    return False
                flow, low, _ = runs[0]
                # What the peer sends in a later phase waits for other ranks.
                return len(runs) == len(work.incoming[self.link.peer]) and Header.parse(flow.expected(low)).phase == 0
        return False


class Progress:
    """The connections of one rank in one group, and what is under way on them.

    Args:
        mesh: the connections and keys.
        party: what the operations were planned for.
        done: told of each operation that is complete, and for a message of the rank at its other end.
    """

    def __init__(self, mesh: Mesh, party: Party, done: Callable[[Work, int | None], None]) -> None:
        self._mesh = mesh
        self._done = done
        self._party = party
        self._courses = [_Course(link) for link in mesh.collective]
        self._post = list(mesh.p2p)
        self._mailbox = Mailbox(party, done)
        self._poll = select.epoll()
        self._links: dict[int, Link] = {}
        self._near: list[NearLink] = []
        self._neighbours: dict[int, Neighbour] = {}
        for link in (*mesh.collective, *mesh.p2p):
            self._links[link.fileno] = link
            self._poll.register(link.fileno, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET)
            if isinstance(link, NearLink):
                self._near.append(link)
                self._neighbours[link.neighbour.fileno] = link.neighbour
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._bell, select.EPOLLIN)

    def admit(self, work: Work) -> None:
        """Begin with an operation, behind those that were begun before.

        Raises:
            CollectiveError: a message that does not fit the offer that waits for it.
        """
        if isinstance(work, Message):
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
        """Do what can be done now without waiting; return whether anything was.

        Raises:
            CollectiveError: the group cannot go on.
        """
        progress = False
        for course in self._courses:
            if course.outgoing and self._send(course):
                progress = True
            if course.incoming and self._receive(course):
                progress = True
        for link in self._post:
            if (link.sending or self._mailbox.busy(link.peer)) and self._send_message(link):
                progress = True
            if link.readable and self._receive_message(link):
                progress = True
        return progress

    def listen(self, timeout_s: float | None) -> None:
        """Wait for something to happen on a connection, or for the bell."""
        if self._neighbours and (self._party.short or any(link.short for link in self._near)):
            self._listen_for_memory(timeout_s)
            return
        self._wait(timeout_s)

    def _listen_for_memory(self, timeout_s: float | None) -> None:
        """Do so, and wait for memory that ranks of this machine give back too: what they say wakes no other."""
        heard = [neighbour.listen() for neighbour in self._neighbours.values()]
        if any(heard):
            return
        for link in self._near:
            if link.neighbour.gone and link.lends:
                self._lost(link)
        there = [fileno for fileno, neighbour in self._neighbours.items() if not neighbour.gone]
        for fileno in there:
            self._poll.register(fileno, select.EPOLLIN | select.EPOLLET)
        try:
            self._wait(timeout_s)
        finally:
            for fileno in there:
                self._poll.unregister(fileno)

    def _wait(self, timeout_s: float | None) -> None:
        for fileno, event in self._poll.poll(None if timeout_s is None else min(timeout_s, _LONG_S)):
            if fileno == self._bell:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
                continue
            if (neighbour := self._neighbours.get(fileno)) is not None:
                neighbour.listen()
                continue
            link = self._links[fileno]
            if event & ~select.EPOLLOUT:
                link.readable = True
            if event & (select.EPOLLOUT | select.EPOLLERR | select.EPOLLHUP):
                link.writable = True

    def ring(self) -> None:
        """End a `listen` of another thread."""
        if self._bell >= 0:
            os.eventfd_write(self._bell, 1)

    def awaited(self, work: Work) -> list[int]:
        """Return the ranks that an operation waits for."""
        if isinstance(work, Message):
            return [] if work.peer is None else [work.peer]
        takes = [course.link.peer for course in self._courses if course.incoming]
        return sorted(takes or (course.link.peer for course in self._courses if course.outgoing))

    def missing(self, work: Work) -> list[int]:
        """Return those that have not begun it, of the ranks that an operation waits for: no frame of it has come."""
        if isinstance(work, Message):
            return self.awaited(work)
        courses = [course for course in self._courses if course.incoming]
        return sorted(course.link.peer for course in courses if course.untouched(work)) if courses else []

    def tell(self, kind: Kind, payload: bytes = b"") -> None:
        """Send a last frame, as far as the connections take it: an alert for messages' way, a goodbye everywhere."""
        links = self._post if kind is Kind.ALERT else [*self._links.values()]
        until = time.monotonic() + _LAST_WORDS_S
        for link in links:
            with suppress(Closed, CollectiveError):
                link.flush(until)
                if link.sending:
                    continue
                header = Header(kind=kind, source=self._mesh.membership.rank, destination=link.peer).encode()
                frame = memoryview(bytearray(frame_bytes(len(payload))))
                self._mesh.traffic.sealer(link.lane, link.peer).seal_into(header, payload, frame[HEADER_BYTES:])
                frame[:HEADER_BYTES] = header
                link.begin(frame)
                link.flush(until)

    def end(self) -> None:
        """Let go of what is under way, and send nothing more; what was sent still arrives."""
        for course in self._courses:
            course.outgoing.clear()
            course.incoming.clear()
        for link in self._links.values():
            link.finish()

    def close(self) -> None:
        """Close the connections."""
        for link in self._links.values():
            link.close()
        self._release()

    def abandon(self) -> None:
        """Let go of everything in a forked child: the connections are the parent's."""
        self._mesh.abandon()
        self._release()

    def _release(self) -> None:
        """Close what this class opened, once: after that the numbers may be somebody else's."""
        self._poll.close()
        bell, self._bell = self._bell, -1
        if bell >= 0:
            os.close(bell)

    def _send(self, course: _Course) -> bool:
        link = course.link
        if not link.writable:
            return False
        work, runs = course.outgoing[0]
        flow, low, high = runs[0]
        chunk = low + course.went
        if not link.sending:
            queue = work.queue
            if queue is None:
                frame = flow.frame(chunk, link.out_buffer)
            else:
                with queue.within():
                    frame = flow.frame(chunk, link.out_buffer)
            if frame is None:
                return False
            link.begin(frame, flow.release(chunk))
        try:
            whole = link.push()
        except Closed:
            # What the peer sent before it went may say why.
            link.readable = True
            while course.incoming and self._receive(course):
                pass
            self._lost(link)
        if not whole:
            return link.writable
        course.went += 1
        if chunk + 1 == high:
            course.went = 0
            runs.popleft()
            if not runs:
                course.outgoing.popleft()
                self._part_done(work)
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
                if not link.pull(frame_bytes(flow.size(chunk))):
                    return link.readable
            except Closed:
                self._lost(link)
        if not flow.ready(chunk):
            return False
        frame = link.frame
        expected = flow.expected(chunk)
        if frame[:HEADER_BYTES] != expected:
            self._surprise(link, frame, work, expected)
        queue = work.queue
        if queue is None:
            flow.take(chunk, frame)
        else:
            with queue.within():
                flow.take(chunk, frame)
        link.taken()
        course.took += 1
        if chunk + 1 == high:
            course.took = 0
            runs.popleft()
            if not runs:
                course.incoming.popleft()
                self._part_done(work)
        return True

    def _send_message(self, link: Link) -> bool:
        if not link.writable:
            return False
        if not link.sending:
            frame = self._mailbox.frame(link.peer, link.out_buffer)
            if frame is None:
                return False
            link.begin(frame)
        try:
            whole = link.push()
        except Closed:
            self._lost(link)
        if whole:
            self._mailbox.sent(link.peer)
        return link.writable

    def _receive_message(self, link: Link) -> bool:
        try:
            if not link.pull(frame_bytes(0)):
                return link.readable
        except Closed:
            link.ended, link.readable = True, False
            # After a goodbye, what the peer sent on the other connection may still be there: that one says whether
            # the peer is missed. Without one, somebody has cut the way that alerts come.
            if not link.farewell or self._mailbox.waits_for(link.peer):
                self._lost(link)
            return False
        frame = link.frame
        if frame[1] in (Kind.ALERT, Kind.BYE):
            self._surprise(link, frame, None)
        else:
            self._mailbox.take(link.peer, frame)
        link.taken()
        return True

    def _part_done(self, work: Exchange) -> None:
        work.left -= 1
        if not work.left:
            self._done(work, None)

    def _surprise(
        self, link: Link, frame: memoryview, work: Exchange | None, expected: bytearray | None = None
    ) -> None:
        """Find out what a frame is that was not expected, and raise for it unless nothing depends on it.

        Raises:
            CollectiveError: what another rank says has happened; `rank-lost`, it left; `collective-mismatch`, it is
                at another operation; `collective-tampered`, it did not send this, or not in this order.
        """
        header, sealed = frame[:HEADER_BYTES], frame[HEADER_BYTES : link.wanted]
        payload = bytearray(link.wanted - frame_bytes(0))
        self._mesh.traffic.route(link.lane, link.peer, header).open_into(header, sealed, payload)
        theirs = Header.parse(header)
        who = self._called(link.peer)
        if theirs.kind is Kind.ALERT:
            raise ToldError(Alert.parse(payload))
        if theirs.kind is Kind.BYE:
            link.farewell = True
            if work is None:
                return
            raise CollectiveError(Code.RANK_LOST, f"{who} left the group", rank=link.peer)
        if work is None or expected is None:
            raise CollectiveError(Code.COLLECTIVE_MISMATCH, f"{who} sends what nothing led to", rank=link.peer)
        due = Header.parse(expected)
        if theirs.chunk != due.chunk or theirs.phase != due.phase:
            moved = replace(
                theirs,
                chunk=due.chunk,
                phase=due.phase,
                destination=due.destination,
                payload_bytes=due.payload_bytes,
                counter=due.counter,
            )
            if moved == due:
                raise CollectiveError(
                    Code.COLLECTIVE_TAMPERED,
                    f"from {who} something else came than it sealed: frames were reordered",
                    rank=link.peer,
                )
        ours = due.described()
        place = "" if theirs.suite is due.suite else f", sealed for {theirs.suite.value} and not {due.suite.value},"
        raise CollectiveError(
            Code.COLLECTIVE_MISMATCH,
            f"{who} is at {theirs.described()} (operation {theirs.sequence}){place} where"
            f" {self._called(self._mesh.membership.rank)} is at {ours} (operation {due.sequence})",
            hint="every rank must call the same collectives in the same order with tensors of the same shape and type",
            rank=link.peer,
        )

    def _called(self, rank: int) -> str:
        return self._mesh.membership.called(rank)

    def _lost(self, link: Link) -> NoReturn:
        """Raise for a connection that ended: what another rank says was the reason, if one does soon."""
        until = time.monotonic() + _HEAR_OUT_S
        while True:
            for post in self._post:
                self._hear_out(post)
            left = until - time.monotonic()
            # A rank that was told by another one passes the reason on before it goes.
            if left <= 0 or all(post.ended for post in self._post):
                break
            self._wait(min(left, _HEAR_OUT_S / 10))
        if any(each.farewell for each in self._links.values() if each.peer == link.peer):
            raise CollectiveError(Code.RANK_LOST, f"{self._called(link.peer)} left the group", rank=link.peer)
        gone = f"{self._called(link.peer)} is gone: its connection ended"
        raise CollectiveError(Code.RANK_LOST, gone, rank=link.peer)

    def _hear_out(self, post: Link) -> None:
        """Read what has come on a connection for messages; of that only an alert still counts."""
        try:
            while post.readable and not post.ended:
                if post.have and post.have >= post.wanted:
                    post.taken()
                if post.pull(frame_bytes(0)):
                    frame = post.frame
                    if frame[1] in (Kind.ALERT, Kind.BYE):
                        self._surprise(post, frame, None)
                    else:
                        # Opened all the same: the next frame's counter follows this one's.
                        payload = bytearray(post.wanted - frame_bytes(0))
                        opener = self._mesh.traffic.route(post.lane, post.peer, frame[:HEADER_BYTES])
                        opener.open_into(frame[:HEADER_BYTES], frame[HEADER_BYTES : post.wanted], payload)
                    post.taken()
        except Closed:
            post.ended = True
