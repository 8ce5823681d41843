"""Runs a script as ``python PATH`` or ``python -m MODULE`` does, from its first line to the end of the interpreter.

The process itself goes on: what the script wrote has yet to be sealed. Law: what ends a script under ``python``, and in
which order (its threads and pools, what it registered with `atexit`, what it left open), ends it here too.
Source: CPython's ``Py_FinalizeEx`` and ``finalize_modules`` (Python/pylifecycle.c).
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from glasshouse.errors import Code, RunError
from glasshouse.workloads.process import failures


def execute(
    folder: Path,
    *,
    script: str | None,
    module: str | None,
    arguments: tuple[str, ...],
    expected: Callable[[BaseException], bool],
) -> None:
    """Run a script below `folder`, the working directory, or else a module, to the end of its interpreter.

    Args:
        expected: whether an exception that ends the script is no failure of it, and is raised as it is.

    Raises:
        GlasshouseError: for the failure of the script, after everything that it left to its end was done.
    """
    path = None if script is None else folder / script
    searched = str(folder if path is None else path.parent)
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    sys.argv = ["-m", *arguments]
    sys.path.insert(0, searched)
    os.chdir(folder)
    failure: BaseException | None = None
    try:
        exec(_code(main, path, str(module)), main.__dict__)  # noqa: S102 - it is the job
    except SystemExit as end:
        failure = _ended(end.code)  # says its words, if it has any
        if failure is not None and expected(end):
            failure = end
    except BaseException as error:
        failure = error if expected(error) else failures.of_script(error, _own(error.__traceback__))
        error.__traceback__ = None  # it holds the variables of every function that the failure went through
    try:
        _finalize(main)
    finally:
        # What Glasshouse imports from here on is not to be found in the owner's folder.
        sys.path[:] = [entry for entry in sys.path if entry != searched]
    if failure is not None:
        raise failure from None


def _code(main: types.ModuleType, path: Path | None, name: str) -> types.CodeType:
    """Return what is executed in `main`, with the attributes that ``python`` sets there; fails as the script does."""
    if path is not None:
        main.__file__ = sys.argv[0] = str(path)
        return compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    spec = importlib.util.find_spec(name)  # imports the packages that it lies in
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = None if spec is None or spec.loader is None else spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
    if spec is None or code is None:
        raise ModuleNotFoundError(f"No module named {name!r}, or it cannot be run", name=name)
    main.__spec__, main.__file__, main.__package__ = spec, spec.origin, spec.parent
    sys.argv[0] = str(spec.origin)
    return cast(types.CodeType, code)


def _own(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback from the script's own first frame on."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _ended(code: object) -> RunError | None:
    """Return the failure of a script that ends itself with this status, as the interpreter would."""
    if code in (None, 0):
        return None
    if isinstance(code, int):
        return RunError(Code.SCRIPT_FAILED, f"the script ended itself with exit status {code}")
    sys.stdout.flush()
    sys.stderr.write(f"{code}\n")
    return RunError(Code.SCRIPT_FAILED, "the script ended itself with the words above")


def _finalize(module: types.ModuleType) -> None:
    """End a script's interpreter: pools and threads, exit handlers, standard streams, and what it left open."""
    try:
        # Pools register here what makes their threads end; joined without it, they would be waited for for ever.
        threading._shutdown()  # type: ignore[attr-defined]  # not in the type stubs
    except BaseException as error:
        failures.ignored(error, "the threads of the script")
    atexit._run_exitfuncs()  # reports what fails in there, and goes on
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException as error:
            failures.ignored(error, "a standard stream of the script")
    # A stream that the script put there may be written in the script, of which nothing is left in a moment.
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    # Daemon threads do not see the end of an interpreter, and so fail at nothing that it takes away.
    threading.excepthook = lambda _failure: None
    # The script's variables, private ones first: a file that was left open is written to its end.
    for private in (True, False):
        for name in list(module.__dict__):
            if (name.startswith("_") and not name.startswith("__")) is private and name != "__builtins__":
                module.__dict__[name] = None
    gc.collect()


@contextmanager
def leaving(conclude: Callable[[int], int]) -> Iterator[None]:
    """Have `os._exit` in this process, and no fork of it, `conclude` the job first, which returns the exit status."""
    real, own, once = os._exit, os.getpid(), threading.Lock()

    def leave(status: int) -> None:
        if os.getpid() == own:
            once.acquire()  # for good: of two threads that leave, and of the script's own end, one is the end
            status = conclude(status)
        real(status)

    os._exit = leave  # type: ignore[assignment]
    try:
        yield
    finally:
        with once:
            os._exit = real
