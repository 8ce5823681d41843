"""Bounds calls that have no time limit of their own, such as those to a store that need not be believed.

Law: the caller goes on in time, whatever the call does; a call that never returns keeps a daemon thread and nothing
else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from glasshouse.errors import Code, CollectiveError

__all__ = ["within"]

Answer = TypeVar("Answer")


def within(limit_s: float, call: Callable[[], Answer]) -> Answer:
    """Return what `call()` returns, if it does in time.

    Args:
        limit_s: how long to wait for it; with 0 or less it is not called.
        call: runs in a thread of its own.

    Raises:
        TimeoutError: it did not; whatever else `call` raises.
        CollectiveError: `collective-aborted`, this process can start no thread for it.
    """
    answers: list[Answer] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(call())
        except BaseException as error:  # raised again where it is waited for
            failures.append(error)

    if limit_s > 0:
        thread = threading.Thread(target=run, name="glasshouse-within", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            raise CollectiveError(Code.COLLECTIVE_ABORTED, "this process can start no more threads") from None
        thread.join(limit_s)
    if failures:
        raise failures[0]
    if not answers:
        raise TimeoutError("no answer in time")
    return answers[0]
