"""Supervises a placed run until it has ended: follows its events, keeps its broker alive, verifies its receipt.

Laws: an interrupt is passed to the runtime, which zeroizes; the supervisor waits for that, however often it
is interrupted, unless the machine cannot be reached and a person would not wait. Nothing here needs, or has, a
private key of the owner's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from glasshouse.errors import Code, GlasshouseError, UsageError, VerificationError
from glasshouse.jobs.gates.known_gates import relay_of
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.owner_identity import read_public
from glasshouse.jobs.owner.processes import Interrupts, handled
from glasshouse.jobs.owner.rundir import Phase, RunFolder, RunRecord
from glasshouse.jobs.places.placing import STOP_PATIENCE_S, LeftError, Placing
from glasshouse.jobs.places.rental_journal import Journal
from glasshouse.jobs.places.rental_watch import watched
from glasshouse.jobs.supervise.follow import Seen, Tail, Watcher
from glasshouse.jobs.supervise.line_watch import Broker, note_line, silence
from glasshouse.jobs.verify.conclusion import Conclusion, conclude, record_end, together
from glasshouse.providers.place.base import Place, Placed
from glasshouse.wire.group import Group
from glasshouse.wire.states import Outcome, State

_QUICK_S, _SLOW_S = 0.05, 0.5
_BROKER_CHECK_S = 2.0
# Between the record of a run and its start lies the sending of its package.
_SENDING_S = 24 * 3600
# By so many Ctrl-C a person leaves a machine that cannot be reached.
_LEAVES = 3
# For the other machines of a group to hear, by the gate or by their ranks, of one that has ended, and to say so.
_GROUP_PATIENCE_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A run that has ended, what its events reported, and how it ended."""

    folder: RunFolder
    record: RunRecord
    seen: Seen
    conclusion: Conclusion
    asked: bool = False  # whether its owner, or a cap of theirs, asked it to stop


def supervise(
    folder: RunFolder,
    launch: bytes | None,
    *,
    home: Home,
    place: Callable[[str], Place],
    broker: Broker,
    watcher: Watcher,
    interrupts: Interrupts,
    others: Sequence[tuple[RunFolder, bytes | None]] = (),
    gone: Callable[[], bool] = lambda: False,
    silent: Callable[[], bool] = lambda: False,
) -> Ended:
    """Place a prepared run, on all its machines, and stay with it until it has ended everywhere.

    Args:
        launch: the launch file; None for a run that was started before, whose supervisor is gone.
        place: returns the place of the name that a record has.
        broker: started again if it ends while the run lasts; the caller gives it back.
        watcher: gets every event of machine 0, and the end of others.
        others: folders and launch files of the other machines of its group; these are None where `launch` is.
        gone: whether its machines do not exist any more: one that cannot be followed then is not waited for.
        silent: whether its gate counts it as over; asked where one cannot be followed, which then is not waited for.

    Raises:
        PlatformError: it could not be placed.
        LeftError: a person left a machine that cannot be reached; by its record the run goes on.
    """

    def not_stopped() -> None:
        if interrupts.count:
            raise UsageError(Code.INTERRUPTED, "interrupted before a runtime was placed: the key was not released")

    owner = read_public(home.owner_public)
    folders = (folder, *(other for other, _ in others))
    machines: list[_FollowedMachine] = []
    relays = [relay_of(home, one.load().gate, one.run_id) for one in folders]
    with Placing([place(one.load().place) for one in folders], folders, relays) as placing:
        if launch is None:
            placing.take_over()
        else:
            placing.start([launch, *(its or b"" for _, its in others)], not_stopped)
        for one, placed in zip(folders, placing.placed, strict=True):
            # Machine 0 is where progress and outputs come from; of the others one sees how they end.
            shown_to = watcher if one is folder else None
            machines.append(_FollowedMachine(folder=one, placed=placed, tail=Tail(one.events), watcher=shown_to))
        _Supervision(machines, broker, interrupts, gone, silent).follow()
        ends = [
            conclude(one.folder, owner_signing=owner.signing, agent_exit=one.exit_code, home=home) for one in machines
        ]
        first = sorted(range(len(machines)), key=lambda number: machines[number].ended_s)
        conclusion = ends[0] if len(ends) == 1 else together(ends, first=first)
        # Before anything is removed there: a supervisor that is killed in between leaves the record of an end.
        for machine, end in zip(machines[1:], ends[1:], strict=True):
            record_end(machine.folder, end, machine.seen.progress)
        record = record_end(folder, conclusion, machines[0].seen.progress)
    asked = interrupts.count > 0
    return Ended(folder=folder, record=record, seen=machines[0].seen, conclusion=conclusion, asked=asked)


