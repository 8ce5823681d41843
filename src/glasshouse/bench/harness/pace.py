"""The pacing channel from the harness's side (ADR 0009, messages in `wire.pacing`): one datagram, one message.

Law: nothing is sent or read between an order and its report, so nothing of the harness runs inside a slice.
"""

from __future__ import annotations

import select
import socket
from typing import TYPE_CHECKING

from glasshouse.errors import Code, FormatError, RunError
from glasshouse.wire import pacing
from glasshouse.wire.pacing import End, Go, Parked, Report, Slice

if TYPE_CHECKING:
    from glasshouse.bench.harness.stop import Stop

__all__ = ["ArmLostError", "Pace"]


class ArmLostError(Exception):
    """The other end of a pacing channel is gone: the arm says why."""


class Pace:
    """One arm's channel; `child` is the worker's end, for the process that is started with it.

    Args:
        stop: ends every wait.
    """

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self._mine, self.child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def handed_over(self) -> None:
        """Close our copy of the worker's end, so that its death ends our waiting."""
        self.child.close()

    def parked(self, timeout_s: float) -> int:
        """Wait until the worker rests at its first step; return how many steps it has done; raises as `slice`."""
        found = self._receive(timeout_s)
        if not isinstance(found, Parked):
            raise FormatError(Code.SCHEMA, "an arm that reports a slice before it rests")
        return found.done

    def slice(self, order: Go, timeout_s: float) -> Slice:
        """Let the worker run one slice and return what it reports when it rests again.

        Raises:
            ArmLostError: its process is gone.
            RunError: `interrupted`, or `duration-exceeded` when no report came in time.
            FormatError: a report that is none.
        """
        self._send(order)
        found = self._receive(timeout_s)
        if not isinstance(found, Slice) or not found.steps:
            raise FormatError(Code.SCHEMA, "an arm that reports something else than its slice")
        return found

    def end(self, until: int) -> None:
        """Let the worker train until so many steps are done in all, and end; raises `ArmLostError`."""
        self._send(End(until=until))

    def close(self) -> None:
        """Close both ends: a worker that rests, or trains, ends as an interrupted run does."""
        self._mine.close()
        self.child.close()

    def _send(self, order: Go | End) -> None:
        try:
            self._mine.send(pacing.encode(order))
        except OSError:
            raise ArmLostError from None

    def _receive(self, timeout_s: float) -> Report:
        ready, _, _ = select.select([self._mine.fileno(), self._stop.fileno()], [], [], timeout_s)
        if self._mine.fileno() not in ready:
            if self._stop.asked:
                raise RunError(Code.INTERRUPTED, "the measurement was interrupted")
            raise RunError(Code.DURATION_EXCEEDED, f"an arm did not answer within {timeout_s:.0f} s")
        try:
            data = self._mine.recv(pacing.MAX_BYTES + 1)
        except OSError:
            raise ArmLostError from None
        if not data:
            raise ArmLostError
        return pacing.report(data)
