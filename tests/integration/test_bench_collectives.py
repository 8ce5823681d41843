"""Real ranks: every way gives the right sum, the counters are the formulas', a dead rank ends the benchmark."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.collectives.cells import Cell, Kind, Way
from benchmarks.collectives.run import RankError, World, measure
from simulators.collectives_work import work

pytestmark = pytest.mark.slow

MIB = 1 << 20
HEADER_AND_TAG = 80
WAYS = (Way.RAW, Way.RING, Way.DIRECT)


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """One world of three ranks: with two, `ring` and `direct` do the same work."""
    cells = (
        Cell(kind=Kind.ALL_REDUCE, ranks=3, bytes=3 * MIB),
        Cell(kind=Kind.TRAIN, ranks=3, model="resnet-2m", ways=(*WAYS, Way.ALONE)),
        Cell(kind=Kind.REPLAY, ranks=3, model="resnet-2m", dtype="bfloat16", ways=WAYS),
    )
    return measure(cells, seconds=0.0, seed=1, memory=[4 * MIB])


@pytest.mark.long
def test_every_way_was_sampled_in_every_round(measured: dict[str, Any]) -> None:
    assert (measured["failed"], measured["not_measured"]) == (None, [])
    assert [found["kind"] for found in measured["cells"]] == list(Kind)
    for found in measured["cells"]:
        assert found["samples"].keys() == set(found["ways"])
        assert {len(samples) for samples in found["samples"].values()} == {found["rounds"]}
        assert found["rounds"] >= 5
        assert all(sample[0] > 0 for samples in found["samples"].values() for sample in samples)


@pytest.mark.long
@pytest.mark.parametrize("way", [Way.SEALED, Way.NETWORK, Way.SERIAL, Way.RING, Way.DIRECT])
def test_the_engine_does_the_work_of_its_algorithm(measured: dict[str, Any], way: Way) -> None:
    counts, expected = measured["cells"][0]["counts"][way], work(way, bytes_=3 * MIB, ranks=3)
    assert counts["all_reduces"] == 1
    assert counts["seal_calls"] + counts["open_calls"] == 3 * expected.calls
    assert counts["seal_bytes"] + counts["open_bytes"] == 3 * expected.crypto_bytes
    least = 3 * expected.wire_bytes
    assert least < counts["received_bytes"] <= least + HEADER_AND_TAG * 3 * expected.messages
    assert counts["seal_s"] > 0


@pytest.mark.long
@pytest.mark.parametrize("way", [Way.RING, Way.DIRECT])
@pytest.mark.parametrize(("place", "width"), [(1, 4), (2, 2)], ids=["train", "replay"])
def test_an_iteration_exchanges_each_bucket_once(measured: dict[str, Any], way: Way, place: int, width: int) -> None:
    found = measured["cells"][place]
    assert len(found["buckets"]) == found["whole_buckets"] <= found["counts"][way]["all_reduces"]
    crypto = 3 * work(way, bytes_=width * sum(found["buckets"]), ranks=3).crypto_bytes
    done = found["counts"][way]["seal_bytes"] + found["counts"][way]["open_bytes"]
    # DDP also broadcasts the buffers of batch normalisation, so a little more than the gradients goes round.
    assert 0.9999 < done / crypto < (1.2 if place == 1 else 1.0001)


@pytest.mark.long
def test_peak_memory_was_looked_at(measured: dict[str, Any]) -> None:
    assert {one["way"] for one in measured["memory"]} == set(Way) - {Way.ALONE}
    assert all(one["extra_bytes"] >= 0 for one in measured["memory"])


def test_a_rank_that_dies_ends_the_others_and_the_benchmark_says_so() -> None:
    cell = Cell(kind=Kind.ALL_REDUCE, ranks=2, bytes=MIB, ways=(Way.RAW, Way.DIRECT))
    with World(2) as world:
        pids = world.pids
        world.order("prepare", cell=cell)
        killer = threading.Timer(0.5, os.kill, (pids[1], signal.SIGKILL))
        killer.start()
        with pytest.raises(RankError, match=r"rank 1 ended early|rank 0 failed"):
            world.order("rounds", orders=[list(cell.ways)] * 100_000, batch=1)
        killer.join()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
