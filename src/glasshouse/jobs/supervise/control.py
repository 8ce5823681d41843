"""Looks at runs from another process than their supervisor, records an end that none recorded, starts a supervisor."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from glasshouse.errors import Code, GlasshouseError, PlatformError, UsageError
from glasshouse.jobs.gates.embedded import Embedded
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.owner_identity import read_public
from glasshouse.jobs.owner.processes import ProcessName, spawn
from glasshouse.jobs.owner.rundir import GIVEN_UP, Phase, RunFolder, RunRecord
from glasshouse.jobs.places.accounts import handed_on
from glasshouse.jobs.places.rental_journal import Journal
from glasshouse.jobs.supervise.follow import Seen
from glasshouse.jobs.verify.conclusion import Conclusion, conclude_run, record_end
from glasshouse.providers.place.local import LocalPlace

_POLL_S = 0.25
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
        """The last that is there of the work, at its end the receipt's: unit, done, total, elapsed_us, loss."""
        ended = self.record.progress if self.record.phase is Phase.ENDED else None
        return ended or self.seen.progress or self.record.progress


def look(folder: RunFolder, home: Home, *, deep: bool = True) -> RunLook:
    """Look at a run, and settle one whose processes are gone; without the log of an ended one unless `deep`."""
    record = folder.load()
    if record.phase is not Phase.ENDED and not is_alive(folder, record):
        # Its supervisor may have ended it between the two readings.
        record = folder.load()
        if record.phase is not Phase.ENDED:
            record = settle(folder, home)
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
    if record.place == LocalPlace.name:
        raise UsageError(
            Code.USAGE,
            "the run is on this machine: it is stopped, and not given up",
            hint=f"glasshouse stop {folder.run_id[:8]}",
        )
    end_supervisor(record)
    if folder.load().phase is not Phase.ENDED:
        settle(folder, home, lost=GIVEN_UP)
    return True


def end_supervisor(record: RunRecord) -> None:
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


def concluded(folder: RunFolder, home: Home, record: RunRecord | None) -> Conclusion:
    """Verify a run's receipt anew: the record of its end, if there is one, is a summary, and no proof."""
    owner = read_public(home.owner_public)
    return conclude_run(folder, record, owner_signing=owner.signing, home=home)


def is_alive(folder: RunFolder, record: RunRecord) -> bool:
    """Return whether a process of the run still exists, on whichever of its machines; elsewhere it does until seen."""
    if record.place != LocalPlace.name and record.phase is Phase.RUNNING:
        return True
    return record.alive or any(one.load().alive for one in folder.machines()[1:])


def settle(folder: RunFolder, home: Home, *, lost: Code | None = None) -> RunRecord:
    """Record the end of a run that was not recorded, and give its broker back; `lost` is as of `record_end`."""
    conclusion = concluded(folder, home, None)
    for one, end in zip(folder.machines()[1:], conclusion.machines[1:], strict=True):
        record_end(one, end, _seen(one).progress, lost=lost)
    record = record_end(folder, conclusion, _seen(folder).progress, lost=lost)
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
        stored = record.gate is not None and record.place != LocalPlace.name
        gone = f"; if its machine is gone: glasshouse fetch {name} --from-gate" if stored else ""
        raise UsageError(Code.USAGE, f"run {name} has not ended", hint=f"wait for it with: glasshouse attach{gone}")


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
    try:
        child = spawn(
            "glasshouse.jobs.supervise.supervisor",
            *(str(home.path), str(folder.path)),
            log=folder.supervisor_log,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=handed_on(keys=Journal.of(home, folder.run_id).exists),
        )
    except OSError as error:
        raise PlatformError(Code.PLATFORM, f"the supervisor cannot be started: {error.strerror}") from None
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
