"""Events, one line of the log each, and what may follow what (spec/evidence.md section 2).

Laws: ``Event.parse(e.encode()) == e`` and ``Event.parse(b).encode() == b`` for every ``b`` that parse
accepts. A body holds numbers, digests, enumerations and short identifiers: no name, path or message
of the owner's can stand in a log that lies on the host's disk. The writer and the verifier ask the same `Rules`: a log
that the agent can write is a log that the verifier accepts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from glasshouse.errors import Code, FormatError, VerificationError
from glasshouse.wire.canonical import MAX_INTEGER, Json
from glasshouse.wire.states import Outcome, State, is_legal

MAX_EVENT_BYTES = 4096
LOG_VERSION = 1
MAX_EVENTS = 1 << 22
# The least time between two reports of progress, in microseconds.
PROGRESS_US = 1_000_000

_Check: TypeAlias = Callable[[object], bool]


class EventType(StrEnum):
    """What an event reports; the bodies are in `BODIES`."""

    START = "start"
    TRANSITION = "transition"
    CHECK = "check"
    DIGEST = "digest"
    PROGRESS = "progress"
    OUTPUT = "output"
    SEGMENT = "segment"
    CHECKPOINT = "checkpoint"
    PROBE = "probe"
    NOTICE = "notice"


class ProbeResult(StrEnum):
    """The result of a search for something left behind; never more than was seen."""

    CLEAN = "clean"
    FOUND = "found"
    UNVERIFIABLE = "unverifiable"


def _pattern(expression: str) -> _Check:
    match = re.compile(expression).fullmatch
    return lambda value: isinstance(value, str) and match(value) is not None


def _choice(*options: str) -> _Check:
    allowed = frozenset(map(str, options))
    return lambda value: isinstance(value, str) and value in allowed


def _integer(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_INTEGER


def _nullable(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


_NAME = _pattern(r"[a-z][a-z0-9-]{0,63}")
_DIGEST = _pattern(r"[0-9a-f]{64}")
_ID = _pattern(r"[0-9a-f]{32}")
_DECIMAL = _pattern(r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,18})?(e[+-][0-9]{2,3})?")


def is_loss(value: object) -> bool:
    """Return whether a value is a decimal of at most six significant digits, as C's ``%.6g`` writes it.

    A number has one such text, so that its spelling carries nothing.
    """
    return isinstance(value, str) and _DECIMAL(value) and math.isfinite(float(value)) and f"{float(value):.6g}" == value


_DETAIL = _pattern(r"[\x20-\x7e]{0,200}")
_CODE = _choice(*Code)
_SEALED: dict[str, _Check] = {"sealed_bytes": _integer, "sealed_sha256": _DIGEST, "sequence": _integer}

BODIES: dict[EventType, dict[str, _Check]] = {
    EventType.START: {"run_id": _ID, "version": lambda value: type(value) is int and value == LOG_VERSION},
    EventType.TRANSITION: {
        "code": _nullable(_CODE),
        "from": _choice(*State),
        "outcome": _nullable(_choice(*(outcome for outcome in Outcome if outcome is not Outcome.LOST))),
    },
    EventType.CHECK: {
        "name": _NAME,
        "process": _choice("agent", "custodian", "sentinel", "worker"),
        "result": _choice("failed", "passed", "unavailable"),
    },
    EventType.DIGEST: {
        "sha256": _DIGEST,
        "subject": _choice("ear", "environment", "evidence", "manifest", "measurement", "token"),
    },
    EventType.PROGRESS: {
        "done": _integer,
        "elapsed_us": _integer,
        "loss": _nullable(is_loss),
        "total": _nullable(_integer),
        "unit": _choice("epoch", "step"),
    },
    EventType.OUTPUT: {
        "bytes": _integer,
        "class": _choice("file", "weights"),
        "kind": _choice("checkpoint", "output"),
        **_SEALED,
    },
    EventType.SEGMENT: _SEALED,
    EventType.CHECKPOINT: {"bytes": _integer, "digest": _DIGEST, "seq": _integer, "step": _integer},
    EventType.PROBE: {"detail": _DETAIL, "probe": _NAME, "result": _choice(*ProbeResult)},
    EventType.NOTICE: {"code": _NAME, "value": _nullable(_integer)},
}
"""The closed body of every type: each field is there, and nothing else is."""

# Those that may not occur in every state.
_WHEN: dict[EventType, frozenset[State]] = {
    EventType.START: frozenset({State.CREATED}),
    EventType.PROGRESS: frozenset({State.RUNNING}),
    EventType.OUTPUT: frozenset({State.RUNNING, State.SEALED}),
    EventType.CHECKPOINT: frozenset({State.RUNNING, State.SEALED}),
    EventType.PROBE: frozenset({State.ZEROIZING}),
}

_TYPES = {kind.value: kind for kind in EventType}
_STATES = {state.value: state for state in State}
_FIELDS = frozenset({"body", "sequence", "state", "time_us", "type"})
# Every text in an event is printable ASCII, so the C encoder's order and escapes are those of RFC 8785:
# an event is written and read at a tenth of what wire.canonical costs (law tested against it).
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened.

    Raises:
        FormatError: `schema-invalid` on construction from anything else.
    """

    sequence: int  # position in the log, from 0
    time_us: int  # microseconds since the epoch by the runtime's clock
    state: State  # of the run, after this event
    type: EventType  # what kind of thing
    body: Mapping[str, Json]  # as in `BODIES` for the type

    def __post_init__(self) -> None:
        if not (_integer(self.sequence) and _integer(self.time_us)):
            raise FormatError(Code.SCHEMA, "an event whose sequence or time is not a whole number")
        checks = BODIES[self.type]
        if self.body.keys() != checks.keys():
            raise FormatError(Code.SCHEMA, f"a {self.type} event with other fields than {', '.join(sorted(checks))}")
        for name, check in checks.items():
            if not check(self.body[name]):
                raise FormatError(Code.SCHEMA, f"a {self.type} event whose {name} is not what it must be")

    def encode(self) -> bytes:
        """Return the canonical JSON of the event: the Merkle leaf's data, and the log's line without its end."""
        return _ENCODER.encode(
            {
                "body": self.body,
                "sequence": self.sequence,
                "state": self.state.value,
                "time_us": self.time_us,
                "type": self.type.value,
            }
        ).encode("ascii")

    @classmethod
    def parse(cls, data: bytes) -> Event:
        """Inverse of `encode`; only canonical bytes are accepted.

        Raises:
            FormatError: `too-large`, `schema-invalid` or `not-canonical`.
        """
        if len(data) > MAX_EVENT_BYTES:
            raise FormatError(Code.TOO_LARGE, f"an event of more than {MAX_EVENT_BYTES} bytes")
        try:
            value = json.loads(data.decode("ascii"))
        except (ValueError, RecursionError):
            raise FormatError(Code.SCHEMA, "an event that is not JSON") from None
        if not isinstance(value, dict) or value.keys() != _FIELDS or not isinstance(value["body"], dict):
            raise FormatError(Code.SCHEMA, "not an event")
        kind, state = value["type"], value["state"]
        if not isinstance(kind, str) or kind not in _TYPES or not isinstance(state, str) or state not in _STATES:
            raise FormatError(Code.SCHEMA, "an event of an unknown type or state")
        event = cls(
            sequence=value["sequence"],
            time_us=value["time_us"],
            state=_STATES[state],
            type=_TYPES[kind],
            body=value["body"],
        )
        if event.encode() != data:
            raise FormatError(Code.NOT_CANONICAL, "an event that is not in its canonical form")
        return event


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
                transition that is not in the state table.
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
                Code.STATE_ILLEGAL, f"event {event.sequence} has the state {event.state} in a run that is {self.state}"
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
            raise self._broken("an outcome belongs to the transition to zeroized, and to no other")
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
