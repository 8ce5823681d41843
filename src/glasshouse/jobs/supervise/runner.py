"""Runs a prepared job in this process, or hands it to a supervisor of its own.

Law: however a run ends, that is recorded and the embedded broker is given back.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from glasshouse.errors import Code, GlasshouseError, PlatformError
from glasshouse.jobs.gates.run_broker import Broker
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.processes import ProcessName
from glasshouse.jobs.owner.rundir import Phase, RunFolder
from glasshouse.jobs.places.accounts import handed_on
from glasshouse.jobs.places.known_machines import place_of
from glasshouse.jobs.places.placing import LeftError
from glasshouse.jobs.places.rental_journal import Journal
from glasshouse.jobs.places.rented_machine import watched
from glasshouse.jobs.supervise.supervision import Ended, Interrupts, Watcher, supervise
from glasshouse.providers.place.base import Place
from glasshouse.wire.states import Outcome

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def settled(folder: RunFolder, broker: Broker) -> Iterator[None]:
    """Record a run that fails in this block as ended, and give its broker back.

    One that a person left (`LeftError`) goes on.
    """
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
    broker: Broker,
    watcher: Watcher,
    others: Sequence[tuple[RunFolder, bytes | None]] = (),
    places: Sequence[Place] = (),
    interrupts: Interrupts | None = None,
) -> Ended:
    """Supervise a run in this process until it has ended; SIGINT, SIGTERM and SIGHUP stop it.

    Args:
        places: of its machines, as far as the caller has them: a connection that is kept is used again.
        interrupts: what the caller counts signals by already; those that came before stop the run too.

    Raises:
        PlatformError: it could not be placed.
        GlasshouseError: as `supervise`.
    """
    interrupts, known = interrupts or Interrupts(), {place.name: place for place in places}

    def place(name: str) -> Place:
        if name not in known:
            known[name] = place_of(home, name)
        return known[name]

    # A run that goes on elsewhere is not ended by a failure to follow it.
    whole = settled(folder, broker) if launch is not None else contextlib.nullcontext()
    with whole, handled(interrupts), watched(home, folder.run_id, interrupts) as gone:
        try:
            ended = supervise(
                folder,
                launch,
                home=home,
                place=place,
                broker=broker,
                watcher=watcher,
                interrupts=interrupts,
                others=others,
                gone=gone,
            )
        except LeftError as left:
            if Journal.of(home, folder.run_id).exists:
                raise left.rented() from None
            raise
        finally:
            for one in known.values():
                one.close()
        broker.give_back()
        return ended


def detach(
    folder: RunFolder,
    launch: bytes | None,
    *,
    home: Home,
    others: Sequence[tuple[RunFolder, bytes]] = (),
    hand_over: Callable[[ProcessName], None] = lambda _supervisor: None,
) -> ProcessName:
    """Start a supervisor that outlives this process and its terminal, and return its name.

    It is a fresh process: what this one decrypted is not in its memory. Without a launch file it takes over a run that
    goes on elsewhere, and whose supervisor is gone.

    Args:
        hand_over: called with its name before it has a launch file: where that raises, it ends without having begun.

    Raises:
        PlatformError: it cannot be started.
    """
    command = [sys.executable, "-I", "-m", "glasshouse.jobs.supervise.supervisor", str(home.path), str(folder.path)]
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    log = os.open(folder.supervisor_log, flags, 0o600)
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=log,
            cwd="/",
            env=handed_on(keys=Journal.of(home, folder.run_id).exists),
            start_new_session=True,
            umask=0o077,
        )
    except OSError as error:
        raise PlatformError(Code.PLATFORM, f"the supervisor cannot be started: {error.strerror}") from None
    finally:
        os.close(log)
    supervisor = ProcessName.of(child.pid)
    # It is meant to outlive us: nothing here waits for it.
    child.returncode = 0
    assert child.stdin is not None  # noqa: S101 - asked for above
    with contextlib.suppress(BrokenPipeError), child.stdin:
        # The record is the supervisor's from the moment that it has the launch file, and not before.
        folder.update(supervisor=supervisor)
        hand_over(supervisor)
        # One line each, in the order of the machines; a launch file, being canonical JSON, has no line's end in it.
        child.stdin.write(b"\n".join([launch or b"", *(its for _, its in others)]))
    return supervisor


def stoppable() -> contextlib.AbstractContextManager[None]:
    """Let SIGTERM and SIGHUP end this block as Ctrl-C does: by an exception that is cleaned up after."""
    return handled(signal.default_int_handler)


def interrupt() -> None:
    """End the main thread's `stoppable` block from another thread, also where it waits for a host that is silent."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


@contextlib.contextmanager
def giving_back(first: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Go on in spite of signals, and call `first` at the first Ctrl-C; a second one raises KeyboardInterrupt."""
    interrupts = Interrupts()

    def handle(number: int, _frame: FrameType | None) -> None:
        interrupts(number)
        if number == signal.SIGINT and interrupts.by_key == 1:
            first()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    with handled(handle):
        yield


@contextlib.contextmanager
def handled(handler: Callable[..., object]) -> Iterator[None]:
    """Call `handler`, such as `Interrupts`, at SIGINT, SIGTERM and SIGHUP while the block lasts."""
    if threading.current_thread() is not threading.main_thread():  # another thread's run is not ended by signals
        yield
        return
    # What our caller had ignored stays ignored: `nohup` means it.
    numbers = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
