"""All schedules of what may befall a line, played on the gate's pure rules.

A schedule is a row of events, one after the other. Worlds that two schedules have in common are played on once, and
counted as often as there are schedules that lead to them. Nothing is random, and no machine that an owner reports lost
is: each goes on as far as it is let.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from glasshouse.errors import GlasshouseError
from glasshouse.handshake import lines
from glasshouse.handshake.lines import LineRecord, Terms, check_15_line
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.lines.line_start import LineStart
from glasshouse.wire.lines.statements import CheckpointMessage, Stored, Ticket

DEPLOYMENT, LINE, RUN = "d" * 32, bytes(32), "e" * 32
STORE, OWNER = SigningKey(bytes(32)), SigningKey(b"\1" * 32)


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that a leg was released to: what it counted, and what it waits for the answer to."""

    leg: int
    key: str
    seq: int
    head: bytes | None
    asked: CheckpointMessage | None = None


@dataclass(frozen=True, slots=True)
class Database:
    """What a backup has: the line, and who was released to."""

    line: LineRecord
    known: frozenset[tuple[int, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class World:
    """Gate, store, owner and machines of one line, and all that was ever signed of it."""

    gate: Database
    backup: Database
    # What the store keeps beside the database.
    kept_leg: int = 0
    kept_holder: str | None = None
    kept: Ticket | None = None
    machines: tuple[Machine, ...] = ()
    shown: Ticket | None = None  # the newest that the owner has
    view: LineRecord | None = None  # what a second resumer has seen, as old as the last resume
    tickets: frozenset[Ticket] = frozenset()
    releases: frozenset[tuple[str, LineStart]] = frozenset()  # to which key, and where it began


@dataclass(frozen=True, slots=True)
class Protections:
    """What a model may go without."""

    fencing: bool = True  # of old legs, by store and gate
    tickets: bool = True  # that move a gate forward which was put back from a backup
    beside: bool = True  # what the store keeps is no part of a backup


def begun() -> World:
    """Return a world whose first leg was released, and of which there is a backup."""
    line = LineRecord(id=LINE, deployment=DEPLOYMENT, machines=1, ranks=1)
    first = _released(World(Database(line), Database(line)), line, answered=True)
    return replace(first, backup=first.gate)


@lru_cache(maxsize=1 << 16)
def _stored(digest: bytes, leg: int, seq: int) -> Envelope:
    return Stored(deployment=DEPLOYMENT, digest=digest, leg=leg, line=LINE, seq=seq).sign(STORE)


@lru_cache(maxsize=1 << 16)
def _message(machine: Machine) -> CheckpointMessage:
    seq = machine.seq + 1
    digest = hashlib.sha256(f"{machine.key} {seq}".encode() + (machine.head or b"")).digest()
    return CheckpointMessage(
        deployment=DEPLOYMENT,
        digest=digest,
        leg=machine.leg,
        line=LINE,
        previous=machine.head,
        run_id=RUN,
        seq=seq,
        step=seq,
        stored=_stored(digest, machine.leg, seq),
    )


@dataclass(frozen=True, slots=True)
class Model:
    """The events, under these protections."""

    protections: Protections = Protections()

    def events(self) -> tuple[Callable[[World], World], ...]:
        """Return every kind of event."""
        return (
            lambda world: self._counts(world, -1, answered=True),
            lambda world: self._counts(world, -1, answered=False),
            lambda world: self._counts(world, -2, answered=True),  # a live old leg
            lambda world: self._resumes(world, answered=True),
            lambda world: self._resumes(world, answered=False),
            self._resumes_too,
            lambda world: replace(world, backup=world.gate),
            self._is_put_back,
        )

    def _counts(self, world: World, which: int, *, answered: bool) -> World:
        if len(world.machines) < -which:
            return world
        machine = world.machines[which]
        message = machine.asked
        if message is None:
            message = _message(machine)
            # The store's fence, which does not rest on the gate's database.
            if self.protections.fencing and machine.leg < world.kept_leg:
                return world
        line, is_known = world.gate.line, (machine.leg, machine.key) in world.gate.known
        if not self.protections.fencing:
            line = replace(line, leg=machine.leg, holder=machine.key)
        counter = lines.Counter(leg=machine.leg, machine=0, run_id=RUN, holder=machine.key, manifest_sha256=bytes(32))
        try:
            if not is_known:
                return world
            ticket = lines.count(line, message, counter, store_public=_public(STORE), now_us=0)
        except GlasshouseError:
            return _with(world, which, replace(machine, asked=message))
        counted = lines.counted(world.gate.line, ticket)
        world = replace(world, gate=replace(world.gate, line=counted), tickets=world.tickets | {ticket})
        if world.kept is None or ticket.seq > world.kept.seq:
            world = replace(world, kept=ticket)
        if not answered:
            return _with(world, which, replace(machine, asked=message))
        newest = max(world.shown or ticket, ticket, key=lambda one: one.seq)
        after = replace(machine, seq=ticket.seq, head=ticket.digest, asked=None)
        return _with(replace(world, shown=newest), which, after)

    def _resumes(self, world: World, *, answered: bool) -> World:
        """The owner reports the current leg lost and goes on from where the gate is."""
        line = world.gate.line
        world = replace(world, view=line, gate=replace(world.gate, line=lines.lost(line, line.leg, now_us=0)))
        return self._launched(world, line, answered=answered)

    def _resumes_too(self, world: World) -> World:
        """A second resumer goes on from what was there before the last resume."""
        return world if world.view is None else self._launched(world, world.view, answered=True)

    def _launched(self, world: World, seen: LineRecord, *, answered: bool) -> World:
        line = world.gate.line
        if self.protections.tickets and world.shown is not None:
            line = lines.shown(line, world.shown, now_us=0)
        try:
            return _released(world, line, answered=answered, seen=seen)
        except GlasshouseError:
            return world

    def _is_put_back(self, world: World) -> World:
        line = world.backup.line
        if not self.protections.beside:
            world = replace(world, kept_leg=line.leg, kept_holder=line.holder, kept=line.ticket)
        if self.protections.tickets:
            line = lines.forward(line, world.kept_leg, world.kept_holder, now_us=0)
            if world.kept is not None:
                line = lines.shown(line, world.kept, now_us=0)
        return replace(world, gate=replace(world.backup, line=line))


def _released(world: World, line: LineRecord, *, answered: bool, seen: LineRecord | None = None) -> World:
    seen = seen or line
    start = LineStart(
        id=LINE,
        leg=seen.leg + 1,
        seq=seen.head.seq,
        checkpoint=seen.head.digest,
        counted=line.counted_beside(seen.head.seq),
    )
    over = line.ended(receipts=False, contact_us=1, lease_s=600, now_us=1)
    terms = Terms(deployment=DEPLOYMENT, machines=1, ranks=1, max_legs=100, owner=_public(OWNER), over=over, order=None)
    line = check_15_line(line, start, terms)
    key = f"{len(world.releases):032x}"
    after = lines.released(line, start, holder=key, head=line.head, now_us=0)
    if start.leg > world.kept_leg:
        world = replace(world, kept_leg=start.leg, kept_holder=key)
    machines = world.machines
    if answered:
        machines = (*machines, Machine(start.leg, key, start.next_seq - 1, start.checkpoint))
    return replace(
        world,
        gate=Database(after, world.gate.known | {(start.leg, key)}),
        machines=machines,
        releases=world.releases | {(key, start)},
    )


@lru_cache(maxsize=2)
def _public(key: SigningKey) -> bytes:
    return key.public


def _with(world: World, which: int, machine: Machine) -> World:
    machines = list(world.machines)
    machines[which] = machine
    return replace(world, machines=tuple(machines))


def forks(tickets: Collection[Ticket], releases: Collection[tuple[str, LineStart]]) -> Iterator[str]:
    """Yield what a verifier of the line would refuse of all that was signed (spec/checkpoints.md section 9)."""
    if len({ticket.seq for ticket in tickets}) < len({(one.seq, one.digest) for one in tickets}):
        yield "two checkpoints of one number"
    if len({start.leg for _, start in releases}) < len({(start.leg, key) for key, start in releases}):
        yield "one leg, two machines"
    rewound = {start.leg for _, start in releases if start.counted}
    after = {(ticket.previous, ticket.leg) for ticket in tickets if ticket.leg not in rewound}
    if len({previous for previous, _ in after}) < len(after):
        yield "two legs that went on from one checkpoint"
    if any(ticket.leg < start.leg and ticket.seq >= start.next_seq for ticket in tickets for _, start in releases):
        yield "a leg that went on although the next had begun"


def played(model: Model, length: int) -> Counter[World]:
    """Return the worlds that all schedules of a length end in, and how many schedules do in each."""
    worlds = Counter({begun(): 1})
    for _ in range(length):
        after: Counter[World] = Counter()
        for world, schedules in worlds.items():
            for event in model.events():
                after[event(world)] += schedules
        worlds = after
    return worlds


def forked(worlds: Counter[World]) -> Counter[str]:
    """Return how many schedules end in each kind of fork."""
    found: Counter[str] = Counter()
    for world, schedules in worlds.items():
        for fork in forks(world.tickets, world.releases):
            found[fork] += schedules
    return found
