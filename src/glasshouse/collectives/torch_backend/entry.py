"""The `torch.backends` entry point, which torch calls when it is imported: registers the name `sealed`.

Laws: imports nothing heavy before a sealed group is asked for. Raises in the ranks of a job alone, whose groups would
not be sealed without it: `import torch` fails with it. A process that never asks for a sealed group runs one comparison
more for each group that it makes.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from glasshouse.collectives.torch_backend import reach

_GUARD = "glasshouse.collectives.torch_backend.guard"


def register() -> None:
    """Register `sealed` with torch.distributed, where torch has it."""
    # Where this fails, the name stays unknown, and init_process_group("sealed") raises for it.
    try:
        from torch import distributed

        if distributed.is_available():
            from glasshouse.collectives.torch_backend import torch_hooks

            distributed.Backend.register_backend(reach.NAME, _create, extended_api=True, devices=["cpu", "cuda"])
            torch_hooks.before_groups(_choose)
            torch_hooks.instead_of_rendezvous(reach.store)
            torch_hooks.instead_of_monitored_barrier(_monitored_barrier)
            if reach.all_sealed():
                from glasshouse.collectives.torch_backend import in_job

                in_job.install()
    except Exception:
        if reach.all_sealed():
            raise


def _create(options: Any, backend_options: Any) -> Any:
    """Make a group: called by torch for `init_process_group("sealed")` and for `new_group`."""
    from glasshouse.collectives.torch_backend import process_group

    return process_group.create(options, backend_options)


def _choose(backend: str, options: Any) -> tuple[str, Any]:
    """Check a group that torch is to make, where it, the process or the process's parent is a sealed one.

    A backend is given only its own part of "cpu:gloo,cuda:sealed", so it cannot see such a mixture itself.
    """
    if reach.all_sealed():
        from glasshouse.collectives.torch_backend import in_job

        backend, options = in_job.choose(backend, options)
    if reach.NAME in backend.lower() or reach.PARENT_VARIABLE in os.environ or _GUARD in sys.modules:
        from glasshouse.collectives.torch_backend import guard

        guard.check_backend(backend)
    return backend, options


def _monitored_barrier(group: Any, timeout: Any, wait_all_ranks: bool) -> bool:
    """Wait for every rank of a sealed group; return whether it is one."""
    if _GUARD not in sys.modules or group not in sys.modules[_GUARD].groups():
        return False
    group.monitored_barrier(timeout, wait_all_ranks)
    return True
