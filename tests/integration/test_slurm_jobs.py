"""Nodes are rented from a real Slurm: by their tag from the first, and gone when Slurm lists them no more."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from glasshouse.errors import Code, PlatformError, UsageError
from glasshouse.providers.place.ways import SlurmNode
from glasshouse.providers.rental.provider import Options, Provider, RentedState, Start
from glasshouse.providers.rental.slurm_jobs import Slurm
from simulators.slurm_cluster import Cluster, needs_slurm, running_slurm
from tools.machine import needs_root
from tools.waiting import wait_for

pytestmark = [pytest.mark.slow, needs_root, needs_slurm]


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with running_slurm() as cluster:
        yield cluster


@pytest.fixture
def cluster(running: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    for name, value in {**running.environment, "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    return running


def options(**other: object) -> Options:
    given = {"gpu": (), "gpus": 0, "memory_gb": 0, "disk_gb": 1, "regions": (), "spot": False, "image": ""}
    return Options(**(given | {"most_per_hour_usd": Decimal(0)} | other))  # type: ignore[arg-type]


def start(tag: str, chosen: Options) -> Start:
    return Start(tag=tag, nonce="ab" * 16, ssh_public="", ends_s=1200, ends_at_s=0, options=chosen)


def test_a_job_of_two_nodes_is_rented_found_by_its_tag_reached_and_given_back(cluster: Cluster, tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.mkdir()
    slurm = Slurm(nodes=2, python=sys.executable, folder=str(nodes))
    provider: Provider = slurm
    assert provider.name == "slurm"
    chosen = options(regions=("main",))
    [offer] = slurm.offers(chosen)
    assert (offer.region, offer.usd_per_hour) == ("main", 0)
    job = slurm.rent(offer, start("gh-me-1", chosen))
    assert [one.id for one in slurm.tagged("gh-me-")] == [job]
    assert slurm.tagged("gh-you-") == []
    wait_for(lambda: len(slurm.places(job)) == 2)
    assert slurm.places(job) == tuple(f"slurm:///{job}/{node}" for node in cluster.nodes)
    found = slurm.find(job)
    assert found is not None
    assert (found.state, found.tag, slurm.bill(job)) == (RentedState.RUNNING, "gh-me-1", None)
    # The cap is Slurm's to keep too: the limit in time, and no second try.
    told = cluster.ask("scontrol", "show", "job", job)
    assert "Requeue=0" in told
    assert any(f"TimeLimit=00:{minutes}:00" in told for minutes in (18, 19, 20))
    slurm.give_back(job)
    slurm.give_back(job)
    wait_for(lambda: slurm.find(job) is None)
    assert slurm.tagged("gh-me-") == []
    assert list(nodes.iterdir()) == []
    assert list(tmp_path.iterdir()) == [nodes]


def test_a_job_for_which_there_is_no_room_waits_and_is_given_back_unbegun(cluster: Cluster) -> None:
    chosen = options(gpu=("A100",), gpus=2)
    slurm = Slurm(words=("--hold",))
    [offer] = slurm.offers(chosen)
    assert (offer.gpu, offer.gpus, offer.region) == ("a100", 2, "main")
    job = slurm.rent(offer, start("gh-me-2", chosen))
    found = slurm.find(job)
    assert found is not None
    assert (found.state, found.why) == (RentedState.STARTING, "PENDING: JobHeldUser")
    assert slurm.output(job) == ""
    assert slurm.places(job) == ()
    assert "gres:a100:2" in cluster.ask("scontrol", "show", "job", job).replace("gpu:", "")
    slurm.give_back(job)
    assert slurm.find(job) is None


def test_what_is_started_on_a_node_has_the_gpus_that_the_job_was_given(cluster: Cluster, tmp_path: Path) -> None:
    chosen = options(gpu=("a100",), gpus=2, regions=("main",))
    slurm = Slurm(python=sys.executable, folder=str(tmp_path))
    [offer] = slurm.offers(chosen)
    job = slurm.rent(offer, start("gh-me-4", chosen))
    wait_for(lambda: slurm.places(job))
    seen = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"hold\0{tmp_path}" in (process / "cmdline").read_text():
                seen.append("CUDA_VISIBLE_DEVICES=0,1" in (process / "environ").read_text().split("\0"))
    assert seen
    assert all(seen)
    way = replace(SlurmNode.parse(slurm.places(job)[0]), folder=str(tmp_path))
    assert cluster.ask(*way.command(["printenv", "CUDA_VISIBLE_DEVICES"], connect_s=5)) == "0,1"
    slurm.give_back(job)
    wait_for(lambda: slurm.find(job) is None)


def test_what_a_cluster_does_not_have_is_named_with_what_it_has(cluster: Cluster) -> None:
    slurm = Slurm()
    with pytest.raises(UsageError, match="no kind of GPU called 'H100'") as refused:
        slurm.offers(options(gpu=("H100",), gpus=1))
    assert "a100" in refused.value.hint
    with pytest.raises(UsageError, match="no partition called 'large'") as refused:
        slurm.offers(options(regions=("large",)))
    assert "main" in refused.value.hint
    assert slurm.offers(options(gpus=3)) == []
    assert slurm.offers(options(memory_gb=2)) == []
    [offer] = slurm.offers(options(regions=("short",)))
    with pytest.raises(PlatformError) as no:
        Slurm(words=("--partition=gone",)).rent(offer, start("gh-me-3", options()))
    assert no.value.code is Code.NO_OFFER
    assert slurm.tagged("gh-me-3") == []
