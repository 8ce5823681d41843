"""What may not be beside a sealed group, in either order, and that torch is as it was without one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from glasshouse.collectives.torch_backend import entry, guard, reach
from glasshouse.collectives.torch_backend.process_group import SealedGroup
from glasshouse.errors import Code, CollectiveError
from simulators.sealed_engines import NotingEngine


@pytest.fixture
def sealed() -> Iterator[SealedGroup]:
    group = SealedGroup(NotingEngine(), name="held")
    guard.add_group(group)
    yield group
    guard.remove_group(group)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[None]:
    """A world of one rank over gloo."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def refused(raised: pytest.ExceptionInfo[CollectiveError]) -> bool:
    return raised.value.code is Code.COLLECTIVE_UNSEALED and bool(raised.value.hint)


@pytest.mark.parametrize(
    "backend",
    ["cpu:gloo,cuda:sealed", "cuda:sealed,cpu:gloo", "CPU:Sealed, cuda:nccl", "cpu:sealed,cuda:gloo,xpu:sealed"],
)
def test_a_group_is_sealed_for_all_devices_or_for_none(backend: str, tmp_path: Path) -> None:
    with pytest.raises(CollectiveError) as raised:
        dist.init_process_group(backend, init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    assert refused(raised)
    assert not dist.is_initialized()


def test_a_sealed_group_is_not_made_beside_another(world: None) -> None:
    with pytest.raises(CollectiveError) as raised:
        dist.new_group(backend="sealed")
    assert refused(raised)
    assert "gloo" in raised.value.message


@pytest.mark.parametrize("backend", ["gloo", "fake", "cpu:gloo", "undefined"])
def test_another_group_is_not_made_beside_a_sealed_one(backend: str, sealed: SealedGroup, tmp_path: Path) -> None:
    with pytest.raises(CollectiveError) as raised:
        dist.init_process_group(backend, init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    assert refused(raised)


OF_A_RANK = """
import sys, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
print("made")
"""


def in_a_child(folder: Path) -> tuple[int, str]:
    command = [sys.executable, "-c", OF_A_RANK, str(folder / "rendezvous")]
    # Else gloo looks for the machine's name, and warns where none answers in time.
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    return done.returncode, done.stdout + done.stderr


def test_a_process_that_a_rank_starts_makes_no_other_group_either(tmp_path: Path) -> None:
    group = SealedGroup(NotingEngine(), name="held")
    guard.add_group(group)
    try:
        status, said = in_a_child(tmp_path)
    finally:
        guard.remove_group(group)
    assert status == 1
    assert "the process that started this one" in said
    assert "[collective-unsealed]" in said
    assert in_a_child(tmp_path) == (0, "made\n")


def test_what_a_ranks_ancestor_forbids_stays_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(reach.PARENT_VARIABLE, "1")
    group = SealedGroup(NotingEngine(), name="held")
    guard.add_group(group)
    guard.remove_group(group)
    with pytest.raises(CollectiveError) as raised:
        guard.check_backend("gloo")
    assert refused(raised)


def test_no_backend_is_attached_beside_a_sealed_group(sealed: SealedGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = dist.ProcessGroup(0, 1)
    with pytest.raises(CollectiveError) as raised:
        plain._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, None)
    assert refused(raised)
    from torch.distributed import _dist2

    monkeypatch.setattr(_dist2, "rendezvous", lambda _: iter([(dist.HashStore(), 0, 1)]))
    with pytest.raises(CollectiveError) as raised:
        _dist2.new_group("gloo", timedelta(seconds=5), "cpu")
    assert refused(raised)


def test_a_monitored_barrier_of_another_group_stays_torchs(world: None) -> None:
    dist.monitored_barrier()
    with pytest.raises(TypeError, match="timeout"):
        dist.monitored_barrier(timeout="soon")


def test_rpc_is_not_started_beside_a_sealed_group(sealed: SealedGroup) -> None:
    rpc = sys.modules["torch.distributed.rpc"]
    with pytest.raises(CollectiveError) as raised:
        rpc.init_rpc("worker", rank=0, world_size=1)
    assert refused(raised)
    with pytest.raises(CollectiveError) as raised:
        rpc.backend_registry.init_backend(rpc.backend_registry.BackendType.TENSORPIPE)
    assert refused(raised)


def test_a_sealed_group_is_not_made_beside_rpc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["torch.distributed.rpc.api"], "_is_current_rpc_agent_set", lambda: True)
    with pytest.raises(CollectiveError) as raised:
        guard.check_unsealed()
    assert refused(raised)


def test_gpus_share_no_memory_beside_a_sealed_group(sealed: SealedGroup) -> None:
    with pytest.raises(CollectiveError) as raised:
        c10d._SymmetricMemory.rendezvous(torch.ones(1), "held")
    assert refused(raised)
    with pytest.raises(CollectiveError) as raised:
        c10d._SymmetricMemory.set_group_info("held", 0, 1, dist.HashStore())
    assert refused(raised)


def test_torch_is_as_it_was_when_the_last_sealed_group_is_gone(sealed: SealedGroup, tmp_path: Path) -> None:
    sealed.shutdown()
    assert guard.groups() == ()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    gathered = [torch.zeros(2)]
    dist.all_gather(gathered, torch.ones(2))
    dist.reduce(torch.ones(2), 0)
    assert gathered[0].all()
    dist.destroy_process_group()
    c10d._SymmetricMemory.set_group_info("any", 0, 1, dist.HashStore())


def test_torchcomms_would_take_the_place_of_the_sealed_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.distributed_c10d, "_use_torchcomms_enabled", lambda: True, raising=False)
    with pytest.raises(CollectiveError) as raised:
        guard.check_backend("sealed")
    assert refused(raised)


def test_the_entry_point_stands_before_torch_once_and_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dist.distributed_c10d._new_process_group_helper
    entry.register()
    assert dist.distributed_c10d._new_process_group_helper is before
    monkeypatch.setattr(dist.Backend, "register_backend", lambda *_, **__: 1 / 0)
    entry.register()
    assert dist.Backend("SEALED") == "sealed"


def test_aborting_a_group_lets_go_of_it() -> None:
    engine = NotingEngine()
    group = SealedGroup(engine, name="held")
    guard.add_group(group)
    group.abort()
    assert guard.groups() == ()
    assert engine.aborted is Code.COLLECTIVE_ABORTED
