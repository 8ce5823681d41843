"""`script`: the owner's own training script, unmodified, in the in-memory workspace.

The inputs lie as plain files in the working directory; what the script writes into the output folder
leaves sealed at the end. Its standard output and error are the sealed log.
"""

from __future__ import annotations

import atexit
import importlib.util
import io
import os
import signal
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path

from glasshouse.errors import Code, RunError, UsageError
from glasshouse.task.handle import Task
from glasshouse.task.result import Result
from glasshouse.workloads import environment, failures
from glasshouse.workloads.params import ScriptParams

__all__ = ["check_requirements", "prepare", "run", "train", "warm"]


def warm() -> None:
    """Nothing: what a script imports is its own affair and part of its own time."""


def run(task: Task, params: ScriptParams, on_stop: Callable[[Callable[[], None]], None]) -> Result:
    """Lay the inputs out, run the script, and report what it said last.

    Raises:
        RunError: `script-failed`, `requirement-missing` or `out-of-memory`.
        UsageError: `file-missing` when the package has no such script.
    """
    prepare(task, params)
    return train(task, params, on_stop)


def prepare(task: Task, params: ScriptParams) -> None:
    """Lay the inputs out and say where they are; raises as `run` before the script runs."""
    if params.script not in task.inputs:
        raise UsageError(Code.FILE_MISSING, f"the package has no input named {params.script!r} to run")
    check_requirements(params.requirements)
    os.environ["GLASSHOUSE_INPUTS"] = str(task.input_dir)
    os.environ["GLASSHOUSE_OUTPUTS"] = str(task.output_dir)


def train(task: Task, params: ScriptParams, on_stop: Callable[[Callable[[], None]], None]) -> Result:
    """Run the script in this process, over inputs that are laid out; raises as `run`."""
    folder = task.input_dir
    _determinism(params)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # In blocks, as Python writes into a pipe, what was printed would come after the error that it led to.
        sys.stdout.reconfigure(line_buffering=True)
    interrupt = _Interrupt(task)
    on_stop(interrupt)
    try:
        with interrupt:
            _execute(folder / params.script, params.arguments, folder)
    except KeyboardInterrupt:
        if not interrupt.sent:
            raise
    done, unit, first, final, elapsed_us = task.last_report
    return Result(
        unit=unit,
        done=done,
        elapsed_us=elapsed_us,
        stop_reason="stopped" if interrupt.asked else "finished",
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
        # The lock: a signal that is under way arrives before this returns, and not in the middle of what follows.
        with self._lock:
            self._armed = False

    def __call__(self) -> None:
        with self._lock:
            self.asked = True
            if not self._armed or self._task.asks_to_stop:
                return
            self.sent = True
            if threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            # A real signal, so that a script asleep in a system call wakes up too.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _execute(path: Path, arguments: tuple[str, ...], folder: Path) -> None:
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = module
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    os.chdir(folder)
    source = path.read_bytes()
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - it is the job
        _settle()
    except SystemExit as end:
        _ended(end.code)
        _settle()
    except Exception as error:
        # The first frame is this one; the script's own begin behind it.
        raise failures.of_script(error, error.__traceback__ and error.__traceback__.tb_next) from None
    finally:
        sys.stdout.flush()
        # What Glasshouse imports from here on is not to be found in the owner's folder.
        sys.path[:] = [entry for entry in sys.path if entry != str(path.parent)]


def _ended(code: object) -> None:
    """Take the words and the number with which a script ends itself as the interpreter would."""
    if code in (None, 0):
        return
    sys.stdout.flush()
    if isinstance(code, int):
        raise RunError(Code.SCRIPT_FAILED, f"the script ended itself with exit status {code}")
    sys.stderr.write(f"{code}\n")
    raise RunError(Code.SCRIPT_FAILED, "the script ended itself with the words above")


def _settle() -> None:
    """End a script as the interpreter would: its threads first, then what it registered for the end."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()


def check_requirements(requirements: tuple[str, ...]) -> None:
    """Refuse to start where a distribution is missing or has another version.

    Raises:
        RunError: `requirement-missing`, naming each.
    """
    lacking = [text for requirement in requirements if (text := _lacking(requirement.strip()))]
    if lacking:
        raise RunError(
            Code.REQUIREMENT_MISSING,
            "this machine lacks what the script requires: " + "; ".join(lacking),
            hint="choose an image that has it, or take it out of requirements in [params]",
        )


def _lacking(requirement: str) -> str | None:
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return f"{requirement} (cannot be checked without the distribution 'packaging')"
    import importlib.metadata  # 65 ms of e-mail and calendar, for those who list requirements

    wanted = Requirement(requirement)
    try:
        version = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{requirement} is not installed"
    if not wanted.specifier.contains(version, prereleases=True):
        return f"{requirement} is wanted and {version} is installed"
    return None


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
        from glasshouse.workloads import determinism

        determinism.fix(params.seed, threads=threads)