@dataclass(kw_only=True, slots=True)
class _FollowedMachine:
    """A machine of the run, from its placement to its end; no reader and no log is worth a training."""

    folder: RunFolder
    placed: Placed
    tail: Tail | None  # None once it has ended, or where its log is none
    watcher: Watcher | None  # None once what reads its output has gone, and of all but machine 0
    seen: Seen = field(default_factory=Seen)
    exit_code: int | None = None
    ended_s: float = float("inf")
    problem: str = ""

    @property
    def ended(self) -> bool:
        return self.ended_s < float("inf")

    def look(self, wait_s: float) -> bool:
        """Take what is new, and return whether the runtime has ended just now."""
        exit_code = self.placed.wait(wait_s)
        self._read()
        if exit_code is None:
            return False
        self.exit_code, self.ended_s = exit_code, time.monotonic()
        self.close()
        return True

    def _read(self) -> None:
        """Take and show what is new in the log; one that is none is left to the verification at the end."""
        if self.tail is None:
            return
        try:
            for event in self.tail.read():
                self.seen.take(event)
                self.show(Watcher.event, event, self.seen)
        except VerificationError:
            self.close()
        self.show(Watcher.tick, self.seen)

    def close(self) -> None:
        if self.tail is not None:
            self.tail.close()
            self.tail = None

    def show(self, what: Callable[..., None], *about: object, **more: object) -> None:
        """Call a method of the watcher, unless what reads its output has gone."""
        if self.watcher is not None:
            try:
                getattr(self.watcher, what.__name__)(*about, **more)
            except OSError:
                self.watcher = None


class _Supervision:
    """Follows the machines of one run until all their runtimes have ended."""

    def __init__(
        self,
        placed: Sequence[_FollowedMachine],
        broker: Broker,
        interrupts: Interrupts,
        gone: Callable[[], bool],
        silent: Callable[[], bool],
    ) -> None:
        self._placed, self._show = placed, placed[0].show
        self._broker, self._interrupts, self._gone, self._silent = broker, interrupts, gone, silent
        self._passed_on = 0
        self._kill_s = self._stop_s = float("inf")
        self._next_check_s = time.monotonic() + _BROKER_CHECK_S

    @property
    def _going(self) -> list[_FollowedMachine]:
        return [one for one in self._placed if not one.ended]

    def follow(self) -> None:
        """Return when every runtime's process has ended."""
        while going := self._going:
            slow = all(one.seen.state is State.RUNNING for one in going)
            for number, one in enumerate(going):
                # One is waited for, the others are looked at: an end is seen at once or at the next look.
                if one.look((_SLOW_S if slow else _QUICK_S) if number == 0 else 0.0):
                    self._ended(one)
                self._see_whether_away(one)
            self._see_to(time.monotonic())

    def _see_whether_away(self, one: _FollowedMachine) -> None:
        if one.placed.problem != one.problem:
            one.problem = one.placed.problem
            self._show(Watcher.away, self._placed.index(one), one.problem)
        # What its provider does not run, or what was given back at its cap, is not asked: it may go on to answer.
        over = self._gone()
        if one.problem and not over:
            record = one.folder.load()  # its runtime ends it by its own clock
            over = time.time() > record.created_us / 1e6 + record.max_duration_s + _SENDING_S or self._silent()
        if over and not one.ended:
            one.ended_s = time.monotonic()  # it does not run any more; what is here is all
            one.close()

    def _see_to(self, now_s: float) -> None:
        if self._interrupts.count > self._passed_on:
            self._passed_on = self._interrupts.count
            self._ask_to_stop(now_s)
            self._show(Watcher.stopping, self._passed_on)
            away = [one for one in self._going if one.problem]
            if self._interrupts.by_key >= _LEAVES and away:
                raise LeftError(self._placed[0].folder.run_id, away[0].folder.load().place)
        if now_s > self._stop_s:
            self._stop_s = float("inf")
            self._ask_to_stop(now_s)
        if now_s > self._kill_s:
            # They did not end by themselves: the kernel wipes what a killed process held, and nothing vouches for it.
            for one in self._going:
                one.placed.kill()
        if now_s > self._next_check_s:
            self._next_check_s = now_s + _BROKER_CHECK_S
            if self._broker.serving is None:
                # The runtime retries meanwhile, and its lease bounds how long; it is tried again at the next look.
                with contextlib.suppress(GlasshouseError):
                    self._broker.ensure()

    def _ask_to_stop(self, now_s: float) -> None:
        self._kill_s = min(self._kill_s, now_s + STOP_PATIENCE_S)
        for one in self._going:
            one.placed.interrupt()

    def _ended(self, one: _FollowedMachine) -> None:
        """A machine that ends without having completed ends its group: at the gate, and everywhere."""
        machine = self._placed.index(one)
        if len(self._placed) > 1:
            self._show(Watcher.machine, machine, one.seen.code, completed=one.exit_code == 0)
        if one.exit_code == 0 or not self._going:
            return
        group = one.folder.load().group
        if group is not None:
            _refuse_group(self._broker, group, one.seen.code)
        # Those that wait at the gate are refused now, and ranks that train notice by themselves: they say why.
        self._stop_s = min(self._stop_s, time.monotonic() + _GROUP_PATIENCE_S)


