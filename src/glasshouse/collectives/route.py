"""How ranks are reached that the network does not lead to: said by what starts a rank, before its script runs.

Imports nothing heavy: a script may still want to set what frameworks read when they are imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from glasshouse.collectives.dial import Dialler

__all__ = ["chosen", "dial_through", "meet_at", "meeting"]

_chosen: Dialler | None = None
_store: Callable[[], object] | None = None


def dial_through(dialler: Dialler | None) -> None:
    """Have every group of this process that is made from now on reach its ranks so; None for the network."""
    global _chosen
    _chosen = dialler


def chosen() -> Dialler | None:
    """Return what `dial_through` was told last."""
    return _chosen


def meet_at(store: Callable[[], object] | None) -> None:
    """Have torch's rendezvous by environment or address end at this store; None for the network.

    Where there is one, this process has no network, and no backend but `sealed` does without.
    """
    global _store
    _store = store


def meeting() -> Callable[[], object] | None:
    """Return what `meet_at` was told last."""
    return _store
