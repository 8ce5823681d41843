"""Looks at runs and stops them from another process than their supervisor."""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import dataclass
from typing import Any

from glasshouse.errors import Code, GlasshouseError, PlatformError, UsageError
from glasshouse.jobs.gates.embedded import Embedded
from glasshouse.jobs.owner.files import is_there
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.owner_identity import read_public
from glasshouse.jobs.owner.rundir import GIVEN_UP, Phase, RunFolder, RunRecord
from glasshouse.jobs.places.known_machines import LOCAL, place_of
from glasshouse.jobs.supervise.follow import Seen, Tail
from glasshouse.jobs.supervise.runner import detach
from glasshouse.jobs.supervise.supervision import Ended, Watcher, record_end
from glasshouse.jobs.verify.conclusion import Conclusion
from glasshouse.jobs.verify.download import take_stored
from glasshouse.jobs.verify.whole_group import conclude_run
from glasshouse.wire.crypto import SigningKey

_POLL_S = 0.25
_TAKE_OVER_S = 20.0
_KILLED_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLook:
    """A run as it is now."""

    folder: RunFolder
    record: RunRecord
    seen: Seen  # what its events report
    doing: str  # `preparing`, `running`, `unattended` (its supervisor is gone, the runtime is not) or `ended`

    @property
    def progress(self) -> dict[str, Any] | None:
        """The last that was reported of the work: unit, done, total, elapsed_us, loss."""
        return self.seen.progress or self.record.progress


def look(folder: RunFolder, home: Home, *, deep: bool = True) -> RunLook:
    """Look at a run; one whose processes are all gone is settled. Raises `UsageError` for a damaged record.

    Unless `deep`, an ended run's log is not read.
    """
    record = folder.load()
    if record.phase is not Phase.ENDED and not _alive(folder, record):
        # Its supervisor may have ended it between the two readings.
        record = folder.load()
        if record.phase is not Phase.ENDED:
            record = _settle(folder, home)
    doing = record.phase.value
    if record.phase is not Phase.ENDED and not (record.supervisor and record.supervisor.alive):
        doing = "unattended"
    # The log of a long run takes seconds to read; a list of ended runs does without.
    seen = Seen() if record.phase is Phase.ENDED and not deep else _seen(folder)
    return RunLook(folder=folder, record=record, seen=seen, doing=doing)


def looks(home: Home, *, newest: int | None = None) -> list[RunLook]:
    """Look at every run with a sound record, or the newest few, the newest first; logs of ended runs are not read."""
    found: list[RunLook] = []
    for folder in RunFolder.all(home):
        with contextlib.suppress(UsageError):
            found.append(look(folder, home, deep=False))
    return sorted(found, key=lambda one: one.record.created_us, reverse=True)[:newest]


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


def give_up(folder: RunFolder, home: Home) -> bool:
    """End the waiting for a run whose machine cannot be reached; return False for one that had ended.

    It is recorded as lost, because its end is not known; a later sweep of the machine ends and removes it.

    Raises:
        UsageError: a damaged record, or a run on this machine, which can be stopped.
        PlatformError: its supervisor does not end.
    """
    record = look(folder, home).record
    if record.phase is Phase.ENDED:
        return False
    if record.place == LOCAL:
        raise UsageError(
            Code.USAGE,
            "the run is on this machine: it is stopped, and not given up",
            hint=f"glasshouse stop {folder.run_id[:8]}",
        )
    _end_supervisor(record)
    if folder.load().phase is not Phase.ENDED:
        _settle(folder, home, lost=GIVEN_UP)
    return True


def take(folder: RunFolder, home: Home, owner: SigningKey) -> bool:
    """Take from a run's gate what its folder lacks, record its end anew if a receipt came; return if anything did.

    Raises:
        GlasshouseError: as `download.take_stored`; nothing has changed then.
        PlatformError: its supervisor, which waits for the machine, does not end.
    """
    had_receipts = all(is_there(one.receipt) for one in folder.machines())
    taken = take_stored(home, folder, owner, verified=lambda: _end_supervisor(folder.load()))
    if taken and not (had_receipts and folder.load().phase is Phase.ENDED):
        _settle(folder, home)
    return taken


def _end_supervisor(record: RunRecord) -> None:
    """Kill the supervisor, which would go on waiting for the machine; raises `PlatformError`."""
    if record.supervisor is None or record.phase is Phase.ENDED:
        return
    record.supervisor.send(signal.SIGKILL)
    deadline_s = time.monotonic() + _KILLED_S
    while record.supervisor.alive and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    if record.supervisor.alive:
        raise PlatformError(
            Code.PLATFORM,
            f"the run's supervisor, process {record.supervisor.pid}, was killed and does not end",
            hint="wait until it is gone, and repeat the command",
        )


def wait(folder: RunFolder, home: Home, watcher: Watcher | None = None) -> Ended:
    """Follow a run of another supervisor to its end; raises `UsageError` or `VerificationError` for damaged files."""
    seen, tail, taken_s, watcher = Seen(), Tail(folder.events), -_TAKE_OVER_S, watcher or Watcher()
    with contextlib.closing(tail):
        while True:
            # Looked up before the log is read: what comes before the end is then read to the last line.
            record = folder.load()
            going = record.phase is not Phase.ENDED and _alive(folder, record)
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


def concluded(folder: RunFolder, home: Home, record: RunRecord | None) -> Conclusion:
    """Verify a run's receipt anew: the record of its end, if there is one, is a summary, and no proof."""
    owner = read_public(home.owner_public)
    return conclude_run(folder, record, owner_signing=owner.signing)


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


def _alive(folder: RunFolder, record: RunRecord) -> bool:
    """Return whether a process of the run still exists, on whichever of its machines; elsewhere it does until seen."""
    if record.place != LOCAL and record.phase is Phase.RUNNING:
        return True
    return record.alive or any(one.load().alive for one in folder.machines()[1:])


def _settle(folder: RunFolder, home: Home, *, lost: Code | None = None) -> RunRecord:
    """Record the end of a run that was not recorded, and give its broker back; `lost` is as of `record_end`."""
    conclusion = concluded(folder, home, None)
    for one, end in zip(folder.machines()[1:], conclusion.machines[1:], strict=True):
        record_end(one, end, _seen(one), lost=lost)
    record = record_end(folder, conclusion, _seen(folder), lost=lost)
    with contextlib.suppress(GlasshouseError, OSError):
        Embedded(home).give_back()
    return record


def _seen(folder: RunFolder) -> Seen:
    try:
        return Seen.of(folder.events)
    except GlasshouseError:
        return Seen()


def require_ended(found: RunLook) -> None:
    """Refuse what only an ended run can give; raises `UsageError`."""
    if found.doing != Phase.ENDED:
        name, record = found.folder.run_id[:8], found.record
        stored = record.gate is not None and record.place != LOCAL
        gone = f"; if its machine is gone: glasshouse fetch {name} --from-gate" if stored else ""
        raise UsageError(Code.USAGE, f"run {name} has not ended", hint=f"wait for it with: glasshouse attach{gone}")
