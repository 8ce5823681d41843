"""Carries operations out: the thread that waits for a result drives all of them.

Laws: one thread at a time drives, the one that waits for a result if there is one, else a background thread for
operations that were submitted to go on without one; the first failure ends the group on every rank: outputs of
unfinished operations are zeroed, the others are alerted, keys are dropped, and every operation raises.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import torch

from glasshouse.collectives.engine import failure
from glasshouse.collectives.engine.completion import Completion
from glasshouse.collectives.engine.progress import ProgressEngine, Submission
from glasshouse.collectives.operations.communicator import Communicator
from glasshouse.collectives.operations.exchange import Exchange, Operation
from glasshouse.collectives.operations.point_to_point import P2PMessage
from glasshouse.collectives.operations.regions import within
from glasshouse.collectives.protocol.group_keys import forget_in_children
from glasshouse.collectives.protocol.headers import FrameKind
from glasshouse.collectives.transport.mesh import Mesh
from glasshouse.errors import Code, CollectiveError

_HEARSAY_S = 1.0  # how long a rank that waits for ranks which have begun too leaves naming to others


class Engine:
    """Carries out the operations of one group on one rank, over a mesh that it owns, each in `timeout_s`."""

    def __init__(self, mesh: Mesh, *, timeout_s: float, communicator: Communicator | None = None) -> None:
        self.rank = mesh.membership.rank
        self.size = mesh.membership.size
        self.timeout_s = timeout_s
        self.condition = threading.Condition(threading.RLock())
        self._mesh = mesh
        self._called = mesh.membership.called
        self._communicator = communicator or Communicator(mesh.membership, mesh.traffic, shared=mesh.shared)
        self._progress = ProgressEngine(mesh, self._communicator, self._done)
        self._inbox: deque[Submission] = deque()
        self._unfinished: dict[Submission, Completion] = {}  # in the order of submission
        self._sequence = 0
        self._background = 0
        self._failed: CollectiveError | None = None
        self._closed = False
        self._ending: CollectiveError | None = None  # why to end the group; set by other threads or signal handlers
        self._closing = False  # whether it is to close it too
        self._driver: int | None = None  # the thread that drives
        self._due: deque[tuple[Callable[[Completion], None], Completion]] = deque()
        """Callbacks of finished operations: called between two steps, because they may submit and wait."""
        self._waiters = 0
        self._asleep = False
        self._thread: threading.Thread | None = None
        forget_in_children(self)

    def submit(
        self, operation: Operation | P2PMessage, *, timeout_s: float | None = None, background: bool
    ) -> Completion:
        """Begin an operation.

        Args:
            operation: every rank submits its operations in the same order.
            timeout_s: how long it may take from now, instead of the engine's timeout.
            background: whether it goes on while nothing waits for it; False if the caller waits at once.

        Raises:
            CollectiveError: the group is over; `collective-unsealed`, an operation that is not possible.
            ValueError: tensors that do not fit the operation.
        """
        with self.condition:
            self._check()
            work = self._begin(operation)
            allowed_s = self.timeout_s if timeout_s is None else timeout_s
            completion = self._unfinished[work] = Completion(self, work.queue, allowed_s, background)
            self._inbox.append(work)
            if background:
                self._background += 1
                self._start()
            if self._asleep:
                self._progress.wake()
        return completion

    def drive(self, completion: Completion, timeout_s: float | None) -> None:
        """Drive the group until `completion` is over."""
        if timeout_s is not None and (until := time.monotonic() + timeout_s) < completion.deadline:
            completion.timeout_s, completion.deadline = timeout_s, until
        if self._driver == threading.get_ident():
            self._loop(completion)  # a callback waits
        elif self._take_over(completion):
            try:
                self._loop(completion)
            finally:
                self._let_go()

    def close(self) -> None:
        """Send a goodbye and close the connections; unfinished operations fail for all that wait for them."""
        if not self._closed and self._unfinished:
            why = f"{self._called(self.rank)} closed the group before everything was done"
            self.abort(CollectiveError(Code.COLLECTIVE_ABORTED, why))
        if self._driver == threading.get_ident():
            self._closing = True  # a signal handler or a callback of the driving thread, which closes afterwards
            return
        self._take_over(None)
        try:
            self._close()
        finally:
            self._let_go()
        self._call_back()

    def abort(self, error: CollectiveError) -> None:
        """End the group on every rank because of `error`: at once, or before the driving thread's next step."""
        with self.condition:
            if self._over():
                return
            self._ending = self._ending or error
            if self._driver is None:
                self._driver = threading.get_ident()
            else:
                self._progress.wake()
                return
        try:
            self._fail(error)
        finally:
            self._let_go()
        self._call_back()

    def forget(self) -> None:
        """Disable a forked child's copy: the connections are the parent's."""
        self._failed = CollectiveError(
            Code.COLLECTIVE_ABORTED, "this process was forked from a rank of a sealed group and is not one of its ranks"
        )
        self._closed = True
        # The threads that held these in the parent do not exist here.
        self.condition = threading.Condition(threading.RLock())
        self._driver = self._thread = None
        for completion in self._unfinished.values():
            completion.error, completion.over = self._failed, True
        self._progress.abandon()

    def _close(self) -> None:
        if self._closed:
            return
        if self._ending is not None:
            self._fail(self._ending)
        try:
            if self._failed is None:
                self._progress.send_last(FrameKind.BYE)
        finally:
            self._closed = True
            self._mesh.traffic.forget()
            with self.condition:  # no thread wakes another now
                self._progress.close()
            self._communicator.wipe()
            self._communicator.close()

    def _begin(self, operation: Operation | P2PMessage) -> Submission:
        """Plan an operation, behind the work that the caller's thread has enqueued on the device of its tensors."""
        queue = self._communicator.queue(operation.tensors)
        if queue is not None:
            queue.begin()
        with within(queue):
            if isinstance(operation, P2PMessage):
                operation.begin(self._communicator)
                return operation
            exchange = operation.plan(self._communicator, self._sequence)
        self._sequence += 1
        return exchange

    def _check(self) -> None:
        if self._failed is not None:
            failed = self._failed
            raise CollectiveError(failed.code, f"the group is over: {failed.message}", rank=failed.rank)
        if self._closed:
            raise CollectiveError(Code.COLLECTIVE_ABORTED, "the group was closed")

    def _take_over(self, completion: Completion | None) -> bool:
        """Become the thread that drives; return False if `completion` was over before that."""
        with self.condition:
            self._waiters += 1
            try:
                while self._driver is not None:
                    if completion is not None and completion.over:
                        return False
                    if self._asleep:
                        self._progress.wake()
                    self.condition.wait(1.0)
                self._driver = threading.get_ident()
            finally:
                self._waiters -= 1
        return True

    def _let_go(self) -> None:
        """Drive no longer; a close or abort that was asked of the driving thread meanwhile is done first."""
        driving = True
        while driving:
            try:
                if self._closing:
                    self._close()
                elif self._ending is not None and not self._over():
                    self._fail(self._ending)
                    self._call_back()
            finally:
                with self.condition:
                    # Any other thread that closes or aborts from here on finds that none drives.
                    driving = not self._over() and (self._closing or self._ending is not None)
                    if not driving:
                        self._driver = None
                        self.condition.notify_all()

    def _start(self) -> None:
        """Have the background thread drive when no other does."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="glasshouse-collectives", daemon=True)
            self._thread.start()
        else:
            self.condition.notify_all()

    def _run(self) -> None:
        while True:
            with self.condition:
                while not self._over() and (self._driver is not None or self._waiters or not self._background):
                    self.condition.wait()
                if self._over():
                    return
                self._driver = threading.get_ident()
            try:
                # Whatever stops it has ended the group, and is the error of every completion.
                with suppress(BaseException):
                    self._loop(None)
            finally:
                self._let_go()

    def _over(self) -> bool:
        return self._closed or self._failed is not None

    def _loop(self, completion: Completion | None) -> None:
        """Drive until `completion` is over, or with None until nothing is left for the background."""
        while True:
            if self._due:
                self._call_back()
            if completion is None:
                if self._waiters or not self._background:
                    return
            elif completion.over:
                return
            try:
                if self._ending is not None:
                    raise self._ending
                # Tensors that were made in inference mode can be written to in no other.
                with torch.inference_mode():
                    self._advance(completion)
            except CollectiveError as error:
                self._fail(error)
            except BaseException as error:
                # An interrupt or a defect in the middle of a frame: the state of its stream is undefined.
                what = f"{self._called(self.rank)} was stopped by {type(error).__name__}"
                self._fail(CollectiveError(Code.COLLECTIVE_ABORTED, what))
                raise

    def _advance(self, completion: Completion | None) -> None:
        """Make progress until another rank or thread has to act: then wait for that once."""
        progress = self._progress
        while True:
            while self._inbox:
                progress.admit(self._inbox.popleft())
            if not progress.step():
                break
            if self._due or self._ending is not None or (self._waiters if completion is None else completion.over):
                return
        if not self._due and (completion is None or not completion.over):
            self._sleep()

    def _sleep(self) -> None:
        """Wait for a connection or a wakeup, no longer than to the next deadline."""
        now = time.monotonic()
        nearest = min((each.deadline for each in self._unfinished.values()), default=None)
        if nearest is not None and nearest <= now:
            work, late = next(each for each in self._unfinished.items() if each[1].deadline <= now)
            missing = self._progress.missing(work)
            nearest += _HEARSAY_S
            if missing or nearest <= now:
                raise failure.late(late.timeout_s, missing, self._progress.awaited(work), self._called)
        self._asleep = True
        try:
            yields = self._waiters and threading.current_thread() is self._thread
            if not (self._inbox or self._ending is not None or yields):
                self._progress.wait(None if nearest is None else nearest - now)
        finally:
            self._asleep = False

    def _done(self, work: Submission, source: int | None) -> None:
        with self.condition:
            completion = self._unfinished.pop(work)
            if completion.background:
                self._background -= 1
            completion.source = source
            completion.over = True
            self._due.extend((callback, completion) for callback in completion.callbacks)
            completion.callbacks = []
            if self._waiters:
                self.condition.notify_all()

    def _call_back(self) -> None:
        while self._due:
            callback, completion = self._due.popleft()
            callback(completion)

    def _fail(self, error: CollectiveError) -> None:
        """End the group: zero unfinished outputs, alert the others, drop the keys, and let every operation raise."""
        with self.condition:
            if self._failed is not None:
                return
            unfinished = list(self._unfinished.items())
            first = unfinished[0][0] if unfinished else None
            at = "" if first is None else f"{first.described()}: "
            self._failed = CollectiveError(error.code, f"{at}{error.message}", hint=error.hint, rank=error.rank)
            self._inbox.clear()
            self.condition.notify_all()
        try:
            for work, _ in unfinished:
                # A device that is out of order refuses this too: nothing can be read from it any more either.
                with suppress(Exception), torch.inference_mode(), within(work.queue):
                    work.zero()
            operation = first.sequence if isinstance(first, Exchange) else None
            self._progress.send_last(FrameKind.ALERT, failure.alert_of(error, self.rank, operation).encode())
        finally:
            self._mesh.traffic.forget()
            self._progress.end()
            self._communicator.wipe()
            for work, completion in unfinished:
                what = f"{work.described()}: {error.message}"
                completion.error = CollectiveError(error.code, what, hint=error.hint, rank=error.rank)
                self._done(work, None)
