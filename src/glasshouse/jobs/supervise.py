"""Supervises a placed run until it has ended: follows its events, keeps its broker alive, verifies its receipt.

Laws: an interrupt is passed to the runtime, which zeroizes; the supervisor waits for that, however often it
is interrupted. Nothing here needs, or has, a private key of the owner's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Protocol

from glasshouse.errors import Code, GlasshouseError, VerificationError
from glasshouse.evidence.events import Event
from glasshouse.jobs.embedded import Embedded
from glasshouse.jobs.finish import Conclusion, conclude
from glasshouse.jobs.follow import Seen, Tail
from glasshouse.jobs.home import Home
from glasshouse.jobs.identity import read_public
from glasshouse.jobs.machines import together
from glasshouse.jobs.processes import ProcessName
from glasshouse.jobs.rundir import Phase, RunFolder, RunRecord
from glasshouse.providers.base import Placement, Provider, Request
from glasshouse.wire.group import Group
from glasshouse.wire.states import State

__all__ = ["Ended", "Interrupts", "Silent", "Watcher", "supervise"]

# A runtime that was asked to stop has a worker that may take seconds to end and memory to search.
STOP_PATIENCE_S = 120.0
_QUICK_S, _SLOW_S = 0.05, 0.5
_BROKER_CHECK_S = 2.0
# For the other machines of a group to hear, by the gate or by their ranks, of one that has ended, and to say so.
_GROUP_PATIENCE_S = 5.0


class Watcher(Protocol):
    """Whoever shows a run to a person."""

    def event(self, event: Event, seen: Seen) -> None:
        """Something happened."""

    def tick(self, seen: Seen) -> None:
        """Time has passed, several times a second; nothing need have happened."""

    def stopping(self, times: int) -> None:
        """The run was asked to stop, for the n-th time."""

    def machine(self, machine: int, code: Code | None, *, completed: bool) -> None:
        """A machine of the run's group has ended, and why if it did not complete."""


class Silent:
    """Shows nothing."""

    def event(self, event: Event, seen: Seen) -> None:
        pass

    def tick(self, seen: Seen) -> None:
        pass

    def stopping(self, times: int) -> None:
        pass

    def machine(self, machine: int, code: Code | None, *, completed: bool) -> None:
        pass


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
    others: Sequence[tuple[RunFolder, bytes]] = (),
) -> Ended:
    """Place a prepared run, on all its machines, and stay with it until it has ended everywhere.

    Args:
        folder: the run's; its record is prepared.
        launch: the launch file.
        home: the state home.
        provider: where to place it.
        broker: looked after while the run lasts; belongs to the caller, who gives it back.
        watcher: told of every event of machine 0, and of the end of others.
        interrupts: asked now and then whether to stop.
        others: folders and launch files of the other machines of its group.

    Raises:
        PlatformError: it could not be placed.
    """
    owner = read_public(home.owner_public)
    placed: list[_Placed] = []
    peers = provider.addresses(1 + len(others)) if others else ()
    try:
        for one, its_launch in ((folder, launch), *others):
            # Machine 0 is where progress and outputs come from; of the others one sees how they end.
            placed.append(_place(one, its_launch, provider, watcher if one is folder else None, peers))
        _Supervision(placed, broker, watcher, interrupts).follow()
    except BaseException:
        # Whatever went wrong here, no runtime is left behind that nobody watches.
        for one_placed in placed:
            one_placed.placement.interrupt()
        for one_placed in placed:
            if one_placed.exit_code is None:
                _wait(one_placed.placement)
        raise
    ends = [conclude(one.folder, owner_signing=owner.signing, agent_exit=one.exit_code) for one in placed]
    first = sorted(range(len(placed)), key=lambda machine: placed[machine].ended_s)
    conclusion = ends[0] if len(ends) == 1 else together(ends, first=first)
    for one_placed, end in zip(placed[1:], ends[1:], strict=True):
        _record(one_placed, end)
    return Ended(folder=folder, record=_record(placed[0], conclusion), seen=placed[0].seen, conclusion=conclusion)


@dataclass(kw_only=True, slots=True)
class _Placed:
    """A machine of the run, from its placement to its end."""

    folder: RunFolder
    placement: Placement
    seen: Seen
    shown: _Shown
    exit_code: int | None = None
    ended_s: float = float("inf")

    def look(self, wait_s: float) -> bool:
        """Take what is new, and return whether the runtime has ended just now."""
        exit_code = self.placement.wait(wait_s)
        self.shown.look(self.seen)
        if exit_code is None:
            return False
        self.exit_code, self.ended_s = exit_code, time.monotonic()
        self.shown.close()
        return True


