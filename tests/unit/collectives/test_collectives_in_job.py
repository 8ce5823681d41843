"""A rank of a job, whose script names another backend: sealed all the same, and said; what cannot be is refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch.distributed as dist

from glasshouse.collectives.torch_backend import in_job, reach
from glasshouse.errors import Code, CollectiveError

# As a rank's process begins: torch is imported when all groups are sealed already.
IN_A_RANK = "from glasshouse.collectives.torch_backend import reach; reach.seal_all()\n"


@pytest.fixture(autouse=True)
def rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_job, "_said", set())
    monkeypatch.setattr(reach, "_all_sealed", True)


@pytest.mark.parametrize(
    "backend", ["gloo", "nccl", "NCCL", "undefined", "cpu:gloo,cuda:nccl", "cpu:sealed, cuda:nccl"]
)
def test_what_a_script_names_becomes_sealed_and_is_said_once(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert in_job.choose(backend, None) == ("sealed", None)
    assert in_job.choose("gloo", object()) == ("sealed", None)
    assert in_job.choose("gloo", object()) == ("sealed", None)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert said[0].startswith("glasshouse: the group of ")
    assert said[0].endswith("is sealed, as all are: what ranks send each other is encrypted")
    assert "pg_options are passed over" in said[1]


def test_a_script_that_names_sealed_is_told_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert in_job.choose("sealed", None) == ("sealed", None)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("backend", ["mpi", "ucc", "fake", "xccl", "threaded", "cpu:gloo,cuda:ucc"])
def test_a_backend_of_another_kind_is_refused_with_what_to_name(backend: str) -> None:
    with pytest.raises(CollectiveError) as caught:
        in_job.choose(backend, None)
    assert caught.value.code is Code.COLLECTIVE_UNSEALED
    assert "gloo, nccl or no backend" in caught.value.hint


def in_a_rank(code: str) -> list[str]:
    command = [sys.executable, "-c", IN_A_RANK + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout.splitlines()


def test_torch_is_not_imported_in_a_rank_where_its_groups_cannot_be_sealed() -> None:
    """A torch whose private names are others: its groups would be what they are called."""
    code = """
import sys, types
name = "glasshouse.collectives.torch_backend.torch_hooks"
sys.modules[name] = types.ModuleType(name)
try:
    import torch
except RuntimeError as error:
    print("refused")
"""
    assert in_a_rank(code) == ["refused"]


def test_accelerate_is_told_of_ranks_on_cpus_and_an_owner_may_say_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """It else takes them for as many jobs of one process, and their models drift apart without a word."""
    code = "import os, torch; print(os.environ.get('ACCELERATE_USE_CPU'), torch.cuda.device_count())"
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert in_a_rank(code) == ["1 0"]
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    assert in_a_rank(code) == ["false 0"]


# checkpoints beside the training


def test_a_checkpoint_beside_the_training_has_a_group_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    world, other, made, waited = object(), object(), [], []
    monkeypatch.setattr(dist.distributed_c10d._world, "default_pg", world)
    monkeypatch.setattr(dist, "new_group", lambda **given: made.append(given) or f"group {len(made)}")
    monkeypatch.setattr("concurrent.futures.wait", waited.append)
    monkeypatch.setattr(in_job, "_saves", None)
    pending: list[Any] = []

    def original(_state: Any, **named: Any) -> Any:
        pending.append(named.get("process_group"))
        return pending[-1]

    for given in ({}, {"process_group": other}, {"no_dist": True}, {"process_group": world}):
        in_job._async_save(original, {}, **given)
    assert pending == ["group 1", other, None, "group 1"]
    assert made == [{"backend": "sealed"}]
    assert waited == [["group 1"]], "two in one group would exchange in each other's place"
    monkeypatch.setattr(dist.distributed_c10d._world, "default_pg", object())
    in_job._async_save(original, {})
    assert pending[-1] == "group 2", "a world that is begun anew"


def test_a_checkpoint_by_another_process_is_refused() -> None:
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    with pytest.raises(CollectiveError) as caught:
        in_job._async_save(pytest.fail, {}, async_checkpointer_type=AsyncCheckpointerType.PROCESS)
    assert caught.value.code is Code.COLLECTIVE_UNSEALED
    assert "AsyncCheckpointerType.THREAD" in caught.value.hint
