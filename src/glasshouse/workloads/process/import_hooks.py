"""Calls back when a module has been executed, without importing it: costs nothing where it is never imported.

Law: the module's spec and loader are those that Python finds by itself; nothing of ours stays on them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class ImportHooks:
    """A finder that is first on `sys.meta_path` while it is entered.

    Args:
        actions: what is done with a module, by its name: at once where it is imported already, after its import, and
            again after each `importlib.reload`, which empties what an action has put into the module.
    """

    def __init__(self, actions: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._actions = actions
        self._within: set[str] = set()

    def __enter__(self) -> None:
        sys.meta_path.insert(0, self)
        for name in self._actions.keys() & sys.modules.keys():
            self._actions[name](sys.modules[name])

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ValueError):  # taken out by the script
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the other finders find, with a loader that calls back once."""
        if name not in self._actions or name in self._within:  # within: another finder that delegates asked again
            return None
        self._within.add(name)
        try:
            for finder in list(sys.meta_path):
                find = None if finder is self else getattr(finder, "find_spec", None)
                if find is not None and (spec := find(name, path, target)) is not None:
                    _call_back(spec.loader, name, self._actions[name])
                    return spec  # type: ignore[no-any-return]
            return None
        finally:
            self._within.discard(name)


def _call_back(loader: Any, name: str, action: Callable[[ModuleType], None]) -> None:
    """Have a loader call `action` after the next module of that name that it executes."""

    def exec_module(module: ModuleType) -> None:
        with contextlib.suppress(AttributeError):
            del loader.exec_module
        loader.exec_module(module)
        if module.__name__ == name:  # a loader of several modules, as of an archive
            action(module)

    with contextlib.suppress(AttributeError):  # a loader that takes no attributes: no call
        loader.exec_module = exec_module
