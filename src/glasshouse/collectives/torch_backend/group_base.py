"""A process group over an engine, without its collectives: identity, refusals, life, and how operations run.

Laws: the group has no backend beneath it, and none can be registered, so that nothing of torch's own can go around it;
what is not offered raises `collective-unsealed`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from glasshouse.collectives.engine.completion import Completion, Driver
from glasshouse.collectives.torch_backend import guard, torch_hooks
from glasshouse.collectives.torch_backend.arguments import StagedTensors, refusal, timeout_s
from glasshouse.collectives.torch_backend.reach import NAME
from glasshouse.collectives.torch_backend.sealed_work import Joined, SealedWork
from glasshouse.errors import Code, CollectiveError

_LOOK_AT_LEAST = 16  # unfinished collectives that are kept before those that are done are sorted out


@torch_hooks.eager
class GroupBase(dist.ProcessGroup):  # type: ignore[misc]  # torch is not typed
    """A process group over an engine.

    Args:
        store: the rendezvous store of the group, returned to callers that ask for it.
        timeout_s: of every operation without one of its own.
        split: makes the group of some of these ranks: called with their ranks here, name, and timeout.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_shrinking = False
    use_pg_for_symm_mem_rendezvous = False

    def __init__(
        self,
        engine: Driver,
        store: Any = None,
        *,
        name: str = "",
        timeout_s: float | None = None,
        split: Any = None,
    ) -> None:
        super().__init__(engine.rank, engine.size)
        self._engine = engine
        self._store = store
        self._name = name
        self._desc = "undefined"
        self._timeout_s = timeout_s
        self._split = split
        self._pid = os.getpid()
        self._submitted = 0
        self._coalesced: list[Completion | Joined] | None = None
        self._unfinished: list[Completion | Joined] = []
        self._look_at = _LOOK_AT_LEAST

    def getBackendName(self) -> str:  # noqa: N802 - torch's C++ looks it up by this name, and those below
        return NAME

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._desc = desc

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    _get_backend_name = getBackendName
    name = getBackendName
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def get_group_store(self) -> Any:
        return self._store

    def _get_backend(self, device: Any) -> GroupBase:
        """Return the group itself, in the place of a backend with special abilities."""
        del device
        return self

    def _backend_id(self, backend_type: Any) -> int:
        del backend_type
        return id(self)

    def _has_hooks(self) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the frames are numbered from zero with the group."""

    def _get_sequence_number_for_group(self) -> int:
        return self._submitted

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout_s(timeout) or self._timeout_s

    _set_default_timeout = set_timeout

    def _register_backend(self, *_: Any, **__: Any) -> None:
        raise refusal("a sealed group takes no other backend beneath it")

    def merge_remote_group(self, *_: Any, **__: Any) -> Any:
        hint = "make the group with torch.distributed.new_group"
        raise refusal("the sealed backend does not merge groups", hint=hint)

    mergeRemoteGroup = merge_remote_group  # noqa: N815 - as torch's C++ calls it

    def _register_on_completion_hook(self, *_: Any, **__: Any) -> None:
        raise refusal("the sealed backend has no completion hooks")

    _wait_for_pending_works = _register_on_completion_hook

    def _enable_collectives_timing(self) -> None:
        raise refusal("the sealed backend does not time collectives one by one")

    def shutdown(self) -> None:
        """Finish the collectives under way, and leave; messages that were not taken are not waited for."""
        for completion in self._unfinished:
            with suppress(CollectiveError):
                completion.wait()
        self.leave()

    def leave(self) -> None:
        """Send the other ranks a goodbye and close the connections; operations under way fail."""
        guard.remove_group(self)
        self._engine.close()

    def abort(self) -> None:
        """End the group on every rank; operations under way fail."""
        guard.remove_group(self)
        self._engine.abort(CollectiveError(Code.COLLECTIVE_ABORTED, f"rank {self.rank()} aborted the group"))

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> GroupBase | None:
        """Return a new sealed group of some of these ranks, or None where this rank is not one of them.

        Every rank in `ranks` must call this with the same ranks and name.
        """
        del opts, device_types
        if self._split is None:
            raise refusal("this sealed group cannot be split")
        if self.rank() not in ranks:
            return None
        name = group_name or f"{self._name}:split:{','.join(map(str, ranks))}"
        child: GroupBase = self._split(list(ranks), name, timeout_s(timeout) or self._timeout_s)
        child.setGroupDesc(group_desc or f"{self._desc}:split")
        return child

    splitGroup = split_group  # noqa: N815 - as torch's C++ calls it

    def _start_coalescing(self, device: Any) -> None:
        del device
        if self._coalesced is not None:
            raise ValueError("coalescing has begun already")
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> SealedWork:
        """Return the work of all operations since `_start_coalescing`."""
        del device
        begun, self._coalesced = self._coalesced, None
        if begun is None:
            raise ValueError("coalescing has not begun")
        return SealedWork(Joined(begun), [])

    def _run(self, operations: Sequence[Any], outputs: list[Any], staged: StagedTensors, opts: Any) -> SealedWork:
        """Submit operations to the engine; wait for them, where the caller asks for that."""
        if os.getpid() != self._pid:
            raise CollectiveError(Code.COLLECTIVE_ABORTED, "a process forked from a rank is not a member of its groups")
        asynchronous = opts is None or bool(opts.asyncOp)
        timeout = timeout_s(getattr(opts, "timeout", None)) or self._timeout_s
        background = asynchronous or len(operations) > 1
        begun = [self._engine.submit(each, timeout_s=timeout, background=background) for each in operations]
        self._submitted += len(begun)
        completion = begun[0] if len(begun) == 1 else Joined(begun)
        work = SealedWork(completion, outputs, staged.settle if staged.made else None)
        if self._coalesced is not None:
            self._coalesced.append(completion)
        if not asynchronous:
            work.wait()
            return work
        if opts is not None:
            self._unfinished.append(completion)
            if len(self._unfinished) >= self._look_at:  # so rarely that the time does not grow with their number
                self._unfinished = [each for each in self._unfinished if not each.done()]
                self._look_at = max(_LOOK_AT_LEAST, 2 * len(self._unfinished))
        torch_hooks.register_outputs(outputs, work)
        return work
