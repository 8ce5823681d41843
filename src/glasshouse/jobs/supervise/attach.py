"""Follows and stops runs of another supervisor, or of one that is gone."""

from __future__ import annotations

import contextlib
import signal
import time

from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.rundir import Phase, RunFolder, RunRecord
from glasshouse.jobs.places.known_machines import LOCAL, place_of
from glasshouse.jobs.supervise.control import concluded, detach, is_alive, look
from glasshouse.jobs.supervise.follow import Seen, Tail, Watcher
from glasshouse.jobs.supervise.supervision import Ended

_POLL_S = 0.25
_TAKE_OVER_S = 20.0


def stop(folder: RunFolder, home: Home) -> bool:
    """Signal a run to stop, zeroize and end; return whether a process was there for it.

    Raises:
        UsageError: a damaged record.
        PeerError: it goes on elsewhere, and cannot be reached.
    """
    record = look(folder, home).record
    if record.phase is Phase.ENDED:
        return False
    # The supervisor passes the signal on and records the end; without one the signal goes to each machine's runtime.
    if record.supervisor is not None and record.supervisor.send(signal.SIGTERM):
        return True
    if record.place != LOCAL:
        _stop_there(folder, record, home)
        return True
    agents = [one.load().agent for one in folder.machines()]
    return sum(agent is not None and agent.send(signal.SIGTERM) for agent in agents) > 0  # none is left out


def wait(folder: RunFolder, home: Home, watcher: Watcher | None = None) -> Ended:
    """Follow a run of another supervisor to its end; raises `UsageError` or `VerificationError` for damaged files."""
    seen, tail, taken_s, watcher = Seen(), Tail(folder.events), -_TAKE_OVER_S, watcher or Watcher()
    with contextlib.closing(tail):
        while True:
            # Looked up before the log is read: what comes before the end is then read to the last line.
            record = folder.load()
            going = record.phase is not Phase.ENDED and is_alive(folder, record)
            ended = None if going else look(folder, home).record
            if ended is None and time.monotonic() - taken_s > _TAKE_OVER_S and _is_left_alone(folder, home):
                detach(folder, None, home=home)
                taken_s = time.monotonic()
            for event in tail.read():
                seen.take(event)
                watcher.event(event, seen)
            watcher.tick(seen)
            if ended is not None:
                return Ended(folder=folder, record=ended, seen=seen, conclusion=concluded(folder, home, ended))
            time.sleep(_POLL_S)


def _stop_there(folder: RunFolder, record: RunRecord, home: Home) -> None:
    """Stop a run that goes on elsewhere without a supervisor, and have another one bring back what it leaves."""
    for one in folder.machines():
        place = place_of(home, one.load().place)
        relayed = record.gate is not None
        with contextlib.closing(place), contextlib.closing(place.run(one.path, relayed=relayed)) as placed:
            placed.connect()
            placed.stop()
    detach(folder, None, home=home)


def _is_left_alone(folder: RunFolder, home: Home) -> bool:
    """Return whether it goes on elsewhere, and its supervisor is gone."""
    record = folder.load()
    if record.place == LOCAL or record.phase is not Phase.RUNNING:
        return False
    place_of(home, record.place)  # one that has no name here any more cannot be followed
    return record.supervisor is None or not record.supervisor.alive
