"""What torch calls when it is imported (the `torch.backends` entry point): makes the name `sealed` known to it.

Laws: imports nothing heavy before a sealed group is asked for, and never raises: `import torch` would fail
with it. A process that never asks for a sealed group runs one comparison more for each group that it makes.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from glasshouse.collectives.torch_backend import reach

__all__ = ["register"]

_GUARD = "glasshouse.collectives.torch_backend.guard"
_RENDEZVOUS = "torch.distributed.rendezvous"  # a name that its package gives to a function


def register() -> None:
    """Make `sealed` known to torch.distributed, where torch has it."""
    # Whatever goes wrong here, the name stays unknown and init_process_group("sealed") says so.
    try:
        from torch import distributed

        if distributed.is_available():
            distributed.Backend.register_backend(reach.NAME, _create, extended_api=True, devices=["cpu", "cuda"])
            _watch(distributed.distributed_c10d)
            _lead(sys.modules[_RENDEZVOUS])
    except Exception:  # noqa: S110
        pass


def _create(options: Any, backend_options: Any) -> Any:
    """Make a group: what torch calls for `init_process_group("sealed")` and for `new_group`."""
    from glasshouse.collectives.torch_backend import backend

    return backend.create(options, backend_options)


def _watch(c10d: Any) -> None:
    """Have the guard asked before torch makes any group, where the group, the process or its parent's is a sealed one.

    A backend is given only its own part of "cpu:gloo,cuda:sealed", so it cannot see such a mixture itself.
    """
    make = c10d._new_process_group_helper
    if hasattr(make, "__wrapped__"):
        return

    @functools.wraps(make)
    def guarded(group_size: Any, group_rank: Any, ranks: Any, backend: Any, *rest: Any, **named: Any) -> Any:
        asked = reach.NAME in str(backend).lower() or reach.PARENT_VARIABLE in os.environ
        if asked or _GUARD in sys.modules or reach.store() is not None:
            from glasshouse.collectives.torch_backend import guard

            guard.check_backend(str(backend))
        return make(group_size, group_rank, ranks, backend, *rest, **named)

    c10d._new_process_group_helper = guarded


def _lead(rendezvous: Any) -> None:
    """Have torch's rendezvous end at the store of a rank that has no network, where this process is one."""
    make = rendezvous._create_c10d_store
    if hasattr(make, "__wrapped__"):
        return

    @functools.wraps(make)
    def led(*given: Any, **named: Any) -> Any:
        store = reach.store()
        return make(*given, **named) if store is None else store()

    rendezvous._create_c10d_store = led
