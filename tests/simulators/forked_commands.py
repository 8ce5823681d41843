"""`glasshouse` as a process that was forked where its modules lay ready: a command without the half second of imports.

What it was given, printed and returned are those of `python -m glasshouse.cli`; only `/proc/PID/cmdline` is another's.
"""

from __future__ import annotations

import multiprocessing
import os
import pkgutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import glasshouse.cli
import glasshouse.jobs

__all__ = ["run"]

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        module.name
        for room in (glasshouse.cli, glasshouse.jobs)
        for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")
        if not module.name.endswith("__main__")
    ]
)


def run(
    arguments: tuple[str, ...], folder: Path, environment: Mapping[str, str], *, timeout_s: float
) -> tuple[int, str, str]:
    """Run a command to its end.

    Returns:
        its exit code, standard output and standard error.

    Raises:
        TimeoutError: it was ended, because it ran for longer than `timeout_s` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="glasshouse-tests-") as name:
        out, err = Path(name) / "out", Path(name) / "err"
        process = _FORKS.Process(target=_command, args=(arguments, folder, dict(environment), out, err))
        process.start()
        process.join(timeout_s)
        late = process.exitcode is None
        if late:
            process.terminate()
            process.join(timeout_s)
        if late or process.exitcode is None:
            raise TimeoutError(f"glasshouse {' '.join(arguments)}: {out.read_text()}{err.read_text()}")
        return process.exitcode, out.read_text(), err.read_text()


def _command(arguments: tuple[str, ...], folder: Path, environment: dict[str, str], out: Path, err: Path) -> None:
    for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, out, os.O_WRONLY), (2, err, os.O_WRONLY)):
        opened = os.open(path, flags | os.O_CREAT, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115 - its whole life long
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["glasshouse", *arguments]
    from glasshouse.cli import main

    main()
