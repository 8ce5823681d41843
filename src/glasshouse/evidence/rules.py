"""What may follow what in a log (spec/evidence.md section 2.2).

The writer and the verifier ask the same `Rules`: a log that the agent can write is a log that the verifier
accepts.
"""

from __future__ import annotations

from collections.abc import Mapping

from glasshouse.errors import Code, VerificationError
from glasshouse.evidence.events import Event, EventType
from glasshouse.wire.canonical import Json
from glasshouse.wire.states import Outcome, State, is_legal

MAX_EVENTS = 1 << 22
# The least time between two reports of progress, in microseconds.
PROGRESS_US = 1_000_000

_RUNNING = frozenset({State.RUNNING})
_WHEN: dict[EventType, frozenset[State]] = {
    EventType.START: frozenset({State.CREATED}),
    EventType.PROGRESS: _RUNNING,
    EventType.OUTPUT: frozenset({State.RUNNING, State.SEALED}),
    EventType.PROBE: frozenset({State.ZEROIZING}),
}


class Rules:
    """What may follow what in a log: `check` and `take` events one by one, in order.

    Attributes:
        run_id: from the start event, or None before it.
        state: of the run after the last event.
        size: events taken.
        outcome, code: how the run ended, once it is `zeroized`.
    """

    __slots__ = ("_counters", "_progress", "_sealed", "_time_us", "code", "outcome", "run_id", "size", "state")

    def __init__(self) -> None:
        self.run_id: str | None = None
        self.state = State.CREATED
        self.size = 0
        self.outcome: Outcome | None = None
        self.code: Code | None = None
        self._time_us = 0
        self._sealed = False
        self._progress: Mapping[str, Json] | None = None
        self._counters = {EventType.OUTPUT: 0, EventType.SEGMENT: 0}

    def check(self, event: Event) -> None:
        """Refuse an event that may not come next.

        Raises:
            VerificationError: `log-invalid` for a wrong order, time or place; `state-illegal` for a
                transition that the state table does not know.
        """
        if event.sequence != self.size or self.size >= MAX_EVENTS:
            raise self._broken(f"event {event.sequence} where number {self.size} belongs: dropped, repeated or moved")
        if (event.type is EventType.START) != (self.size == 0):
            raise self._broken("a log begins with its start event and has only one")
        if event.time_us < self._time_us:
            raise self._broken(f"event {event.sequence} goes back in time")
        if self.state is State.ZEROIZED:
            raise self._broken("an event after the end of the run")
        if event.type is EventType.TRANSITION:
            self._check_transition(event)
        elif event.state is not self.state:
            raise VerificationError(
                Code.STATE_ILLEGAL, f"event {event.sequence} says {event.state} in a run that is {self.state}"
            )
        if event.state not in _WHEN.get(event.type, (event.state,)):
            raise self._broken(f"a {event.type} event in a run that is {event.state}")
        if event.type in self._counters and event.body["sequence"] != self._counters[event.type]:
            raise self._broken(f"{event.type} numbers that do not count up by one")
        if event.type is EventType.PROGRESS and self._progress is not None:
            self._check_progress(self._progress, event.body)

    def _check_progress(self, last: Mapping[str, Json], now: Mapping[str, Json]) -> None:
        """Progress is the workload's way out of its sandbox: the rules leave it narrow (section 2.3)."""
        if not _count(now, "done") > _count(last, "done"):
            raise self._broken("progress whose count does not grow")
        if now["unit"] != last["unit"] or last["total"] not in (None, now["total"]):
            raise self._broken("progress whose unit or total changes")
        if _count(now, "elapsed_us") < _count(last, "elapsed_us") + PROGRESS_US:
            raise self._broken("progress more than once a second")

    def _check_transition(self, event: Event) -> None:
        if event.body["from"] != self.state or not is_legal(self.state, event.state):
            raise VerificationError(
                Code.STATE_ILLEGAL, f"event {event.sequence}: a run does not go from {self.state} to {event.state}"
            )
        outcome, code = event.body["outcome"], event.body["code"]
        if (outcome is not None) != (event.state is State.ZEROIZED):
            raise self._broken("the outcome is said when the run is zeroized, and only then")
        if code is not None and (event.state not in (State.ZEROIZING, State.ZEROIZED) or outcome == Outcome.COMPLETED):
            raise self._broken("a reason is given for a run that ends other than completed")
        if outcome == Outcome.COMPLETED and not self._sealed:
            raise self._broken("a run that never sealed its results did not complete")

    def take(self, event: Event) -> None:
        """Move on past an event that `check` let through."""
        self.size += 1
        if event.type in self._counters:
            self._counters[event.type] += 1
        self.state = event.state
        self._sealed = self._sealed or event.state is State.SEALED
        self._time_us = event.time_us
        if event.type is EventType.PROGRESS:
            self._progress = event.body
        if event.type is EventType.START:
            self.run_id = str(event.body["run_id"])
        elif event.state is State.ZEROIZED:
            self.outcome = Outcome(str(event.body["outcome"]))
            code = event.body["code"]
            self.code = None if code is None else Code(str(code))

    @staticmethod
    def _broken(why: str) -> VerificationError:
        return VerificationError(Code.LOG_INVALID, why)


def _count(body: Mapping[str, Json], name: str) -> int:
    value = body[name]
    return value if isinstance(value, int) else 0
