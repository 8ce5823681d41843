"""Relays between whoever measures a run and its worker, and lets everything rest in between (ADR 0009).

The owner allows it in the sealed parameters, which the worker enforces; the agent's command line offers it. Only
then does this exist. Laws: reports and orders alternate, and what is out of turn, unknown or beyond its limits
ends the run; nothing is relayed but the fields of `wire.pacing`; the first rest stands in the log before it
begins; a worker goes on only after the sentinel has looked at it; lease and longest duration never rest.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from enum import Enum, auto

from glasshouse.errors import Code, FormatError, RunError, UsageError
from glasshouse.runtime.loop import Loop
from glasshouse.runtime.sentinel import Sentinel
from glasshouse.wire import pacing
from glasshouse.wire.canonical import Json

__all__ = ["Pacing"]

# What is on its way to the broker is let arrive: it belongs to this run, and not to what runs while this one rests.
_SETTLE_S = 1.0
_SETTLE_STEP_S = 0.002


class _Turn(Enum):
    """Whose turn it is to speak."""

    UNPARKED = auto()  # the worker's: it has not stood at its first step yet
    RUNNING = auto()  # the worker's: it works on a slice
    SETTLING = auto()  # nobody's: it stands, and what else is under way comes to an end
    RESTING = auto()  # that of whoever measures
    ENDED = auto()  # nobody's: the worker trains to its end
    CLOSED = auto()  # nobody's: the run is being ended


class Pacing:
    """The agent's side of a paced run.

    Args:
        descriptor: a SOCK_SEQPACKET socket to whoever measures; belongs to this object from now on.
        loop, sentinel: what rests with the run.
        relay: sends an order to the worker.
        busy: whether something is on its way to the broker.
        first_rest: called before the run rests for the first time.
        gone: called when whoever measures is gone while the run is paced.
        unwatched: called when the sentinel does not answer, or does not say that nobody is traced; raises. The worker
            is not told to go on.

    Attributes:
        rested: whether the run ever rested.

    Raises:
        UsageError: `usage`: it is no such socket.
    """

    def __init__(
        self,
        descriptor: int,
        loop: Loop,
        sentinel: Sentinel,
        *,
        relay: Callable[[Json], None],
        busy: Callable[[], bool],
        first_rest: Callable[[], None],
        gone: Callable[[], None],
        unwatched: Callable[[], None],
    ) -> None:
        self._loop, self._sentinel, self._relay, self._busy = loop, sentinel, relay, busy
        self._first_rest, self._gone, self._unwatched = first_rest, gone, unwatched
        self._turn = _Turn.UNPARKED
        self.rested = False
        try:
            self._socket = socket.socket(fileno=descriptor)
        except OSError:
            raise _no_channel() from None
        if (self._socket.family, self._socket.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
            self._socket.close()
            raise _no_channel()
        self._socket.setblocking(False)
        loop.watch(descriptor, self._readable)

    def reported(self, message: Json) -> None:
        """Take what the worker reports: it stands, and the run is to rest.

        Raises:
            RunError: `worker-failed`: out of its turn, or no report.
        """
        if self._turn is _Turn.CLOSED:
            return  # said before it heard that it is to stop
        try:
            report = pacing.parse_report(message)
        except FormatError:
            raise RunError(Code.WORKER_FAILED, "the worker sent a report that it must not send") from None
        first = isinstance(report, pacing.Parked)
        if self._turn is not (_Turn.UNPARKED if first else _Turn.RUNNING):
            raise RunError(Code.WORKER_FAILED, "the worker sent a report out of its turn")
        self._turn = _Turn.SETTLING
        self._settle(pacing.encode(report), self._loop.now_s() + _SETTLE_S)

    def close(self) -> None:
        """Let go of whoever measures: from here on the run ends like any other. May be called twice."""
        if self._turn is not _Turn.CLOSED:
            self._turn = _Turn.CLOSED
            self._hang_up()
            self._sentinel.wake()  # what it sees it says by its alarm
            self._loop.wake()

    def _settle(self, report: bytes, by_s: float) -> None:
        if self._turn is not _Turn.SETTLING:
            return
        if self._busy() and self._loop.now_s() < by_s:
            self._loop.after(_SETTLE_STEP_S, lambda: self._settle(report, by_s))
            return
        if not self.rested:
            self.rested = True
            self._first_rest()
        if not self._sentinel.rest():
            self._unwatched()
            return
        self._loop.rest()
        self._turn = _Turn.RESTING
        try:
            self._socket.send(report, socket.MSG_NOSIGNAL)
        except OSError:
            self._lost()

    def _readable(self) -> None:
        try:
            data = self._socket.recv(pacing.MAX_BYTES + 1)
        except OSError:
            data = b""
        if not data:
            self._lost()
            return
        if self._turn is not _Turn.RESTING:
            raise FormatError(Code.SCHEMA, "whoever measures sent an order out of turn")
        order = pacing.order(data)
        if not self._sentinel.wake():
            self._unwatched()
            return
        self._loop.wake()
        self._turn = _Turn.RUNNING
        if isinstance(order, pacing.End):
            self._turn = _Turn.ENDED
            self._hang_up()
        self._relay(order.to_json())

    def _lost(self) -> None:
        self.close()
        self._gone()

    def _hang_up(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.unwatch(self._socket.fileno())
            self._socket.close()


def _no_channel() -> UsageError:
    return UsageError(Code.USAGE, "--pace-fd is not the descriptor of a pacing channel")
