"""The log of one run: append on the rented machine, verify anywhere (spec/evidence.md sections 2 and 3).

Both follow the one set of rules in `evidence.events.Rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from glasshouse.errors import Code, FormatError, VerificationError
from glasshouse.evidence.events import LOG_VERSION, MAX_EVENT_BYTES, Event, EventType, Rules
from glasshouse.evidence.heads import Head
from glasshouse.wire.canonical import Json
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.merkle import Tree, leaf_hash
from glasshouse.wire.states import Outcome, State


class EventLog:
    """The log as its one writer, the agent, keeps it. Begins with the start event.

    Args:
        clock_us: microseconds since the epoch; a clock that steps back is held at the last time.
        sink: receives every line, with its end; called before the event counts as happened, so that
            a full disk leaves log and tree at the same size.
    """

    def __init__(
        self, *, run_id: str, evidence_key: SigningKey, clock_us: Callable[[], int], sink: Callable[[bytes], object]
    ) -> None:
        self._run_id = run_id
        self._key = evidence_key
        self._clock_us = clock_us
        self._sink = sink
        self._rules = Rules()
        self._tree = Tree()
        self._last_time_us = 0
        self._heads = 0
        self._record(EventType.START, State.CREATED, {"run_id": run_id, "version": LOG_VERSION})

    @property
    def size(self) -> int:
        """Events so far."""
        return len(self._tree)

    @property
    def root(self) -> bytes:
        """Of the tree over the events."""
        return self._tree.root()

    @property
    def state(self) -> State:
        """Of the run after the last event."""
        return self._rules.state

    def append(self, kind: EventType, body: Mapping[str, Json]) -> Event:
        """Record something that happened in the present state.

        Raises:
            FormatError: `schema-invalid` for a body that is not the type's.
            VerificationError: `log-invalid` for an event that does not belong here.
        """
        if kind is EventType.TRANSITION:
            raise ValueError("a transition is recorded by `transition`")
        return self._record(kind, self._rules.state, body)

    def transition(self, state: State, *, outcome: Outcome | None = None, code: Code | None = None) -> Event:
        """Record that the run went on to `state`.

        Args:
            outcome: how the run ended: with `zeroized`, and only then.
            code: why, with `zeroizing` or `zeroized` of a run that did not complete.

        Raises:
            VerificationError: `state-illegal` or `log-invalid`.
        """
        body: dict[str, Json] = {
            "code": None if code is None else code.value,
            "from": self._rules.state.value,
            "outcome": None if outcome is None else outcome.value,
        }
        return self._record(EventType.TRANSITION, state, body)

    def head(self) -> bytes:
        """Sign the log as it stands; returns the envelope."""
        head = Head(
            run_id=self._run_id,
            sequence=self._heads,
            size=self.size,
            root=self.root,
            state=self.state,
            time_us=self._now_us(),
        )
        self._heads += 1
        return head.sign(self._key).encode()

    def consistency(self, old_size: int, new_size: int) -> list[bytes]:
        """Return the proof between any two sizes of this log; empty from 0 or between equals."""
        return self._tree.consistency_proof(old_size, new_size) if old_size else []

    def _record(self, kind: EventType, state: State, body: Mapping[str, Json]) -> Event:
        event = Event(sequence=self.size, time_us=self._now_us(), state=state, type=kind, body=dict(body))
        data = event.encode()
        if len(data) > MAX_EVENT_BYTES:
            raise FormatError(Code.TOO_LARGE, f"an event of more than {MAX_EVENT_BYTES} bytes")
        self._rules.check(event)
        self._sink(data + b"\n")
        self._rules.take(event)
        self._tree.append(leaf_hash(data))
        return event

    def _now_us(self) -> int:
        self._last_time_us = max(self._last_time_us, self._clock_us())
        return self._last_time_us


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiedLog:
    """The content of a log that is the one that its head names."""

    head: Head  # the head that it was checked against
    outcome: Outcome | None  # how the run ended; None in a log whose run had not ended
    code: Code | None
    kept: tuple[Event, ...]  # the digest, output, segment and probe events, in order
    tree: Tree  # of all its leaves
    states: tuple[tuple[int, State], ...]  # (size, state) after every transition
    done: tuple[str, int] | None  # unit and count of the last progress; None in a log without any
    from_us: int  # of the first and last event, by its own clock
    to_us: int
    ran_us: int  # how long the run was `running`, by its own clock
    silent_us: int  # how much of that came after the last progress; all of it in a log without any

    def of(self, kind: EventType) -> tuple[Event, ...]:
        """Return the kept events of one type."""
        return tuple(event for event in self.kept if event.type is kind)


_KEPT = frozenset({EventType.DIGEST, EventType.OUTPUT, EventType.SEGMENT, EventType.PROBE})


def read_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield a log's lines, never holding more than one event's worth of a hostile file."""
    while line := stream.readline(MAX_EVENT_BYTES + 1):
        yield line


