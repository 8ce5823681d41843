"""How torch's wish for a group becomes a sealed one: its name, its incarnation, and what it may not ask for."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from glasshouse.collectives.secret import provide, withdraw
from glasshouse.collectives.torch_backend import guard, process_group
from glasshouse.errors import Code, CollectiveError, UsageError


@pytest.fixture(autouse=True)
def _secret() -> Iterator[None]:
    provide(b"s" * 32)
    yield
    for group in guard.groups():
        group.shutdown()
    withdraw()


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The memberships that meshes are made for, and the stores."""
    seen: list[Any] = []
    connect = process_group.Mesh.connect

    def noting(store: Any, membership: Any, *rest: Any, **named: Any) -> Any:
        seen.append((membership, store))
        return connect(store, membership, *rest, **named)

    monkeypatch.setattr(process_group.Mesh, "connect", noting)
    monkeypatch.setattr(process_group, "_made", type(process_group._made)())
    return seen


def wish(name: str = "0", **members: Any) -> Any:
    from datetime import timedelta

    given = {
        "store": dist.HashStore(),
        "group_id": name,
        "group_rank": 0,
        "group_size": 1,
        "global_ranks_in_group": [],
        "timeout": timedelta(seconds=7),
    }
    return SimpleNamespace(**(given | members))


def test_every_initialisation_is_another_incarnation(met: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("0", "0", "1"):
        process_group.create(wish(name)).shutdown()
    # Others under the same name: they have not been together before.
    process_group.create(wish("0", global_ranks_in_group=[5])).shutdown()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    process_group.create(wish("0"))
    found = [(membership.group, membership.ranks, membership.incarnation) for membership, _ in met]
    assert found == [("0", (0,), 0), ("0", (0,), 1), ("1", (0,), 0), ("0", (5,), 0), ("0", (0,), (3 << 32) + 2)]


def test_addresses_of_an_earlier_group_are_not_found_under_a_later_ones_keys(met: list[Any]) -> None:
    store = dist.HashStore()
    for ranks in ([0], [0], [4]):
        process_group.create(wish("0", store=store, global_ranks_in_group=ranks)).shutdown()
    for number, (_, own) in enumerate(met):
        own.set("address", str(number))
    assert [own.get("address") for _, own in met] == [b"0", b"1", b"2"]


@pytest.mark.parametrize("count", ["-1", "one", "", str(1 << 32), "١"])
def test_a_count_of_restarts_that_is_none_is_refused(count: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    with pytest.raises(CollectiveError) as refused:
        process_group.create(wish())
    assert refused.value.code is Code.GROUP_MISMATCH


def test_options_of_other_backends_are_refused() -> None:
    with pytest.raises(UsageError):
        process_group.create(wish(), object())
    assert guard.groups() == ()


def test_without_a_secret_there_is_no_group() -> None:
    withdraw()
    with pytest.raises(CollectiveError) as refused:
        process_group.create(wish())
    assert refused.value.code is Code.GROUP_SECRET
    assert guard.groups() == ()


def test_a_group_knows_who_it_is(met: list[Any]) -> None:
    dist.init_process_group("sealed", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert (dist.get_backend(), group.name(), group._get_backend_name()) == ("sealed", "sealed", "sealed")
    assert group.group_name == dist.distributed_c10d._world.pg_names[group]
    assert group.group_desc == "default_pg"
    assert (group.rank(), group.size()) == (0, 1)
    assert torch.device("cpu") in group._device_types
    assert not group._get_backend(torch.device("cpu")).supports_splitting
    assert met[0][0].group == group.group_name
    before = group._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1))
    assert group._get_sequence_number_for_group() == before + 1
    dist.destroy_process_group()
    assert guard.groups() == ()


def test_a_group_that_nobody_destroyed_says_goodbye_at_the_end() -> None:
    process_group.create(wish())
    process_group._leave()
    assert guard.groups() == ()
