"""Real ranks: every way gives the right sum, the counters are the formulas', a dead rank ends the benchmark."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from glasshouse.bench.collectives import plan
from glasshouse.bench.collectives.measurement import Measurement
from glasshouse.bench.collectives.plan import EXCHANGE_WAYS, TRAIN_WAYS, Plan
from glasshouse.bench.collectives.run import measure
from glasshouse.bench.collectives.values import Cell, Kind, Way
from glasshouse.bench.collectives.world import World
from glasshouse.cli.app import run
from glasshouse.cli.bench_collectives_view import Silent
from glasshouse.errors import InternalError
from simulators.collectives_work import work

pytestmark = pytest.mark.slow

MIB = 1 << 20
HEADER_AND_TAG = 80


@pytest.fixture(scope="module")
def measured() -> Measurement:
    cells = (
        Cell(kind=Kind.ALL_REDUCE, ranks=3, bytes=3 * MIB, ways=EXCHANGE_WAYS),
        Cell(kind=Kind.TRAIN, ranks=3, model="resnet-2m", ways=TRAIN_WAYS),
        Cell(kind=Kind.REPLAY, ranks=3, model="resnet-2m", dtype="bfloat16", ways=(Way.RAW, Way.DIRECT)),
    )
    whole = Plan(cells=cells, time_s=1, seed=1, quick=True, start_ranks=2, start_repeats=1, memory_bytes=(4 * MIB,))
    return measure(whole, Silent())


def test_every_way_was_sampled_in_every_round(measured: Measurement) -> None:
    assert not measured.not_measured
    assert [found.cell.kind for found in measured.found] == list(Kind)
    for found in measured.found:
        assert found.samples.keys() == set(found.cell.ways)
        assert {len(samples) for samples in found.samples.values()} == {found.rounds}
        assert found.rounds >= 5
        assert all(sample.wall_s > 0 for samples in found.samples.values() for sample in samples)


@pytest.mark.parametrize("way", [Way.SEALED, Way.SERIAL, Way.RING, Way.DIRECT])
def test_the_engine_does_the_work_of_its_algorithm(measured: Measurement, way: Way) -> None:
    [found] = measured.of(Kind.ALL_REDUCE)
    counts, expected = found.counts[way], work(way, bytes_=3 * MIB, ranks=3)
    assert counts.all_reduces == 1
    assert counts.seal_calls + counts.open_calls == 3 * expected.calls
    assert counts.seal_bytes + counts.open_bytes == 3 * expected.crypto_bytes
    least = 3 * expected.wire_bytes
    assert least < counts.received_bytes <= least + HEADER_AND_TAG * 3 * expected.messages
    assert counts.seal_s > 0
    assert counts.add_s > 0


def test_an_iteration_exchanges_each_bucket_once(measured: Measurement) -> None:
    [found] = measured.of(Kind.TRAIN)
    assert len(found.buckets) == found.whole_buckets == 2
    gradients = 4 * sum(found.buckets)
    for way in (Way.RING, Way.DIRECT):
        # DDP also synchronises the buffers of batch normalisation, so a little more than the gradients goes round.
        crypto = 3 * work(way, bytes_=gradients, ranks=3).crypto_bytes
        done = found.counts[way].seal_bytes + found.counts[way].open_bytes
        assert crypto <= done < 1.2 * crypto
    assert found.exposed_s(Way.RAW) is not None


def test_memory_and_start_up_were_looked_at(measured: Measurement) -> None:
    assert {one.way for one in measured.memory} >= {Way.RAW, Way.DIRECT}
    assert measured.start is not None
    assert len(measured.start.sealed_s) == len(measured.start.raw_s) == 1
    assert min(measured.start.sealed_s) > 0


def test_a_rank_that_dies_ends_the_others_and_the_benchmark_says_so() -> None:
    with World(2, (Way.RAW, Way.DIRECT)) as world:
        victim = world.pids[1]
        killer = threading.Timer(1.0, os.kill, (victim, signal.SIGKILL))
        cell = Cell(kind=Kind.ALL_REDUCE, ranks=2, bytes=MIB, ways=(Way.RAW, Way.DIRECT))
        world.order("prepare", timeout_s=60, cell=cell.to_json())
        killer.start()
        with pytest.raises(InternalError, match="of the benchmark ended early"):
            world.order("rounds", timeout_s=60, orders=[["raw", "direct"]] * 100_000, batch=1)
        killer.join()
        pids = world.pids
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_who_asks_to_stop_keeps_what_is_complete() -> None:
    cells = tuple(
        Cell(kind=Kind.ALL_REDUCE, ranks=2, bytes=size, ways=(Way.RAW, Way.DIRECT)) for size in (MIB, 2 * MIB)
    )
    seen: list[Cell] = []

    class Watching(Silent):
        def cell(self, cell: Cell, number: int, of: int) -> None:
            seen.append(cell)

    kept = measure(Plan(cells=cells, time_s=2, seed=1), Watching(), stopped=lambda: len(seen) > 1)
    assert [found.cell for found in kept.found] == [cells[0]]
    assert [(one.cell, one.why) for one in kept.not_measured] == [(cells[1], "stopped")]


def test_the_trial_for_newcomers_ends_with_a_file_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "quick", partial(plan.quick, time_s=3.0))  # as a user has it, but for the half minute
    monkeypatch.chdir(tmp_path)
    assert run(["bench", "collectives", "--quick", "-o", "out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"] == "out/report.html"
    kept = Measurement.parse((tmp_path / "out" / "collectives.json").read_bytes())
    assert kept.quick
    assert {found.cell.kind for found in kept.found} == set(Kind)
    assert "a trial" in (tmp_path / "out" / "report.html").read_text()
