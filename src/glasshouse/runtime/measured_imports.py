"""Lets the agent import the standard library and the packages that are measured by content, and nothing else.

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