def _refuse_group(broker: Broker, group: Group, code: Code | None) -> None:
    """Have nothing released to machines that wait for one that is gone; the gate's deadline would refuse them later."""
    serving = broker.serving
    if serving is not None and code is not Code.RANK_REFUSED:
        with contextlib.suppress(GlasshouseError):
            serving.client().refuse_group(group.id, machine=group.machine, code=code or Code.RANK_LOST)


@contextlib.contextmanager
def settled(folder: RunFolder, broker: Broker) -> Iterator[None]:
    """Record a run that fails in this block as ended, and give its broker back; one that a person left goes on."""
    try:
        yield
    except LeftError:
        raise
    except BaseException as error:
        with contextlib.suppress(GlasshouseError, OSError):
            if folder.load().phase is not Phase.ENDED:
                code = error.code if isinstance(error, GlasshouseError) else None
                if isinstance(error, KeyboardInterrupt):
                    code = Code.INTERRUPTED
                outcome = Outcome.INTERRUPTED if code is Code.INTERRUPTED else Outcome.FAILED
                for one in folder.machines():
                    one.end(outcome=outcome.value, code=None if code is None else code.value)
        with contextlib.suppress(GlasshouseError, OSError):
            broker.give_back()
        raise


def run_here(
    folder: RunFolder,
    launch: bytes | None,
    *,
    home: Home,
    place: Callable[[str], Place],
    broker: Broker,
    watcher: Watcher,
    interrupts: Interrupts,
    others: Sequence[tuple[RunFolder, bytes | None]] = (),
    places: Sequence[Place] = (),
) -> Ended:
    """Supervise a run in this process until it has ended; SIGINT, SIGTERM and SIGHUP stop it. Raises as `supervise`.

    Args:
        places: of its machines, as far as the caller has them: a connection that is kept is used again.
        place: makes those that it does not have.
        interrupts: what the caller counts signals by already; those that came before stop the run too.
    """
    known = {one.name: one for one in places}

    def known_or_made(name: str) -> Place:
        if name not in known:
            known[name] = place(name)
        return known[name]

    # A run that goes on elsewhere is not ended by a failure to follow it.
    whole = settled(folder, broker) if launch is not None else contextlib.nullcontext()
    with whole, handled(interrupts), watched(home, folder.run_id, interrupts) as gone:
        try:
            ended = supervise(
                folder,
                launch,
                home=home,
                place=known_or_made,
                broker=broker,
                watcher=watcher,
                interrupts=interrupts,
                others=others,
                gone=gone,
                silent=silence(folder, home, broker),
            )
            note_line(folder, home, broker)
        except LeftError as left:
            if Journal.of(home, folder.run_id).exists:
                raise left.rented() from None
            raise
        finally:
            for one in known.values():
                one.close()
        broker.give_back()
        return ended
