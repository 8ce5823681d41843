"""Asks a run's broker about its line while the run is followed: whether the leg is over, and what is to be kept."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TypeAlias

from glasshouse.broker.http_api import LineView
from glasshouse.errors import GlasshouseError, UsageError
from glasshouse.jobs.define.package_records import PackageRecord
from glasshouse.jobs.gates import line_notes
from glasshouse.jobs.gates.embedded import Embedded
from glasshouse.jobs.gates.known_gates import GateBroker
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.verify.line_file import write_line_file

Broker: TypeAlias = Embedded | GateBroker
"""What a run needs of its broker: whether it serves, that it does, and giving it back."""
_ASK_S = 15.0


def silence(folder: RunFolder, home: Home, broker: Broker) -> Callable[[], bool]:
    """Return a function for whether a leg's lease has passed at its gate; false where no lost machine is replaced.

    It is asked while a machine cannot be followed: one that its gate still hears of goes on.
    """
    record = folder.load()
    known = PackageRecord.load(home, record.package_id, workload=record.workload)
    if record.line is None or not known.deployment.retries:
        return lambda: False
    next_s = 0.0

    def over() -> bool:
        nonlocal next_s
        if time.monotonic() < next_s:
            return False
        next_s = time.monotonic() + _ASK_S
        view = _view(folder, broker)
        return view is not None and view.leg == record.leg and view.over == "lease"

    return over


def note_line(folder: RunFolder, home: Home, broker: Broker) -> None:
    """Keep what the broker shows of a run's line, where it has one and can be asked, and write its line file.

    Raises `VerificationError` where what it shows contradicts what was kept.
    """
    view, serving = _view(folder, broker), broker.serving
    if view is not None and serving is not None:
        with contextlib.suppress(UsageError):  # a disk without room takes no good end from a run
            line_notes.keep(home, view, gate=serving.public)
    with contextlib.suppress(UsageError, OSError):
        write_line_file(home, folder)


def _view(folder: RunFolder, broker: Broker) -> LineView | None:
    line, serving = folder.load().line, broker.serving
    with contextlib.suppress(GlasshouseError):  # away, or a gate that wants the owner's key, which need not be here
        return None if line is None or serving is None else serving.client().line(bytes.fromhex(line))
    return None
