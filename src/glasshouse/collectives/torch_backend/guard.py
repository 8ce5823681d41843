"""Keeps groups of another backend, RPC, and memory that GPUs share away from sealed groups.

Laws: as long as a process has a sealed group, torch makes no other way for tensors to leave it, in whichever order
they are asked for; init_process_group and new_group make no other group in a process that inherits its environment
either, to which torch's own checkpointing hands tensors. When the last sealed group is gone, torch is as it was. This
keeps a script from sending plaintext by mistake or by a default; against one that opens sockets of its own there is the
sandbox.
"""

from __future__ import annotations

import os
from typing import Any

from glasshouse.collectives.torch_backend import torch_hooks
from glasshouse.collectives.torch_backend.dispatch import override_operators
from glasshouse.collectives.torch_backend.reach import NAME, PARENT_VARIABLE, store
from glasshouse.errors import Code, CollectiveError

_groups: set[Any] = set()
_overrides: torch_hooks.Kernels | None = None


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
        if torch_hooks.torchcomms_runs():
            raise _refusal("torchcomms replaces every backend of torch.distributed; a sealed group cannot use it")
    elif store() is not None:
        raise _refusal(
            f"a group of the backend {backend} needs a network, and ranks have none here: the backend is `{NAME}`",
            hint='torch.distributed.init_process_group("sealed")',
        )
    elif _groups:
        raise _refusal(f"a group of the backend {backend} would not be sealed, and this process's groups are")
    elif PARENT_VARIABLE in os.environ:
        raise _refusal(
            f"a group of the backend {backend} would not be sealed, and those of the process that started this one are",
            hint="asynchronous checkpoints can be written by a thread instead (AsyncCheckpointerType.THREAD); if"
            f" this process may send in plaintext, start it without {PARENT_VARIABLE} in its environment",
        )


def check_unsealed() -> None:
    """Check that nothing of this process's could go around a sealed group.

    Raises:
        CollectiveError: `collective-unsealed`, there is a group of another backend, or RPC.
    """
    for group, backend in torch_hooks.groups():
        if group not in _groups:
            raise _refusal(f"there is a group of the backend {backend} already, which is not sealed")
    if torch_hooks.rpc_runs():
        raise _refusal("torch.distributed.rpc runs in this process, and is not sealed")


def add_group(group: Any) -> None:
    """Keep everything else out until `remove_group(group)`."""
    global _overrides
    torch_hooks.before_exits(_check_exit)
    _groups.add(group)
    os.environ.setdefault(PARENT_VARIABLE, str(os.getpid()))
    if _overrides is None:
        _overrides = override_operators(lambda found: found in _groups)


def remove_group(group: Any) -> None:
    """Undo `add_group`; without effect for a group that was not added."""
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


def _check_exit(what: str) -> None:
    if _groups:
        raise _refusal(f"{what} cannot be used beside a sealed group")


def _refusal(
    what: str, *, hint: str = "destroy the sealed group first, or use the backend `sealed` for all of them"
) -> CollectiveError:
    return CollectiveError(Code.COLLECTIVE_UNSEALED, what, hint=hint)
