"""`script`: the owner's own training script, unmodified, in the in-memory workspace.

The inputs lie as plain files in the working directory; what the script writes into the output folder
leaves sealed at the end. Its standard output and error are the sealed log.
"""

from __future__ import annotations

import importlib.util
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from glasshouse.errors import Code, RunError, UsageError
from glasshouse.task.handle import Task
from glasshouse.task.result import Result
from glasshouse.workloads.builtin import interpreter
from glasshouse.workloads.params import ScriptParams
from glasshouse.workloads.process import environment
from glasshouse.workloads.requirements import lacking

__all__ = ["Conclude", "Script", "check_requirements", "prepare", "train"]

# A run that is stopped is given five seconds to its end; what is written until then comes back.
_ENDING_S = 2.5

Conclude: TypeAlias = Callable[[Task, Result | RunError], int]
"""Reports the end of a script that ends its process itself, and returns the status to end it with."""


class Script:
    """The workload `script` in one process.

    Args:
        conclude: called when the script ends this process.
    """

    def __init__(self, conclude: Conclude) -> None:
        self._conclude = conclude

    def warm(self) -> None:
        """Nothing: what a script imports is its own affair and part of its own time."""

    def run(self, task: Task, params: ScriptParams, on_stop: Callable[[Callable[[], None]], None]) -> Result:
        """Lay the inputs out, run the script, and report what it said last.

        Raises:
            RunError: `script-failed`, `requirement-missing` or `out-of-memory`.
            UsageError: `file-missing` when the package has no such script.
        """
        prepare(task, params)
        return train(task, params, on_stop, self._conclude)


def prepare(task: Task, params: ScriptParams) -> None:
    """Lay the inputs out and say where they are; raises as `run` before the script runs."""
    if params.script is not None and params.script not in task.inputs:
        raise UsageError(Code.FILE_MISSING, f"the package has no input named {params.script!r} to run")
    check_requirements(params.requirements)
    os.environ.update(params.env)
    os.environ["GLASSHOUSE_INPUTS"] = str(task.input_dir)
    os.environ["GLASSHOUSE_OUTPUTS"] = str(task.output_dir)


def train(
    task: Task, params: ScriptParams, on_stop: Callable[[Callable[[], None]], None], conclude: Conclude
) -> Result:
    """Run the script in this process, over inputs that are laid out; raises as `Script.run`."""
    folder = task.input_dir
    _determinism(params)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # In blocks, as Python writes into a pipe, what was printed would come after the error that it led to.
        sys.stdout.reconfigure(line_buffering=True)
    interrupt = _Interrupt(task)
    on_stop(interrupt)

    def left(status: int) -> int:
        interrupt.disarm()
        status &= 0xFF
        failure = RunError(Code.SCRIPT_FAILED, f"the script ended its process with exit status {status}")
        return conclude(task, failure if status else _result(task, interrupt))

    def stopped(error: BaseException) -> bool:
        return isinstance(error, KeyboardInterrupt) and interrupt.sent

    try:
        with interrupt, interpreter.leaving(left):
            interpreter.execute(_program(folder, params), params.arguments, folder, expected=stopped)
    except KeyboardInterrupt:
        if not interrupt.sent:
            raise
    return _result(task, interrupt)


def _program(folder: Path, params: ScriptParams) -> interpreter.Program:
    if params.script is not None:
        return interpreter.File(folder / params.script)
    assert params.module is not None  # noqa: S101 - one of the two is there
    return interpreter.Module(params.module, folder)


def _result(task: Task, interrupt: _Interrupt) -> Result:
    done, unit, first, final, elapsed_us = task.last_report
    return Result(
        unit=unit,
        done=done,
        elapsed_us=elapsed_us,
        stop_reason=task.stop_reason if interrupt.asked else "finished",
        loss_first=first,
        loss_final=final,
    )


class _Interrupt:
    """Stops a script as Ctrl-C would, unless it asks `should_stop` itself; armed only while the script runs."""

    def __init__(self, task: Task) -> None:
        self.asked = False
        self.sent = False
        self._armed = False
        self._task = task
        self._lock = threading.RLock()  # the raw leg calls from a handler in the main thread

    def __enter__(self) -> None:
        if not callable(signal.getsignal(signal.SIGINT)):
            signal.signal(signal.SIGINT, signal.default_int_handler)
        with self._lock:
            if self.asked:  # while the inputs were laid out
                self.sent = True
                raise KeyboardInterrupt
            self._armed = True

    def __exit__(self, *_: object) -> None:
        self.disarm()

    def disarm(self) -> None:
        """Interrupt no more."""
        # The lock: a signal that is under way arrives before this returns, and not in the middle of what follows.
        with self._lock:
            self._armed = False

    def __call__(self) -> None:
        with self._lock:
            self.asked = True
            if not self._armed or self._task.asks_to_stop:
                return
            self.sent = True
            threading.Thread(target=self._insist, name="glasshouse-stop", daemon=True).start()
            if threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            self._signal()

    def _insist(self) -> None:
        """Interrupt once more, as a second Ctrl-C does: a script waits at its end for its pools and threads."""
        time.sleep(_ENDING_S)
        with self._lock:
            if self._armed:
                self._signal()

    def _signal(self) -> None:
        # A real signal, so that a script asleep in a system call wakes up too.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def check_requirements(requirements: tuple[str, ...]) -> None:
    """Refuse to start where a distribution is missing or has another version.

    Raises:
        RunError: `requirement-missing`, naming each.
    """
    missing = lacking(requirements)
    if missing:
        raise RunError(
            Code.REQUIREMENT_MISSING,
            "this machine lacks what the script requires: " + "; ".join(missing),
            hint="choose an image that has it, or take it out of requirements in [params]",
        )


def _determinism(params: ScriptParams) -> None:
    """Seed what an unmodified script uses: the standard library, NumPy and PyTorch, where installed."""
    threads = params.threads or (1 if params.deterministic else None)
    if threads is not None:
        environment.fix_threads(threads)
    if not params.deterministic:
        return
    import random

    random.seed(params.seed)
    if importlib.util.find_spec("numpy"):
        import numpy

        numpy.random.seed(params.seed)
    if importlib.util.find_spec("torch"):
        from glasshouse.workloads.builtin import compute

        compute.fix(params.seed, threads=threads)
