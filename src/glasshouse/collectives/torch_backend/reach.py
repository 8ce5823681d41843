"""What a rank of a job is set to before its script runs: which groups are sealed, and how others are reached.

Imports nothing heavy: a script may still want to set what frameworks read when they are imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from glasshouse.collectives.transport.dial import Dialler

NAME = "sealed"  # the backend's name in torch.distributed
PARENT_VARIABLE = "GLASSHOUSE_SEALED_PARENT"
"""In the environment of processes that a rank of a sealed group starts: the process id of that rank."""

_dialler: Dialler | None = None
_all_sealed = False
_store: Callable[[], object] | None = None


def seal_all(every: bool = True) -> None:
    """Have every group of this process sealed, whichever backend is asked for (`in_job`); before torch is imported."""
    global _all_sealed
    _all_sealed = every


def all_sealed() -> bool:
    """Return what `seal_all` set."""
    return _all_sealed


def use_dialler(dialler: Dialler | None) -> None:
    """Reach the ranks of every later group of this process by a dialler; None for the network."""
    global _dialler
    _dialler = dialler


def dialler() -> Dialler | None:
    """Return the dialler of `use_dialler`."""
    return _dialler


def use_store(store: Callable[[], object] | None) -> None:
    """Have torch's rendezvous by environment or address end at this store; None for the network."""
    global _store
    _store = store


def store() -> Callable[[], object] | None:
    """Return the store of `use_store`."""
    return _store
