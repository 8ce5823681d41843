"""One thread that decides, and lets decisions that wait for each other share one commit.

Laws: decisions are made one after the other; none is answered before the transaction that holds it is committed, and
where that fails, every decision in it is answered as not made. A commit is shared only by decisions that were waiting
already: no decision waits for others to come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

from glasshouse.broker.store.database import Database, Shared

MOST_TOGETHER = 32
_PATIENCE = 8  # at most a ninth of the time goes to commits while there is a queue

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class GroupCommit(Executor):
    """An executor of one thread, whose calls share transactions of one database.

    While others wait for their turn, deciding goes on for a few times as long as the last commit took: so a fast disk
    hardly delays a decision, and a slow one is awaited once for several.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: SimpleQueue[_QueuedCall | None] = SimpleQueue()
        self._commit_s = 0.0
        self._thread = threading.Thread(target=self._work, name="decide")
        self._thread.start()

    def submit(
        self, fn: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Result]:
        """Call `fn` when its turn comes; the future is done once what it wrote is durable."""
        future: Future[Result] = Future()
        self._waiting.put(_QueuedCall(future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Finish every call that was submitted before, then end the thread."""
        self._waiting.put(None)
        if wait:
            self._thread.join()

    def _work(self) -> None:
        while (first := self._waiting.get()) is not None and self._together(first):
            pass

    def _together(self, first: _QueuedCall) -> bool:
        """Make `first` and others that wait, commit, and answer them all; return whether there is more to come."""
        call: _QueuedCall | None = first
        made: list[_QueuedCall] = []
        began_s = time.monotonic()
        try:
            with self._database.together() as shared:
                while call is not None:
                    call.make(shared)
                    made.append(call)
                    if len(made) == MOST_TOGETHER or time.monotonic() - began_s > _PATIENCE * self._commit_s:
                        break
                    try:
                        call = self._waiting.get_nowait()
                    except Empty:
                        break
                began_s = time.monotonic()
            self._commit_s = time.monotonic() - began_s
        except Exception as error:  # the commit failed: calls that wrote fail, calls that did not are answered
            for one in made:
                if one.wrote:
                    one.error = error
        for one in made:
            one.answer()
        return call is not None


@dataclass(slots=True)
class _QueuedCall:
    """A call, and the future that waits for it."""

    future: Future[Any]
    call: Callable[[], Any]
    result: Any = None
    error: BaseException | None = None
    wrote: bool = False

    def make(self, shared: Shared) -> None:
        before = shared.writes
        if not self.future.set_running_or_notify_cancel():
            return  # cancelled before it began
        try:
            self.result = self.call()
        except BaseException as error:  # raised where the future is awaited, as by every executor
            self.error = error
        self.wrote = shared.writes > before

    def answer(self) -> None:
        if self.error is not None:
            self.future.set_exception(self.error)
        elif not self.future.cancelled():
            self.future.set_result(self.result)
