"""Makes sealed groups for torch: gets the secret, connects to the other ranks, starts the engine.

Law: every initialisation of a group, also one with the name of an earlier one, has an incarnation and contributions of
its own.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import Counter
from contextlib import suppress
from typing import Any

from torch.distributed import PrefixStore

from glasshouse.collectives.engine.engine import Engine
from glasshouse.collectives.protocol.group_keys import Membership
from glasshouse.collectives.secret import group_secret
from glasshouse.collectives.torch_backend import guard, reach
from glasshouse.collectives.torch_backend.process_group import SealedGroup
from glasshouse.collectives.transport.mesh import Mesh
from glasshouse.errors import Code, CollectiveError, UsageError
from glasshouse.wire.crypto import zero

_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""How often torchelastic has started this group's processes again; the same on every rank."""

_made: Counter[tuple[str, tuple[int, ...]]] = Counter()
_lock = threading.Lock()


def create(options: Any, backend_options: Any = None) -> SealedGroup:
    """Make the group that torch's `_DistributedBackendOptions` describe.

    Raises:
        CollectiveError: no secret, other ranks that differ or do not come, or something unsealed in this process.
        UsageError: options that the backend does not have.
    """
    if backend_options is not None:
        raise UsageError(Code.USAGE, "the sealed backend takes no pg_options")
    guard.check_unsealed()
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return _join(options.store, str(options.group_id), ranks, options.group_rank, options.timeout.total_seconds())


def _join(store: Any, name: str, ranks: tuple[int, ...], rank: int, timeout_s: float) -> SealedGroup:
    membership = Membership(group=name, ranks=ranks, rank=rank, incarnation=_incarnation(name, ranks))
    # Names come again after destroy_process_group, for the same ranks or for others, and the store may still be there.
    own = PrefixStore(f"sealed/{membership.digest().hex()}/{membership.incarnation}/", store)
    secret = group_secret()
    try:
        mesh = Mesh.connect(own, membership, secret, timeout_s=timeout_s, dialler=reach.dialler())
    finally:
        zero(secret)
    engine = Engine(mesh, timeout_s=timeout_s)

    def split(members: list[int], child: str, child_timeout_s: float) -> SealedGroup:
        chosen = tuple(ranks[member] for member in members)
        under = PrefixStore(f"{child}/", store)
        return _join(under, child, chosen, members.index(rank), child_timeout_s or timeout_s)

    group = SealedGroup(engine, store, name=name, timeout_s=timeout_s, split=split)
    guard.add_group(group)
    return group


def _incarnation(name: str, ranks: tuple[int, ...]) -> int:
    """Return a number that this group of these ranks never had before, in this process or in those before it.

    Counted by name and ranks: its members have made it equally often, which need not be so for other ranks.
    """
    restarts = os.environ.get(_RESTARTS, "0")
    if not restarts.isascii() or not restarts.isdigit() or int(restarts) >= 2**32:
        raise CollectiveError(Code.GROUP_MISMATCH, f"{_RESTARTS} is not a count of restarts")
    with _lock:
        earlier = _made[name, ranks]
        _made[name, ranks] += 1
    return int(restarts) << 32 | earlier


@atexit.register
def _leave() -> None:
    """Leave the groups of a script that ends without destroy_process_group; nothing is waited for."""
    for group in guard.groups():
        with suppress(CollectiveError, OSError):
            group.leave()
