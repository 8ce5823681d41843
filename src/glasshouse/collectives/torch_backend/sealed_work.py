"""The work that torch is given for a collective under way, and the futures made of it.

Laws: every wait for a work, or for a future made of it, in Python or in C++, ends with the error of a failed operation
and never a result; nothing is finished before results that were copied aside have reached their tensors; a failed work
leaves zeros in the tensors that it was to fill.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

from glasshouse.collectives.engine.completion import Completion
from glasshouse.collectives.torch_backend.torch_hooks import Work, eager
from glasshouse.errors import CollectiveError

_CALLBACK_THREADS = 32  # callbacks of scripts that may run, and wait for further collectives, at the same time


class Joined:
    """The completion of several operations at once, or of none; fails with the first error among them."""

    def __init__(self, parts: Sequence[Completion | Joined]) -> None:
        self._parts = tuple(parts)
        self._lock = threading.Lock()

    @property
    def error(self) -> CollectiveError | None:
        """Why the first of them failed, if one did."""
        return next((part.error for part in self._parts if part.error is not None), None)

    def done(self) -> bool:
        """Return whether all are over."""
        return all(part.done() for part in self._parts)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for all, as `Completion.wait` does for one."""
        for part in self._parts:
            part.wait(timeout_s)

    def add_done_callback(self, fn: Callable[[Any], None]) -> None:
        """Call `fn` when all are over, from the driving thread; at once if they are."""
        left = len(self._parts)
        if not left:
            fn(self)
            return

        def one_less(_: object) -> None:
            nonlocal left
            with self._lock:
                left -= 1
                last = left == 0
            if last:
                fn(self)

        for part in self._parts:
            part.add_done_callback(one_less)


@eager
class SealedWork(Work):  # type: ignore[misc]  # torch is not typed
    """A collective under way.

    Args:
        outputs: the tensors that it fills, as the caller gave them; the value of its futures.
        settle: called once when it is done, with whether it succeeded, before any waiter returns: moves results from
            buffers that were made for it into the caller's tensors, or zeroes those.
    """

    def __init__(
        self, completion: Completion | Joined, outputs: Sequence[Any], settle: Callable[[bool], None] | None = None
    ) -> None:
        super().__init__()
        self._completion = completion
        self._outputs = list(outputs)
        self._settle = settle
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the operation is done; the waiting thread does its work. Zero is the operation's own timeout.

        Raises:
            CollectiveError: it failed, or was not done in time.
        """
        try:
            self._completion.wait(timeout.total_seconds() or None)
        finally:
            if self._completion.done():
                self._arrive()
        error = self._completion.error
        if error is not None:
            raise error
        return True

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        return self._settled()

    def is_success(self) -> bool:
        return self._settled() and self._completion.error is None

    def exception(self) -> CollectiveError | None:
        return self._completion.error

    def result(self) -> list[Any]:
        """Return the tensors that were filled; raise as `wait` does."""
        self.wait()
        return list(self._outputs)

    def source_rank(self) -> int:
        """Return the rank in the group that a receive from any source was served by, or -1."""
        source = getattr(self._completion, "source", None)
        return -1 if source is None else int(source)

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a torch future of the filled tensors, which raises where the operation fails, in Python and in C++.

        `set_exception` stores an exception as an ordinary value that only Python unwraps: a wait in C++, such as that
        of DistributedDataParallel's reducer, would go on with whatever lies in the bucket. An exception *inside a
        callback* is an error for C++ too, and so the future's value comes from one that raises. It is completed in a
        thread of its own kind, never in the one that drives the connections: the callbacks that communication hooks
        chain to it run there too, and may wait for further collectives. Waiting in C++ runs no Python: the operation
        must be one that the background drives, as every asynchronous one is.
        """
        first = torch.futures.Future(devices=_devices(self._outputs))
        chained = first.then(lambda _: self.result())
        if self._settled():
            first.set_result(None)
        else:
            self._completion.add_done_callback(lambda _: _complete(first))
        return chained

    def _settled(self) -> bool:
        """Return whether it is done; if so, its results are where they belong."""
        if not self._completion.done():
            return False
        with suppress(CollectiveError):
            self._completion.wait()  # it is done, but on a GPU this thread's stream is not behind it yet
        self._arrive()
        return True

    def _arrive(self) -> None:
        """Move results that were made aside to where they belong, once."""
        if self._settle is not None:
            with self._lock:
                if self._settle is not None:
                    self._settle(self._completion.error is None)
                    self._settle = None  # only now: a thread that sees it gone goes on with the results


def _complete(future: Any) -> None:
    _callbacks().submit(future.set_result, None)


@functools.cache
def _callbacks() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_CALLBACK_THREADS, thread_name_prefix="sealed-callbacks")


def _devices(values: Sequence[Any]) -> list[torch.device]:
    """Return the accelerators that tensors in (lists of) `values` lie on: a future must name those of its value."""
    found: dict[torch.device, None] = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.device.type != "cpu":
                found[value.device] = None
        else:
            found.update(dict.fromkeys(_devices(value)))
    return list(found)
