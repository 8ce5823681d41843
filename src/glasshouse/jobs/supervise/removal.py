"""Removes runs that have ended: their sealed outputs, logs, receipts and packages. Keys and package records stay.

Laws: what still runs, whose rented machine is not shown to be gone, or cannot be read, is never removed; a run is taken
from the list in one step, so one that is half removed is not taken for a run.
"""

from __future__ import annotations

import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from glasshouse.errors import Code, UsageError
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.rundir import Phase, RunFolder, RunRecord
from glasshouse.jobs.places.rental_journal import Journal
from glasshouse.jobs.supervise.control import look


@dataclass(frozen=True, kw_only=True, slots=True)
class Removable:
    """A run that may be removed."""

    folder: RunFolder
    record: RunRecord
    journal: Journal  # of its rental, which is over; it may not be there
    freed_bytes: int  # what its removal frees; what another name still holds, as a package's own, frees nothing


def removable(folder: RunFolder, home: Home) -> Removable:
    """Return an ended run; raises `UsageError` if it goes on, may still cost money, or its record is damaged."""
    record = look(folder, home, deep=False).record
    if record.phase is not Phase.ENDED or folder.active():
        raise UsageError(
            Code.USAGE, f"run {folder.run_id[:8]} has not ended", hint=f"glasshouse stop {folder.run_id[:8]} ends it"
        )
    journal = Journal.of(home, folder.run_id)
    if journal.exists and not journal.load().over:
        raise UsageError(
            Code.USAGE,
            f"the machine that was rented for run {folder.run_id[:8]} is not shown to be gone",
            hint="glasshouse sweep gives it back; or wait until the run's own command has",
        )
    return Removable(folder=folder, record=record, journal=journal, freed_bytes=_freed_bytes(folder.path))


def ended_before(home: Home, *, us: int) -> list[Removable]:
    """Return the runs that ended before a time, in µs, the oldest first; what goes on or is damaged is left out."""
    found: list[Removable] = []
    for folder in RunFolder.all(home):
        try:
            one = removable(folder, home)
        except UsageError:
            continue
        if one.record.ended_us is not None and one.record.ended_us < us:
            found.append(one)
    return sorted(found, key=lambda one: one.record.created_us)


def remove(runs: Sequence[Removable]) -> None:
    """Remove runs; raises OSError for a folder that cannot be removed."""
    for run in runs:
        # Under another name first: what a crash leaves of it is no run, and the next removal takes it away.
        gone = run.folder.path.with_name(f".{run.folder.run_id}.removed")
        run.folder.path.rename(gone)
    for run in runs:
        if run.journal.exists:
            run.journal.remove()
        for left in run.folder.path.parent.glob(".*.removed"):
            if left.is_symlink():  # an earlier version took a link for a run
                left.unlink()
            else:
                shutil.rmtree(left)


def _freed_bytes(folder: Path) -> int:
    found = (path.lstat() for path in folder.rglob("*"))
    return sum(file.st_blocks * 512 for file in found if stat.S_ISREG(file.st_mode) and file.st_nlink == 1)
