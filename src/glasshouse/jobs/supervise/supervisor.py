"""The program of a detached run's supervisor: `python -I -m glasshouse.jobs.supervise.supervisor HOME RUN-FOLDER`.

The launch file comes by standard input; for each machine of a group there is one, on a line of its own. Its log, mode
0600, holds no job's data.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from functools import partial
from pathlib import Path

from glasshouse.errors import Code, ExitCode, GlasshouseError
from glasshouse.evidence.events import Event, EventType
from glasshouse.handshake.launch import MAX_LAUNCH_BYTES
from glasshouse.jobs.gates.embedded import Embedded
from glasshouse.jobs.gates.known_gates import GateBroker
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.processes import Interrupts, ProcessName, giving_back, handled
from glasshouse.jobs.owner.rundir import Phase, RunFolder
from glasshouse.jobs.places.accounts import take_keys
from glasshouse.jobs.places.known_machines import place_of
from glasshouse.jobs.places.placing import LeftError
from glasshouse.jobs.places.rental_journal import Journal
from glasshouse.jobs.places.rented_machine import return_machine
from glasshouse.jobs.supervise.follow import Seen, Watcher
from glasshouse.jobs.supervise.line_watch import Broker
from glasshouse.jobs.supervise.supervision import run_here
from glasshouse.wire.group import MAX_MACHINES


class _Log(Watcher):
    """Writes a line for each step."""

    def away(self, machine: int, problem: str) -> None:
        self.line(f"machine {machine}: " + (problem or "followed again"))

    def event(self, event: Event, seen: Seen) -> None:
        if event.type is EventType.TRANSITION:
            self.line(event.state.value)

    def stopping(self, times: int) -> None:
        self.line(f"asked to stop ({times})")

    def machine(self, machine: int, code: Code | None, *, completed: bool) -> None:
        self.line(f"machine {machine} " + ("completed" if completed else f"ended ({code or 'no reason given'})"))

    def line(self, text: str) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        # Some of it are another machine's words: a terminal that shows this log is not to obey them.
        sys.stderr.write(f"{stamp} {text if text.isprintable() else ascii(text)[1:-1]}\n")
        sys.stderr.flush()


def main(arguments: list[str]) -> int:
    """Supervise one run; return the exit code."""
    take_keys()
    interrupts = Interrupts()
    with handled(interrupts):  # from the first to the last: between two blocks is no moment to die in
        return _main(arguments, interrupts)


def _main(arguments: list[str], interrupts: Interrupts) -> int:
    folder, log = RunFolder(Path(arguments[1])), _Log()
    home = Home(path=Path(arguments[0]), project=folder.path.parent.parent)
    lines = sys.stdin.buffer.read(MAX_MACHINES * (MAX_LAUNCH_BYTES + 1)).split(b"\n")
    launches: list[bytes | None] = [*lines]
    journal, held = Journal.of(home, folder.run_id), contextlib.ExitStack()
    try:
        ours = held.enter_context(journal.claimed()) if journal.exists else True
        if lines == [b""] and folder.load().phase is Phase.RUNNING:
            if not _is_alone(folder) or not ours:
                log.line("another process looks after it: it is not taken over")
                return ExitCode.DONE
            launches = [None for _ in folder.machines()]
        elif not all(0 < len(line) <= MAX_LAUNCH_BYTES for line in lines):
            log.line("no launch file came by standard input")
            return ExitCode.USAGE
        # The order of the folders is that of the machines, and so is that of the lines.
        others = list(zip(folder.machines()[1:], launches[1:], strict=True))
        broker = broker_of(home, folder)
        try:
            ended = run_here(
                folder,
                launches[0],
                home=home,
                place=partial(place_of, home),
                broker=broker,
                watcher=log,
                interrupts=interrupts,
                others=others,
            )
        except LeftError:
            raise
        except BaseException:
            # A run that was started before goes on where it is, although we cannot follow it: its machine is in use.
            if launches[0] is not None or folder.load().phase is Phase.ENDED:
                _return(home, folder, log)
            raise
        _return(home, folder, log)
    except GlasshouseError as error:
        log.line(str(error))
        return error.exit_code
    except Exception as error:
        # Its kind, never its text or its traceback: what they would hold is not known.
        log.line(f"a defect in Glasshouse: {type(error).__name__}")
        return ExitCode.INTERNAL
    finally:
        held.close()
    log.line(f"{ended.conclusion.outcome.value}, receipt {ended.conclusion.verdict}")
    return ended.conclusion.exit_code


def broker_of(home: Home, folder: RunFolder) -> Broker:
    """Return the broker of a run that was prepared; raises `UsageError`."""
    gate = folder.load().gate
    return Embedded(home) if gate is None else GateBroker(home, gate)


def _return(home: Home, folder: RunFolder, log: _Log) -> None:
    with giving_back():
        return_machine(home, folder, say=log.line)


def _is_alone(folder: RunFolder) -> bool:
    """Take a run over that has no supervisor, unless another process does so at this moment; held until we end."""
    lock = os.open(folder.path / "supervisor.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False
    record = folder.load()  # which may name this process already
    return record.supervisor in (None, ProcessName.of()) or not record.supervisor.alive


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
