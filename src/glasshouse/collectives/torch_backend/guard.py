"""What may not be beside a sealed group: groups of another backend, RPC, and memory that GPUs share.

Laws: as long as a process has a sealed group, torch makes no other way for tensors to leave it, in whichever order
they are asked for; init_process_group and new_group make no other group in a process that inherits its environment
either, to which torch's own checkpointing hands tensors. When the last sealed group is gone, torch is as it was. This
keeps a script from sending plaintext by mistake or by a default; against one that opens sockets of its own there is the
sandbox.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from glasshouse.collectives.torch_backend import reach
from glasshouse.collectives.torch_backend.dispatch import OperatorOverrides
from glasshouse.collectives.torch_backend.reach import NAME, PARENT_VARIABLE
from glasshouse.errors import Code, CollectiveError

__all__ = ["add_group", "check_backend", "check_unsealed", "groups", "remove_group"]

_HINT = "destroy the sealed group first, or use the backend `sealed` for all of them"

_groups: set[Any] = set()
_overrides: OperatorOverrides | None = None
_guarded = False


def check_backend(backend: str) -> None:
    """Check that a group of `backend` (torch's string) may be made now.

    Raises:
        CollectiveError: `collective-unsealed`, it mixes backends, or another than this process's groups have.
    """
    names = {part.strip().rsplit(":", 1)[-1] for part in backend.lower().split(",")}
    if NAME in names:
        others = sorted(names - {NAME})
        if others:
            raise _refusal(f"a group is sealed for all of its devices or for none, not {NAME} and {', '.join(others)}")
        replaced = getattr(distributed_c10d, "_use_torchcomms_enabled", None)
        if replaced is not None and replaced():
            raise _refusal("torchcomms replaces every backend of torch.distributed; a sealed group cannot use it")
    elif reach.store() is not None:
        raise CollectiveError(
            Code.COLLECTIVE_UNSEALED,
            f"a group of the backend {backend} needs a network, and ranks have none here: the backend is `{NAME}`",
            hint='torch.distributed.init_process_group("sealed")',
        )
    elif _groups:
        raise _refusal(f"a group of the backend {backend} would not be sealed, and this process's groups are")
    elif PARENT_VARIABLE in os.environ:
        raise CollectiveError(
            Code.COLLECTIVE_UNSEALED,
            f"a group of the backend {backend} would not be sealed, and those of the process that started this one are",
            hint="asynchronous checkpoints can be written by a thread instead (AsyncCheckpointerType.THREAD); if"
            f" everybody may see what this process sends, start it without {PARENT_VARIABLE} in its environment",
        )


def check_unsealed() -> None:
    """Check that nothing of this process's could go around a sealed group.

    Raises:
        CollectiveError: `collective-unsealed`, there is a group of another backend, or RPC.
    """
    for group, (backend, _) in distributed_c10d._world.pg_map.items():
        if group not in _groups:
            raise _refusal(f"there is a group of the backend {backend} already, which is not sealed")
    api = sys.modules.get("torch.distributed.rpc.api")
    if api is not None and getattr(api, "_is_current_rpc_agent_set", bool)():
        raise _refusal("torch.distributed.rpc runs in this process, and is not sealed")


def add_group(group: Any) -> None:
    """Keep everything else out until `remove_group(group)`."""
    global _overrides
    _guard_torch()
    _groups.add(group)
    os.environ.setdefault(PARENT_VARIABLE, str(os.getpid()))
    if _overrides is None:
        _overrides = OperatorOverrides(lambda found: found in _groups)


def remove_group(group: Any) -> None:
    """Undo `add_group`; nothing, for a group that is not groups."""
    global _overrides
    _groups.discard(group)
    if not _groups and _overrides is not None:
        if os.environ.get(PARENT_VARIABLE) == str(os.getpid()):  # and not an ancestor's
            del os.environ[PARENT_VARIABLE]
        _overrides.remove()
        _overrides = None


def groups() -> tuple[Any, ...]:
    """Return the sealed groups of this process."""
    return tuple(_groups)


def _refusal(what: str) -> CollectiveError:
    return CollectiveError(Code.COLLECTIVE_UNSEALED, what, hint=_HINT)


def _guard_torch() -> None:
    """Stand before what else would make a way out, once for the process."""
    global _guarded
    if _guarded:
        return
    _guarded = True
    _stand_before(dist.ProcessGroup, "_register_backend", "a backend that is not sealed")
    _stand_before(c10d._SymmetricMemory, "rendezvous", "symmetric memory", static=True)
    _stand_before(c10d._SymmetricMemory, "set_group_info", "symmetric memory", static=True)
    # Not every torch has these; and what is not imported now goes through a guarded name later: groups that
    # torch.distributed._dist2 makes take their backends by _register_backend.
    rpc = sys.modules.get("torch.distributed.rpc")
    if rpc is not None and hasattr(rpc, "init_rpc"):
        _stand_before(rpc, "init_rpc", "torch.distributed.rpc")
        _stand_before(sys.modules["torch.distributed.rpc.backend_registry"], "init_backend", "torch.distributed.rpc")


def _stand_before(owner: Any, name: str, what: str, *, static: bool = False) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def guarded(*args: Any, **named: Any) -> Any:
        if _groups:
            raise _refusal(f"{what} cannot be used beside a sealed group")
        return original(*args, **named)

    setattr(owner, name, staticmethod(guarded) if static else guarded)
