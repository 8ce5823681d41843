"""Follows a run through its event log, the one status channel (ADR 0004), and keeps what a person wants to see."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from glasshouse.errors import Code, FormatError, VerificationError
from glasshouse.evidence.events import MAX_EVENT_BYTES, Event, EventType
from glasshouse.jobs.owner.home import open_regular
from glasshouse.wire.states import Outcome, State

_READ_BYTES = 1 << 16
_RATE_WINDOW = 16


class Tail:
    """Reads a growing log, which need not exist yet, whole lines only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._rest = b""

    def read(self) -> Iterator[Event]:
        """Yield the events that came since the last call; raises `VerificationError` for a line that is no event."""
        if self._descriptor is None:
            try:
                with open_regular(self._path) as log:
                    self._descriptor = os.dup(log.fileno())
            except FileNotFoundError:
                return
            except OSError as error:
                raise VerificationError(Code.LOG_INVALID, f"{self._path} cannot be read: {error.strerror}") from None
        while data := os.read(self._descriptor, _READ_BYTES):
            *lines, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > MAX_EVENT_BYTES:
                raise VerificationError(Code.LOG_INVALID, f"{self._path} is no event log")
            for line in lines:
                try:
                    yield Event.parse(line)
                except FormatError as error:
                    raise VerificationError(Code.LOG_INVALID, f"{self._path}: {error.message}") from None

    def close(self) -> None:
        """Close the log."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingProgress:
    """How far the training is."""

    unit: str  # `step` or `epoch`
    done: int  # how many; the total may be unknown
    total: int | None
    elapsed_us: int  # by the worker's clock
    loss: str | None  # decimal text


@dataclass(kw_only=True, slots=True)
class Seen:
    """What a run's events report so far."""

    state: State | None = None  # of the run; None before its first event
    entered_us: dict[State, int] = field(default_factory=dict)  # when each state began, by the runtime's clock
    work: TrainingProgress | None = None  # the last progress
    checks: dict[tuple[str, str], str] = field(default_factory=dict)  # (process, check) → result
    outputs: int = 0  # how many left the machine sealed
    segments: int = 0
    probes: dict[str, str] = field(default_factory=dict)  # probe → result
    notices: list[str] = field(default_factory=list)  # codes of what the runtime wants a person to know
    outcome: Outcome | None = None  # how the run ended
    code: Code | None = None
    last_us: int = 0  # time of the last event
    _recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_RATE_WINDOW))

    @classmethod
    def of(cls, path: Path) -> Seen:
        """Return what a log reports until now; raises `VerificationError`."""
        seen = cls()
        with contextlib.closing(Tail(path)) as tail:
            for event in tail.read():
                seen.take(event)
        return seen

    def take(self, event: Event) -> None:
        """Take the next event."""
        body = event.body
        self.last_us = event.time_us
        if event.state is not self.state:
            self.state = event.state
            self.entered_us[event.state] = event.time_us
        match event.type:
            case EventType.TRANSITION:
                self.outcome = Outcome(str(body["outcome"])) if body["outcome"] else self.outcome
                self.code = Code(str(body["code"])) if body["code"] else self.code
            case EventType.PROGRESS:
                self._progress(event)
            case EventType.CHECK:
                self.checks[str(body["process"]), str(body["name"])] = str(body["result"])
            case EventType.OUTPUT:
                self.outputs += 1
            case EventType.SEGMENT:
                self.segments += 1
            case EventType.PROBE:
                self.probes[str(body["probe"])] = str(body["result"])
            case EventType.NOTICE:
                self.notices.append(str(body["code"]))

    def _progress(self, event: Event) -> None:
        done, elapsed_us, total, loss = (event.body[name] for name in ("done", "elapsed_us", "total", "loss"))
        assert isinstance(done, int) and isinstance(elapsed_us, int)  # noqa: S101, PT018 - by the event's schema
        unit, before = str(event.body["unit"]), self.work
        planned = total if isinstance(total, int) else None
        if planned == done and before is not None and before.unit == unit and before.total is not None:
            # A run that is stopped closes with what it did as its total; what was planned was reported before.
            planned = max(planned, before.total)
        if planned is not None and done > planned:
            planned = None  # a script that trains again, as in a search: a log keeps the first total
        loss = loss if isinstance(loss, str) else None
        self.work = TrainingProgress(unit=unit, done=done, total=planned, elapsed_us=elapsed_us, loss=loss)
        self._recent.append((done, elapsed_us))

    @property
    def progress(self) -> dict[str, Any] | None:
        """The last progress as a record keeps it."""
        return None if self.work is None else asdict(self.work)

    @property
    def rate_per_s(self) -> float | None:
        """Units per second over the last few reports, or None while there are too few."""
        if len(self._recent) < 2:
            return None
        (before, since_us), (now, until_us) = self._recent[0], self._recent[-1]
        return (now - before) * 1e6 / (until_us - since_us) if until_us > since_us and now > before else None

    @property
    def remaining_s(self) -> float | None:
        """Estimated seconds until the training is done, or None when that is not known."""
        rate, work = self.rate_per_s, self.work
        if rate is None or work is None or work.total is None:
            return None
        return max(0, work.total - work.done) / rate


class Watcher:
    """Follows a run that is supervised; each method may be overridden and does nothing here."""

    def away(self, machine: int, problem: str) -> None:
        """A machine cannot be followed at this moment, and why; or, where that is empty, can again."""

    def event(self, event: Event, seen: Seen) -> None:
        """Something happened."""

    def tick(self, seen: Seen) -> None:
        """Time has passed, several times a second; nothing need have happened."""

    def stopping(self, times: int) -> None:
        """The run was asked to stop, for the n-th time."""

    def machine(self, machine: int, code: Code | None, *, completed: bool) -> None:
        """A machine of the run's group has ended, and why if it did not complete."""
