"""A supervisor passes interrupts on, waits for zeroization, and records an end whatever happens."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from glasshouse.errors import Code, ExitCode, PlatformError, UsageError
from glasshouse.evidence.events import Event
from glasshouse.jobs.gates.embedded import Embedded
from glasshouse.jobs.owner.processes import Interrupts, ProcessName
from glasshouse.jobs.owner.rundir import Phase, RunFolder
from glasshouse.jobs.places.placing import LeftError
from glasshouse.jobs.supervise import attach, supervision
from glasshouse.jobs.supervise.follow import Seen
from glasshouse.providers.protocol.order import Order
from glasshouse.wire.states import Outcome, State
from simulators.owner_side import OwnersWorld

NOBODY = ProcessName(pid=2**22 - 1, started=1)


@dataclass
class Machine:
    """A place whose runtime plays back a story: each step is done at one `wait`."""

    story: Iterable[Callable[[], int | None]]
    name: str = "played"
    container_source: str = "minted"
    orders: list[Order] = field(default_factory=list)
    interrupts: int = 0
    killed: bool = False
    launch: bytes = b""
    pid: int = NOBODY.pid
    problem: str = ""

    def run(self, _folder: Path, *, max_bytes: int | None = None, relayed: bool = False) -> Machine:
        return self

    def connect(self) -> None:
        pass

    def upload(self, package: Path, _on_progress: object) -> str:
        return str(package)

    def start(self, order: Order, launch: bytes, *, check: Callable[[], None]) -> int:
        self.orders.append(order)
        self.launch = launch
        self._steps = iter(self.story)
        return self.pid

    def wait(self, timeout_s: float) -> int | None:
        return next(self._steps, lambda: -signal.SIGKILL)()

    def interrupt(self) -> None:
        self.interrupts += 1

    def kill(self) -> None:
        self.killed = True

    def remove(self, package: str | None = None) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class Watching:
    events: list[Event] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    ticks: int = 0

    def away(self, machine: int, problem: str) -> None:
        pass

    def event(self, event: Event, seen: Seen) -> None:
        assert seen.last_us == event.time_us
        self.events.append(event)

    def tick(self, seen: Seen) -> None:
        self.ticks += 1

    def stopping(self, times: int) -> None:
        self.stops.append(times)


class NoBroker(Embedded):
    """A broker that is always there and costs nothing."""

    given_back = 0

    @property
    def serving(self) -> object:  # type: ignore[override]
        return object()

    def give_back(self) -> bool:
        self.given_back += 1
        return True


@pytest.fixture
def world() -> OwnersWorld:
    return OwnersWorld()


@pytest.fixture
def folder(world: OwnersWorld, tmp_path: Path) -> RunFolder:
    return world.settle(tmp_path)


def told(world: OwnersWorld, folder: RunFolder, **story: object) -> Callable[[], int | None]:
    def step() -> int | None:
        world.tell(folder, world.run(**story))
        return None

    return step


def stay(
    world: OwnersWorld,
    folder: RunFolder,
    machine: Machine,
    watcher: Watching,
    interrupts: Interrupts,
):
    return supervision.supervise(
        folder,
        b"launch",
        home=world.home,
        place=lambda _name: machine,
        broker=NoBroker(world.home),
        watcher=watcher,
        interrupts=interrupts,
    )


def test_every_event_is_seen_and_the_end_is_recorded(world: OwnersWorld, folder: RunFolder) -> None:
    watcher, machine = Watching(), Machine([lambda: None, told(world, folder), lambda: 0])
    ended = stay(world, folder, machine, watcher, Interrupts())
    assert len(watcher.events) == len(folder.events.read_bytes().splitlines())
    assert (ended.conclusion.outcome, ended.conclusion.exit_code) == (Outcome.COMPLETED, ExitCode.DONE)
    record = folder.load()
    assert (record.phase, record.outcome, record.verdict, record.exit_code) == (Phase.ENDED, "completed", "good", 0)
    (order,) = machine.orders
    assert machine.launch == b"launch"
    assert (order.package, order.max_seconds) == (str(record.package), 3600)


def test_when_a_runtime_elsewhere_was_asked_for_is_recorded_before_it_is(world: OwnersWorld, folder: RunFolder) -> None:
    """What is before that on a rented machine was login and upload, by one clock: `glasshouse cost` tells it apart."""

    class Elsewhere(Machine):
        def start(self, order: Order, launch: bytes, *, check: Callable[[], None]) -> int:
            asked.append(folder.load().placed_us)
            return super().start(order, launch, check=check)

    asked: list[int | None] = []
    folder.update(place="lab")
    before_us = time.time_ns() // 1000
    stay(world, folder, Elsewhere([told(world, folder), lambda: 0]), Watching(), Interrupts())
    (placed_us,) = asked
    assert placed_us is not None
    assert before_us <= placed_us <= time.time_ns() // 1000
    assert folder.load().placed_us == placed_us


def test_events_written_between_the_last_look_and_the_end_are_not_lost(world: OwnersWorld, folder: RunFolder) -> None:
    def write_and_end() -> int:
        world.tell(folder, world.run())
        return 0

    watcher = Watching()
    ended = stay(world, folder, Machine([write_and_end]), watcher, Interrupts())
    assert watcher.events[-1].state.value == "zeroized"
    assert ended.seen.state is State.ZEROIZED


def test_each_interrupt_is_passed_on_and_the_end_is_waited_for(world: OwnersWorld, folder: RunFolder) -> None:
    interrupts, watcher = Interrupts(), Watching()

    def ctrl_c() -> None:
        interrupts()

    story = {"outcome": Outcome.INTERRUPTED, "code": Code.INTERRUPTED}
    machine = Machine([ctrl_c, lambda: None, ctrl_c, told(world, folder, **story), lambda: 130])
    ended = stay(world, folder, machine, watcher, interrupts)
    assert machine.interrupts == 2
    assert watcher.stops == [1, 2]
    assert not machine.killed
    assert ended.conclusion.exit_code is ExitCode.INTERRUPTED


def test_a_person_leaves_a_machine_that_cannot_be_reached_and_the_run_goes_on_there(
    world: OwnersWorld, folder: RunFolder
) -> None:
    interrupts = Interrupts()

    def ctrl_c() -> None:
        interrupts(signal.SIGINT)

    folder.update(created_us=time.time_ns() // 1000)  # else it is over by now, wherever it is
    machine = Machine([ctrl_c, ctrl_c, lambda: None, ctrl_c, lambda: 0], problem="the link is down")
    broker = NoBroker(world.home)
    with (
        pytest.raises(LeftError, match="left to itself: local cannot be reached") as left,
        supervision.settled(folder, broker),
    ):
        stay(world, folder, machine, Watching(), interrupts)
    assert "--give-up" in left.value.hint
    assert (machine.interrupts, machine.killed, broker.given_back) == (3, False, 0)
    assert folder.load().phase is Phase.RUNNING


def test_a_machine_that_is_reached_is_waited_for_however_often_a_key_is_pressed(
    world: OwnersWorld, folder: RunFolder
) -> None:
    interrupts = Interrupts()
    story = {"outcome": Outcome.INTERRUPTED, "code": Code.INTERRUPTED}
    presses = [lambda: interrupts(signal.SIGINT)] * 5
    machine = Machine([*presses, told(world, folder, **story), lambda: 130])
    assert stay(world, folder, machine, Watching(), interrupts).conclusion.outcome is Outcome.INTERRUPTED


def test_a_runtime_that_does_not_stop_is_killed_and_called_lost(
    world: OwnersWorld, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "STOP_PATIENCE_S", 0.0)
    interrupts = Interrupts()
    machine = Machine([lambda: interrupts(), lambda: None, lambda: -signal.SIGKILL])
    ended = stay(world, folder, machine, Watching(), interrupts)
    assert machine.killed
    assert ended.conclusion.outcome is Outcome.LOST
    assert folder.load().outcome == "lost"


def test_a_broker_that_died_is_started_again(
    world: OwnersWorld, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dead(NoBroker):
        started = 0

        @property
        def serving(self) -> None:  # type: ignore[override]
            return None

        def ensure(self) -> object:  # type: ignore[override]
            self.started += 1
            return None

    monkeypatch.setattr(supervision, "_BROKER_CHECK_S", 0.0)
    broker = Dead(world.home)
    supervision.supervise(
        folder,
        b"",
        home=world.home,
        place=lambda _name: Machine([lambda: None, told(world, folder), lambda: 0]),
        broker=broker,
        watcher=Watching(),
        interrupts=Interrupts(),
    )
    assert broker.started >= 1


def test_a_reader_that_goes_away_does_not_end_the_training(world: OwnersWorld, folder: RunFolder) -> None:
    class Gone(Watching):
        def event(self, event: Event, seen: Seen) -> None:
            raise BrokenPipeError

    machine = Machine([lambda: None, told(world, folder), lambda: 0])
    ended = stay(world, folder, machine, Gone(), Interrupts())
    assert machine.interrupts == 0
    assert (ended.conclusion.outcome, ended.seen.state) == (Outcome.COMPLETED, State.ZEROIZED)


def test_a_log_that_is_none_is_not_followed_and_not_believed(world: OwnersWorld, folder: RunFolder) -> None:
    def scribble() -> None:
        folder.out.mkdir(exist_ok=True)
        folder.events.write_bytes(b"\x1b]0;owned\x07\n")

    machine, watcher = Machine([scribble, lambda: None, lambda: 4]), Watching()
    ended = stay(world, folder, machine, watcher, Interrupts())
    assert watcher.events == []
    assert ended.conclusion.exit_code is ExitCode.RUN_FAILED


def test_a_defect_in_the_view_leaves_no_runtime_behind(world: OwnersWorld, folder: RunFolder) -> None:
    class Broken(Watching):
        def event(self, event: Event, seen: Seen) -> None:
            raise ZeroDivisionError

    machine = Machine([told(world, folder), lambda: None])
    with pytest.raises(ZeroDivisionError):
        stay(world, folder, machine, Broken(), Interrupts())
    assert machine.interrupts == 1
    assert machine.killed, "it did not end when it was asked"


def test_a_runtime_that_cannot_be_recorded_is_not_left_behind(
    world: OwnersWorld, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_folder: RunFolder, **_changes: object) -> None:
        raise UsageError(Code.DISK_FULL, "no room")

    machine = Machine([lambda: None])
    monkeypatch.setattr(RunFolder, "update", full)
    with pytest.raises(UsageError):
        stay(world, folder, machine, Watching(), Interrupts())
    assert (machine.interrupts, machine.killed) == (1, True)


def here(world: OwnersWorld, folder: RunFolder, broker: NoBroker, place: Callable[[str], Machine]) -> supervision.Ended:
    return supervision.run_here(
        folder, b"", home=world.home, place=place, broker=broker, watcher=Watching(), interrupts=Interrupts()
    )


def test_a_run_that_cannot_be_placed_is_recorded_and_gives_its_broker_back(
    world: OwnersWorld, folder: RunFolder
) -> None:
    class NoMachine:
        def run(self, _folder: Path, *, max_bytes: int | None = None, relayed: bool = False) -> Machine:
            raise PlatformError(Code.PLATFORM, "no machine today")

        def close(self) -> None:
            pass

    broker = NoBroker(world.home)
    with pytest.raises(PlatformError):
        here(world, folder, broker, lambda _name: NoMachine())  # type: ignore[arg-type,return-value]
    record = folder.load()
    assert (record.phase, record.outcome, record.code) == (Phase.ENDED, "failed", "platform-unsupported")
    assert broker.given_back == 1


def test_a_signal_to_the_command_reaches_the_runtime(world: OwnersWorld, folder: RunFolder) -> None:
    def signal_us() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    story = {"outcome": Outcome.INTERRUPTED, "code": Code.INTERRUPTED}
    machine = Machine([signal_us, lambda: None, told(world, folder, **story), lambda: 130])
    before = signal.getsignal(signal.SIGTERM)
    ended = here(world, folder, NoBroker(world.home), lambda _name: machine)
    assert machine.interrupts == 1
    assert ended.conclusion.outcome is Outcome.INTERRUPTED
    assert signal.getsignal(signal.SIGTERM) is before


def test_attaching_follows_to_the_very_end(world: OwnersWorld, folder: RunFolder) -> None:
    folder.update(phase=Phase.RUNNING, supervisor=ProcessName.of(), agent=ProcessName.of())
    watcher = Watching()

    def other_process() -> None:
        time.sleep(0.2)
        world.tell(folder, world.run())
        time.sleep(0.2)
        folder.end(outcome="completed", verdict="good", exit_code=0)

    thread = threading.Thread(target=other_process)
    thread.start()
    ended = attach.wait(folder, world.home, watcher)
    thread.join()
    assert ended.conclusion.verdict == "good"
    assert len(watcher.events) == len(folder.events.read_bytes().splitlines())


def test_a_machine_that_was_given_back_and_goes_on_to_answer_is_not_followed(
    world: OwnersWorld, folder: RunFolder
) -> None:
    """As a host does that has ended the dead man's switch, and would have its rent."""
    looks = iter(range(1000))

    def answers() -> None:
        assert next(looks) < 10, "it is followed for ever"

    machine = Machine([answers] * 1000)
    ended = supervision.supervise(
        folder,
        b"launch",
        home=world.home,
        place=lambda _name: machine,
        broker=NoBroker(world.home),
        watcher=Watching(),
        interrupts=Interrupts(),
        gone=lambda: next(looks) > 3,
    )
    assert ended.record.outcome == "lost"