def verify_log(lines: Iterable[bytes], head: Head) -> VerifiedLog:
    """Check that a log is lawful and exactly the one that a head names.

    Args:
        lines: each with its line end, as `read_lines` yields them.
        head: already known to be genuine.

    Raises:
        VerificationError: `log-invalid` or `state-illegal`, naming the first event that does not hold.
    """
    rules, tree = Rules(), Tree()
    kept: list[Event] = []
    states: list[tuple[int, State]] = []
    done, running, reported_us = None, (0, 0), 0
    span = (0, 0)
    for line in lines:
        event = _parsed(line, rules.size)
        rules.check(event)
        rules.take(event)
        tree.append(leaf_hash(line[:-1]))
        span = (span[0] if event.sequence else event.time_us, event.time_us)
        if event.type in _KEPT:
            kept.append(event)
        elif event.type in (EventType.START, EventType.TRANSITION):
            states.append((rules.size, rules.state))
            if event.state is State.RUNNING:
                running = (event.time_us, event.time_us)
            elif event.body.get("from") == State.RUNNING:
                running = (running[0], event.time_us)
        elif event.type is EventType.PROGRESS:
            done, reported_us = (str(event.body["unit"]), int(str(event.body["done"]))), event.time_us
        if rules.size > head.size:
            raise VerificationError(Code.LOG_INVALID, f"a log with more events than the {head.size} its head names")
    if rules.size != head.size or tree.root() != head.root:
        raise VerificationError(Code.LOG_INVALID, "a log that is not the one its head names")
    if rules.run_id != head.run_id or rules.state is not head.state:
        raise VerificationError(Code.LOG_INVALID, "a log of another run or state than its head names")
    return VerifiedLog(
        head=head,
        outcome=rules.outcome,
        code=rules.code,
        kept=tuple(kept),
        tree=tree,
        states=tuple(states),
        done=done,
        from_us=span[0],
        to_us=span[1],
        ran_us=running[1] - running[0],
        silent_us=max(0, running[1] - max(running[0], reported_us)),
    )


def verify_heads(heads: Sequence[Head], log: VerifiedLog) -> None:
    """Check that every earlier head, in order, names a beginning of the log.

    Raises:
        VerificationError: `log-invalid` for a head rolled back, repeated or of another history.
    """
    size = sequence = -1
    for head in heads:
        if head.size <= size or head.sequence <= sequence or head.size > log.head.size:
            raise VerificationError(Code.LOG_INVALID, "heads that do not grow: rolled back, repeated or reordered")
        size, sequence = head.size, head.sequence
        state = [state for at, state in log.states if at <= size][-1]
        if head.run_id != log.head.run_id or head.root != log.tree.root(size) or head.state is not state:
            raise VerificationError(Code.LOG_INVALID, f"head {sequence} is not of this log")


def _parsed(line: bytes, position: int) -> Event:
    if not line.endswith(b"\n"):
        raise VerificationError(Code.LOG_INVALID, f"line {position} is cut short or too long")
    try:
        return Event.parse(line[:-1])
    except FormatError as error:
        raise VerificationError(Code.LOG_INVALID, f"line {position} is not an event: {error.message}") from None
