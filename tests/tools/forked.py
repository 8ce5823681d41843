"""Runs a piece of a test in a child process: hardening cannot be taken back, and must not spread."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_child(action: Callable[[], T], *, limit_s: float = 60.0, user: int | None = None, alone: bool = False) -> T:
    """Return what `action` returns, or raise what it raises, run in a forked child.

    Args:
        action: what to do; its result must be picklable.
        limit_s: the child is killed after that.
        user: run as this user and group, without other groups.
        alone: close what other tests have left open, for a test of the limit of open files.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other tests may have left threads here
        pid = os.fork()
    if pid == 0:
        if alone:
            keep_only(writer)
        _be_child(action, reader, writer, user)
    os.close(writer)
    alarm = threading.Timer(limit_s, os.killpg, (pid, signal.SIGKILL))
    alarm.start()
    try:
        with os.fdopen(reader, "rb") as stream:
            answer = stream.read()
    finally:
        status = os.waitpid(pid, 0)[1]
        alarm.cancel()
        alarm.join()
    if not answer:
        raise ChildDiedError(os.waitstatus_to_exitcode(status))
    done, value = pickle.loads(answer)
    if not done:
        raise AssertionError(f"in the child:\n{value}")
    return value


class ChildDiedError(Exception):
    """The child ended without an answer; `code` is its exit code, negative for a signal."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the child ended with {code}")
        self.code = code


def keep_only(descriptor: int) -> None:
    """Close all that is open but the standard streams and one descriptor."""
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))


def _be_child(action: Callable[[], T], reader: int, writer: int, user: int | None) -> None:
    try:
        os.setsid()  # so that what it leaves behind can be ended with it
        with contextlib.suppress(OSError):
            os.close(reader)
        if user is not None:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        answer = pickle.dumps((True, action()))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    try:
        with os.fdopen(writer, "wb") as stream:
            stream.write(answer)
    finally:
        os._exit(0)
