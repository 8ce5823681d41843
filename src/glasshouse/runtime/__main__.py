"""``python -I -B -X pycache_prefix=DIR -m glasshouse.runtime --package FILE --out DIR``: the agent, one protected run.

Laws: nothing secret is in the arguments or the environment; no thread exists before the last fork; standard error gets
fixed words and codes, never the text of an error; whatever happens from the first line on goes through `run.zeroize`;
nothing is imported but the standard library and the packages that are measured by content.

The standard library asks for modules that it may not have (`copy` for `org.python.core`), and what lies in a site
directory under such a name would run in the agent, unmeasured. Processes that are forked inherit this; what was
imported before, as start-up hooks are, stays.
Source: docs/adr/0005-what-is-measured.md, 0028; the same packages as in `workloads.process.bytecode`.
"""

# pathlib costs 30 ms at every start.
# ruff: noqa: PTH118, PTH119, PTH120
from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import FrozenImporter, ModuleSpec, PathFinder
from types import ModuleType

TYPE_CHECKING = False  # `typing` costs 40 ms uncompiled, and comes with what is imported after the look has begun
if TYPE_CHECKING:
    from typing import BinaryIO

    from glasshouse.errors import Code
    from glasshouse.runtime.confine.shown_search import Look

MEASURED = frozenset({"_cffi_backend", "blake3", "cryptography", "glasshouse"})


class _MeasuredOnly:
    """A finder in front of all others: what it does not leave to them comes from the standard library or not at all."""

    def __init__(self) -> None:
        library = os.path.dirname(os.__file__)
        archive = os.path.join(os.path.dirname(library), os.path.basename(library).replace(".", "") + ".zip")
        self._places = [archive, library, os.path.join(library, "lib-dynload")]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None or name in MEASURED or name in sys.builtin_module_names:
            return None  # of a package that was imported already, or for the other finders
        found = FrozenImporter.find_spec(name) or PathFinder.find_spec(name, self._places, target)
        if found is None or found.loader is None:  # a folder without code is no module
            raise ModuleNotFoundError(f"{name} is no module of the runtime's", name=name)
        return found


def allow_measured_only() -> None:
    """Import nothing else into this process from now on; to be called before anything that can be imported later."""
    sys.meta_path.insert(0, _MeasuredOnly())


def main(argv: Sequence[str], stdin: BinaryIO, *, custodian: str | None = None, look: Look | None = None) -> int:
    """Run the job of the launch file on `stdin`; return the exit code.

    Args:
        custodian: the program that is executed as custodian, for tests that must have its key; None for our own.
        look: the search beneath what the worker is shown, if one was started.
    """
    from glasshouse.errors import ExitCode, GlasshouseError
    from glasshouse.runtime.keys.outdir import OutDir
    from glasshouse.runtime.loop import Loop
    from glasshouse.runtime.run.start_processes import parse, start_processes

    try:
        options = parse(argv)
        out = OutDir(options.out)
    except GlasshouseError as error:
        _print_code(error.code, error.hint)
        return error.exit_code
    loop = Loop()
    processes = start_processes(options, loop, custodian, look)
    # The worker is on its way: what is imported from here on costs no time of its own.
    from glasshouse.runtime.run.interrupts import install_interrupts, true_cause
    from glasshouse.runtime.run.lifecycle import live
    from glasshouse.runtime.run.run_state import Ending, Run
    from glasshouse.runtime.run.zeroize import end_run
    from glasshouse.wire.canonical import encode
    from glasshouse.wire.states import Outcome

    run, ending = Run.begun(options, loop, out, processes), Ending(outcome=Outcome.COMPLETED)
    try:
        install_interrupts(run)
        live(run, stdin)
    except Exception as error:
        ending = Ending.of(true_cause(run, error))
    began = run.identity is not None  # without a launch there is no receipt
    ending = end_run(run, ending)
    if ending.code is not None:
        _print_code(ending.code, ending.hint)
    sys.stdout.write(
        encode({"code": ending.code and ending.code.value, "outcome": ending.outcome.value}).decode() + "\n"
    )
    sys.stdout.flush()
    return ending.exit_code if began else ExitCode.USAGE


def _print_code(code: Code, hint: str) -> None:
    sys.stderr.write(f"glasshouse runtime: {code.value}\n{hint}\n" if hint else f"glasshouse runtime: {code.value}\n")


if __name__ == "__main__":
    allow_measured_only()
    from glasshouse.runtime.confine.shown_search import Look
    from glasshouse.runtime.worker.shown_paths import default_read_paths

    try:
        # First of all: it takes about as long as this process takes to import the rest, and another core.
        look: Look | None = Look.start(default_read_paths())
    except OSError:
        look = None  # the sandbox begins one, or refuses in words of ours
    sys.exit(main(sys.argv[1:], sys.stdin.buffer, look=look))
