"""The agent: one protected run on a rented machine. Its life is `run.lifecycle`.

Laws: nothing secret is in the arguments or the environment; no thread exists before the last fork; standard error gets
fixed words and codes, never the text of an error; whatever happens from the first line on goes through `run.zeroize`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import BinaryIO

from glasshouse.errors import Code, GlasshouseError
from glasshouse.runtime.agent_options import parse
from glasshouse.runtime.confine.shown_search import Look
from glasshouse.runtime.keys.outdir import OutDir
from glasshouse.runtime.loop import Loop
from glasshouse.runtime.run.start_processes import start_processes
from glasshouse.wire.canonical import encode


def main(argv: Sequence[str], stdin: BinaryIO, *, custodian: str | None = None, look: Look | None = None) -> int:
    """Run the job of the launch file on `stdin`; return the exit code.

    Args:
        custodian: the program that is executed as custodian, for tests that must have its key; None for our own.
        look: the search beneath what the worker is shown, if one was started.
    """
    try:
        options = parse(argv)
        out = OutDir(options.out)
    except GlasshouseError as error:
        _print_code(error.code, error.hint)
        return error.exit_code
    loop = Loop()
    processes = start_processes(options, loop, custodian, look)
    # The worker is on its way: what is imported from here on costs no time of its own.
    from glasshouse.runtime.run.lifecycle import run_lifecycle

    ending = run_lifecycle(options, loop, out, processes, stdin)
    if ending.code is not None:
        _print_code(ending.code, ending.hint)
    sys.stdout.write(
        encode({"code": ending.code and ending.code.value, "outcome": ending.outcome.value}).decode() + "\n"
    )
    sys.stdout.flush()
    return ending.exit_code


def _print_code(code: Code, hint: str) -> None:
    sys.stderr.write(f"glasshouse runtime: {code.value}\n{hint}\n" if hint else f"glasshouse runtime: {code.value}\n")