def _place(
    folder: RunFolder,
    launch: bytes,
    provider: Provider,
    watcher: Watcher | None,
    peers: tuple[str, ...],
) -> _Placed:
    record = folder.load()
    placement = provider.place(
        Request(
            launch=launch,
            package=record.package,
            out=folder.out,
            scratch=folder.scratch,
            log=folder.runtime_log,
            max_seconds=record.max_duration_s,
            ranks=None if record.group is None else record.group.ranks,
            peers=peers,
        )
    )
    try:
        folder.update(phase=Phase.RUNNING, supervisor=ProcessName.of(), agent=ProcessName.of(placement.pid))
    except BaseException:
        placement.interrupt()
        _wait(placement)
        raise
    return _Placed(folder=folder, placement=placement, seen=Seen(), shown=_Shown(Tail(folder.events), watcher))


def _wait(placement: Placement) -> None:
    """Give a runtime that was asked to stop the time to wipe itself."""
    if placement.wait(STOP_PATIENCE_S) is None:
        placement.kill()


def _record(placed: _Placed, conclusion: Conclusion) -> RunRecord:
    work = placed.seen.work
    return placed.folder.end(
        outcome=conclusion.outcome.value,
        code=None if conclusion.code is None else conclusion.code.value,
        verdict=conclusion.verdict,
        exit_code=int(conclusion.exit_code),
        progress=None if work is None else asdict(work),
        blamed=conclusion.blamed,
    )


class _Supervision:
    """Follows the machines of one run until all their runtimes have ended.

    Args:
        placed: the machines, in order.
        broker, watcher, interrupts: as of `supervise`.
    """

    def __init__(self, placed: Sequence[_Placed], broker: Embedded, watcher: Watcher, interrupts: Interrupts) -> None:
        self._placed = placed
        self._broker = broker
        self._watcher = watcher
        self._interrupts = interrupts
        self._passed_on = 0
        self._kill_s = self._stop_s = float("inf")
        self._next_check_s = time.monotonic() + _BROKER_CHECK_S

    @property
    def _going(self) -> list[_Placed]:
        return [one for one in self._placed if one.exit_code is None]

    def follow(self) -> None:
        """Return when every runtime's process has ended."""
        while going := self._going:
            slow = all(one.seen.state is State.RUNNING for one in going)
            for number, one in enumerate(going):
                # One is waited for, the others are looked at: an end is seen at once or at the next look.
                if one.look((_SLOW_S if slow else _QUICK_S) if number == 0 else 0.0):
                    self._ended(one)
            self._see_to(time.monotonic())

    def _see_to(self, now_s: float) -> None:
        if self._interrupts.count > self._passed_on:
            self._passed_on = self._interrupts.count
            self._ask_to_stop(now_s)
            self._placed[0].shown.stopping(self._passed_on)
        if now_s > self._stop_s:
            self._stop_s = float("inf")
            self._ask_to_stop(now_s)
        if now_s > self._kill_s:
            # They did not end by themselves: the kernel wipes what a killed process held, and nobody vouches for it.
            for one in self._going:
                one.placement.kill()
        if now_s > self._next_check_s:
            self._next_check_s = now_s + _BROKER_CHECK_S
            _keep(self._broker)

    def _ask_to_stop(self, now_s: float) -> None:
        self._kill_s = min(self._kill_s, now_s + STOP_PATIENCE_S)
        for one in self._going:
            one.placement.interrupt()

    def _ended(self, one: _Placed) -> None:
        """A machine that ends without having completed ends its group: at the gate, and everywhere."""
        machine = self._placed.index(one)
        if len(self._placed) > 1:
            self._placed[0].shown.machine(machine, one.seen.code, completed=one.exit_code == 0)
        if one.exit_code == 0 or not self._going:
            return
        group = one.folder.load().group
        if group is not None:
            _tell_gate(self._broker, group, one.seen.code)
        # Those that wait at the gate are refused now, and ranks that train notice by themselves: they say why.
        self._stop_s = min(self._stop_s, time.monotonic() + _GROUP_PATIENCE_S)


def _tell_gate(broker: Embedded, group: Group, code: Code | None) -> None:
    """Have nothing released to machines that wait for one that is gone; the gate's deadline would say it later."""
    serving = broker.serving
    if serving is not None and code is not Code.RANK_REFUSED:
        with contextlib.suppress(GlasshouseError):
            serving.client().refuse_group(group.id, machine=group.machine, code=code or Code.RANK_LOST)


class _Shown:
    """Shows a run for as long as that is possible: no reader and no log is worth a training."""

    def __init__(self, tail: Tail, watcher: Watcher | None) -> None:
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

    def machine(self, machine: int, code: Code | None, *, completed: bool) -> None:
        self._show(lambda watcher: watcher.machine(machine, code, completed=completed))

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
