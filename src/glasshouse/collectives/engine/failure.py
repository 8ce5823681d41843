"""What ends a group: the errors and the alert of a failure, and outputs zeroed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from glasshouse.collectives.engine.completion import Completion
from glasshouse.collectives.engine.progress import Submission
from glasshouse.collectives.engine.unexpected import PeerAlertError
from glasshouse.collectives.operations.exchange import Exchange
from glasshouse.collectives.operations.regions import within
from glasshouse.collectives.protocol.alerts import REASONS, Alert
from glasshouse.errors import Code, CollectiveError

__all__ = ["alert_of", "late", "zero"]


def late(
    late: Completion, missing: Sequence[int], awaited: Sequence[int], called: Callable[[int], str]
) -> CollectiveError:
    """Return the error for an operation whose time is up, with the ranks that have not begun it."""
    if missing:
        absent = " and ".join(map(called, missing))
        what = f"nothing came from {absent} within the timeout of {late.timeout_s:g} s"
    else:
        begun = " and ".join(map(called, awaited)) or "any rank"
        what = f"no more came from {begun} within the timeout of {late.timeout_s:g} s; who is missing is not seen here"
    return CollectiveError(Code.COLLECTIVE_TIMEOUT, what, rank=missing[0] if len(missing) == 1 else None)


def alert_of(error: CollectiveError, rank: int, first: Submission | None) -> Alert:
    """Return the alert for the other ranks: the one that this rank received, or one for what it found."""
    if isinstance(error, PeerAlertError):
        return error.alert
    return Alert(
        reason=error.code if error.code in REASONS else Code.COLLECTIVE_ABORTED,
        detected_by=rank,
        culprit=error.rank,
        operation=first.sequence if isinstance(first, Exchange) else None,
        text=error.message,
    )


def zero(work: Submission) -> None:
    """Zero what an operation was to fill, complete or not."""
    # A device that is out of order refuses this too: nothing can be read from it any more either.
    with suppress(Exception), torch.inference_mode(), within(work.queue):
        work.zero()
