"""Supervises a placed run until it has ended: follows its events, keeps its broker alive, verifies its receipt.

Laws: an interrupt is passed to the runtime, which zeroizes; the supervisor waits for that, however often it
is interrupted. Nothing here needs, or has, a private key of the owner's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Protocol

from glasshouse.errors import GlasshouseError, VerificationError
from glasshouse.evidence.events import Event
from glasshouse.jobs.embedded import Embedded
from glasshouse.jobs.finish import Conclusion, conclude
from glasshouse.jobs.follow import Seen, Tail
from glasshouse.jobs.home import Home
from glasshouse.jobs.identity import read_public
from glasshouse.jobs.processes import ProcessName
from glasshouse.jobs.rundir import Phase, RunFolder, RunRecord
from glasshouse.providers.base import Placement, Provider, Request
from glasshouse.wire.states import State

__all__ = ["Ended", "Interrupts", "Watcher", "supervise"]

# A runtime that was asked to stop has a worker that may take seconds to end and memory to search.
STOP_PATIENCE_S = 120.0
_QUICK_S, _SLOW_S = 0.05, 0.5
_BROKER_CHECK_S = 2.0


class Watcher(Protocol):
    """Whoever shows a run to a person."""

    def event(self, event: Event, seen: Seen) -> None:
        """Something happened."""

    def tick(self, seen: Seen) -> None:
        """Time has passed, several times a second; nothing need have happened."""

    def stopping(self, times: int) -> None:
        """The run was asked to stop, for the n-th time."""


class Interrupts:
    """Counts how often the run was asked to stop; a signal handler calls it."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_signal: object) -> None:
        self.count += 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A run that has ended.

    Attributes:
        folder, record: the run.
        seen: what its events said.
        conclusion: how it ended.
    """

    folder: RunFolder
    record: RunRecord
    seen: Seen
    conclusion: Conclusion


def supervise(
    folder: RunFolder,
    launch: bytes,
    *,
    home: Home,
    provider: Provider,
    broker: Embedded,
    watcher: Watcher,
    interrupts: Interrupts,
    pace: int | None = None,
) -> Ended:
    """Place a prepared run and stay with it until it has ended.

    Args:
        folder: the run's; its record is prepared.
        launch: the launch file.
        home: the state home.
        provider: where to place it.
        broker: looked after while the run lasts; belongs to the caller, who gives it back.
        watcher: told of every event.
        interrupts: asked now and then whether to stop.
        pace: a descriptor over which the run is paced, to be measured (ADR 0009); the caller closes its own copy.

    Raises:
        PlatformError: it could not be placed.
    """
    record = folder.load()
    owner = read_public(home.owner_public)
    placement = provider.place(
        Request(
            launch=launch,
            package=record.package,
            out=folder.out,
            scratch=folder.scratch,
            log=folder.runtime_log,
            max_seconds=record.max_duration_s,
            pace=pace,
        )
    )
    folder.update(phase=Phase.RUNNING, supervisor=ProcessName.of(), agent=ProcessName.of(placement.pid))
    try:
        seen, exit_code = _follow(folder, placement, broker, watcher, interrupts)
    except BaseException:
        # Whatever went wrong here, no runtime is left behind that nobody watches.
        placement.interrupt()
        if placement.wait(STOP_PATIENCE_S) is None:
            placement.kill()
        raise
    conclusion = conclude(folder, owner_signing=owner.signing, agent_exit=exit_code)
    record = folder.end(
        outcome=conclusion.outcome.value,
        code=None if conclusion.code is None else conclusion.code.value,
        verdict=conclusion.verdict,
        exit_code=int(conclusion.exit_code),
        progress=None if seen.work is None else asdict(seen.work),
    )
    return Ended(folder=folder, record=record, seen=seen, conclusion=conclusion)


def _follow(
    folder: RunFolder, placement: Placement, broker: Embedded, watcher: Watcher, interrupts: Interrupts
) -> tuple[Seen, int]:
    """Follow the events until the runtime's process has ended; return its exit code too."""
    seen, shown = Seen(), _Shown(Tail(folder.events), watcher)
    passed_on, deadline, next_check = 0, float("inf"), time.monotonic() + _BROKER_CHECK_S
    while True:
        exit_code = placement.wait(_QUICK_S if seen.state is not State.RUNNING else _SLOW_S)
        shown.look(seen)
        if exit_code is not None:
            shown.close()
            return seen, exit_code
        now = time.monotonic()
        if interrupts.count > passed_on:
            passed_on = interrupts.count
            deadline = min(deadline, now + STOP_PATIENCE_S)
            placement.interrupt()
            shown.stopping(passed_on)
        if now > deadline:
            # It did not end by itself: the kernel wipes what a killed process held, and nobody vouches for it.
            placement.kill()
        if now > next_check:
            next_check = now + _BROKER_CHECK_S
            _keep(broker)


class _Shown:
    """Shows a run for as long as that is possible: no reader and no log is worth a training."""

    def __init__(self, tail: Tail, watcher: Watcher) -> None:
        self._tail: Tail | None = tail
        self._watcher: Watcher | None = watcher

    def look(self, seen: Seen) -> None:
        """Take and show what is new in the log; one that is none is left to the verification at the end."""
        if self._tail is None:
            return
        try:
            for event in self._tail.read():
                seen.take(event)
                self._show(partial(_tell, event=event, seen=seen))
        except VerificationError:
            self.close()
        self._show(lambda watcher: watcher.tick(seen))

    def stopping(self, times: int) -> None:
        self._show(lambda watcher: watcher.stopping(times))

    def close(self) -> None:
        if self._tail is not None:
            self._tail.close()
            self._tail = None

    def _show(self, what: Callable[[Watcher], None]) -> None:
        if self._watcher is not None:
            try:
                what(self._watcher)
            except OSError:  # whoever read our output has gone
                self._watcher = None


def _tell(watcher: Watcher, *, event: Event, seen: Seen) -> None:
    watcher.event(event, seen)


def _keep(broker: Embedded) -> None:
    """Start the broker again if it died; the runtime retries meanwhile, and its lease bounds how long."""
    if broker.serving is None:
        try:
            broker.ensure()
        except GlasshouseError:
            return  # tried again at the next look