def test_a_machine_that_cannot_be_reached_and_whose_lease_has_passed_is_not_waited_for(
    world: OwnersWorld, folder: RunFolder
) -> None:
    folder.update(created_us=time.time_ns() // 1000)
    looks: list[int] = []

    def away() -> int | None:
        looks.append(1)
        machine.problem = "" if len(looks) == 1 else "no route"
        return None

    machine = Machine(iter(lambda: away, None))
    ended = supervision.supervise(
        folder,
        b"launch",
        home=world.home,
        place=lambda _name: machine,
        broker=NoBroker(world.home),
        watcher=Watching(),
        interrupts=Interrupts(),
        silent=lambda: len(looks) > 3,  # asked of one that cannot be reached alone
    )
    assert (ended.conclusion.outcome, ended.asked, len(looks)) == (Outcome.LOST, False, 4)


def test_a_rented_machine_that_a_person_leaves_is_said_to_cost_on(
    world: OwnersWorld, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left(*_of: object, **_how: object) -> None:
        raise LeftError(folder.run_id, "world:0011")

    monkeypatch.setattr(supervision, "supervise", left)
    monkeypatch.setattr(supervision, "watched", lambda *_of: contextlib.nullcontext(lambda: False))
    rented = world.home.rentals / folder.run_id
    rented.mkdir(parents=True)
    (rented / "rental.json").write_text("{}")
    with pytest.raises(LeftError, match="costs money on") as caught:
        here(world, folder, NoBroker(world.home), lambda name: pytest.fail(name))
    assert "glasshouse sweep" in caught.value.hint
