"""Keeps the broker informed: signed heads on their way, countersignatures on their way back.

Laws: one head is in flight at a time, the oldest unanswered one again and again until it is answered, for
the broker may have recorded it and only the answer was lost; then the newest. So nothing piles up while
the broker is away, and training never waits. Only a countersignature by the pinned broker key counts as
contact, as of when it was first asked for; without contact for the length of the lease the run ends. A leg of a line
that the gate fences off ends at once, and its end is countersigned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from glasshouse.errors import Code, FormatError, GlasshouseError, PeerError, RunError
from glasshouse.evidence.events import EventType
from glasshouse.evidence.heads import CountersignedHead, HeadSubmission
from glasshouse.evidence.log import EventLog
from glasshouse.runtime.gate.broker_client import BrokerCall, BrokerClient
from glasshouse.runtime.loop import Loop, Timer

HEADS_PATH = "/v1/heads"
INTERVAL_S = 30.0

_FIRST_RETRY_S = 0.5
_LONGEST_RETRY_S = 10.0
_LAST_TRIES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class _WaitingHead:
    head: bytes
    size: int
    root: bytes
    since_s: float  # the loop's time at which it was signed, and sent first


class HeadKeeper:
    """Signs heads and has them countersigned, from the release on.

    Args:
        broker_public, evidence_public: whose signatures a countersigned head of this run bears.
        countersigned: called with each countersigned head's bytes.
        trouble: called with the code of each kind of trouble, once per kind.
        lease_s: how long the run may go on without contact.
        since_s: the loop's time from which the first lease runs: when the release was asked for.
        leg: whether the run is a leg of a line, which the gate may fence off.
    """

    def __init__(
        self,
        loop: Loop,
        gate: BrokerClient,
        log: EventLog,
        *,
        broker_public: bytes,
        evidence_public: bytes,
        countersigned: Callable[[bytes], None],
        trouble: Callable[[Code], None],
        lease_s: float,
        since_s: float,
        leg: bool = False,
    ) -> None:
        self._loop, self._gate, self._log = loop, gate, log
        self._keys = {"broker_public": broker_public, "evidence_public": evidence_public}
        self._countersigned, self._trouble, self._lease_s, self._leg = countersigned, trouble, lease_s, leg
        # A lease shorter than twice the interval would be lost by waiting alone.
        self._interval_s = min(INTERVAL_S, lease_s / 3)
        self._call: BrokerCall | None = None
        self._waiting: _WaitingHead | None = None
        self._wanted = self._resting = False
        self._retry_s = _FIRST_RETRY_S
        self._met: set[Code] = set()
        self._rejections = 0
        self._timers: dict[str, Timer] = {}
        self.last: CountersignedHead | None = None  # the last countersigned head
        self.last_signed = b""  # the same head as this run signed it
        self._renew_lease(since_s)
        self.publish()

    @property
    def _countersigned_size(self) -> int:
        return self.last.head.size if self.last else 0

    def publish(self) -> None:
        """Sign the log as it stands and send it: now, or when the head in flight is answered."""
        if not self._resting:
            self._after("interval", self._interval_s, self._beat)
        self._wanted = self._waiting is not None
        if self._waiting is None and self._log.size > self._countersigned_size:
            self._waiting = _WaitingHead(
                head=self._log.head(), size=self._log.size, root=self._log.root, since_s=self._loop.now_s()
            )
            self._send()

    def _beat(self) -> None:
        """Have a new head to send: an answer to an old one could be a replay."""
        if self._waiting is None and self._log.size == self._countersigned_size:
            self._log.append(EventType.NOTICE, {"code": "alive", "value": None})
        self.publish()

    def finish(self, within_s: float) -> bool:
        """Have the final head countersigned; return whether it was in time.

        The lease plays no role any more: the keys are gone. A broker that is away is waited for; one that
        answers anything else than a countersignature is asked a few times.
        """
        self.rest()
        deadline_s = self._loop.now_s() + within_s
        self._retry_s, self._rejections = _FIRST_RETRY_S, 0
        while (size := self._countersigned_size) < self._log.size and self._rejections < _LAST_TRIES:
            if self._waiting is None:
                self.publish()
            elif self._call is None and self._rejections == 0:
                self._send()
            moved_on = partial(self._moved_on, size)
            if not self._loop.run_until(moved_on, within_s=deadline_s - self._loop.now_s()):
                break
        self.close()
        return self._countersigned_size == self._log.size

    def rest(self) -> None:
        """Stop the lease and the next head: the run is ending."""
        self._resting = True
        self._cancel("lease")
        self._cancel("interval")

    def close(self) -> None:
        """Stop sending; what is in flight is abandoned."""
        for name in list(self._timers):
            self._cancel(name)
        if self._call is not None:
            self._call.abandon()
            self._call = None

    def _moved_on(self, size: int) -> bool:
        return self._countersigned_size > size or self._rejections >= _LAST_TRIES

    def _send(self) -> None:
        if self._waiting is None or self._call is not None:
            return
        self._cancel("retry")
        proof = tuple(self._log.consistency(self._countersigned_size, self._waiting.size))
        submission = HeadSubmission(head=self._waiting.head, proof=proof)
        self._call = self._gate.begin(HEADS_PATH, submission.encode(), self._answered)

    def _answered(self, call: BrokerCall) -> None:
        self._call = None
        try:
            self._take(call.body())
        except GlasshouseError as error:
            # Nothing that is not countersigned counts, a refusal neither: any hop on the way can send one.
            if error.code not in self._met:
                self._met.add(error.code)
                self._trouble(error.code)
            self._rejections += error.code is not Code.BROKER_UNREACHABLE
            if error.code is Code.LINE_SUPERSEDED and self._leg:
                self._waiting = None  # a head of how it ends is the next that the gate takes
                if not self._resting:
                    raise
            self._after("retry", self._retry_s, self._send if self._waiting is not None else self.publish)
            self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)

    def _take(self, answer: bytes) -> None:
        waiting = self._waiting
        if waiting is None:
            return
        try:
            found = CountersignedHead.parse(answer, **self._keys)
        except FormatError:
            raise PeerError(Code.BROKER_UNTRUSTED, "a head that the broker's key did not countersign") from None
        if (found.head.size, found.head.root) != (waiting.size, waiting.root):
            raise PeerError(Code.BROKER_PROTOCOL, "a countersignature on another head")
        self.last, self.last_signed = found, waiting.head
        self._waiting = None
        self._met.clear()
        self._retry_s = _FIRST_RETRY_S
        self._renew_lease(waiting.since_s)
        self._countersigned(found.encode())
        if not self._resting and self._loop.now_s() - waiting.since_s >= self._interval_s:
            self._beat()  # what is left of the lease may be short
        elif self._wanted:
            self.publish()

    def _renew_lease(self, since_s: float) -> None:
        """Let the lease run from when the broker was asked: an answer that was held back does not extend it."""
        if not self._resting:
            self._after("lease", max(0.0, since_s + self._lease_s - self._loop.now_s()), self._lease_lost)

    def _lease_lost(self) -> None:
        raise RunError(Code.LEASE_LOST, "no countersignature from the broker for the length of the lease")

    def _after(self, name: str, delay_s: float, handler: Callable[[], None]) -> None:
        self._cancel(name)
        self._timers[name] = self._loop.after(delay_s, handler)

    def _cancel(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
