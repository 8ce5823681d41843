"""A rank of a job: every group is sealed, whichever backend its script and the libraries of it name.

They name a backend for its speed on a device, and no job has another than `sealed`. Laws: what is replaced or passed
over is said, once a process; a backend that is neither gloo nor nccl is refused, for nothing shows what it was to do.
"""

from __future__ import annotations

import concurrent.futures
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from glasshouse.collectives.torch_backend import guard, torch_hooks
from glasshouse.collectives.torch_backend.reach import NAME
from glasshouse.errors import Code, CollectiveError

_NOTHING = "undefined"  # as torch calls the backend where none was named
_REPLACED = frozenset({"gloo", "nccl", _NOTHING, NAME})

_said: set[str] = set()
_saves: _AsyncSaves | None = None


def install() -> None:
    """Prepare this process, in which torch is imported and no script runs yet."""
    # As `accelerate launch` does: Accelerate, and Trainer over it, else take ranks on CPUs for as many jobs of one
    # process, and refuse GPUs of the RTX 4000 series for what NCCL lacks there.
    told = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE") if torch.cuda.device_count() else ("ACCELERATE_USE_CPU",)
    for name in told:
        os.environ.setdefault(name, "1")


def replace_async_save(saver: Any) -> None:
    """Have checkpoints that torch's module writes beside the training use a group of their own."""
    torch_hooks.instead_of_async_save(saver, _async_save)


def choose(backend: str, options: Any) -> tuple[str, Any]:
    """Return backend and options of a group that is asked for with these.

    Raises:
        CollectiveError: `collective-unsealed`, a backend that cannot be replaced.
    """
    names = guard.names_in(backend)
    if others := sorted(names - _REPLACED):
        raise CollectiveError(
            Code.COLLECTIVE_UNSEALED,
            f"the backend {', '.join(others)} is not there for the ranks of a job, whose messages are sealed",
            hint="name gloo, nccl or no backend: the group is sealed",
        )
    if names != {NAME}:
        named = " and ".join(sorted(names - {NAME, _NOTHING})) or "no name"
        _say("sealed", f"the group of {named} is sealed, as all are: what ranks send each other is encrypted")
    if options is not None:
        _say("options", "pg_options are passed over: they are another backend's, and a sealed group has none")
    return NAME, None


class _AsyncSaves:
    """The checkpoints that threads write beside the training of one world, in a group of their own.

    In the world's own group their exchange would come at another place on each rank.
    """

    def __init__(self) -> None:
        self.world = dist.group.WORLD
        self.group = dist.new_group(backend=NAME)
        self.last: Any = None

    def wait(self) -> None:
        """Wait for the checkpoint before this: two at once would exchange in each other's place."""
        if self.last is not None:
            concurrent.futures.wait([getattr(self.last, "upload_completion", self.last)])


def _async_save(original: Any, state_dict: Any, **named: Any) -> Any:
    global _saves
    if getattr(named.get("async_checkpointer_type"), "value", None) == "process":
        raise CollectiveError(
            Code.COLLECTIVE_UNSEALED,
            "a checkpoint written by another process would be handed tensors that are not sealed",
            hint="let a thread write it: async_checkpointer_type=AsyncCheckpointerType.THREAD, the default",
        )
    alone = named.get("no_dist") or not dist.is_initialized()
    if alone or named.get("process_group") not in (None, dist.group.WORLD):
        return original(state_dict, **named)
    if _saves is None or _saves.world is not dist.group.WORLD:
        _saves = _AsyncSaves()
    _saves.wait()
    _saves.last = original(state_dict, **{**named, "process_group": _saves.group})
    return _saves.last


def _say(fact: str, what: str) -> None:
    if fact not in _said:
        _said.add(fact)
        sys.stdout.flush()  # what was printed before this comes before it
        sys.stderr.write(f"glasshouse: {what}\n")
        sys.stderr.flush()
