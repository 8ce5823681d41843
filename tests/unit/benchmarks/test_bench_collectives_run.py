"""A run repeats each cell at least five times, keeps what is complete when it ends early, and says what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks.collectives import __main__ as command
from benchmarks.collectives import run
from benchmarks.collectives.cells import Cell, Kind, Way

WAYS = (Way.RAW, Way.RING)
SMALL, LARGE = (Cell(kind=Kind.ALL_REDUCE, ranks=2, bytes=size, ways=WAYS) for size in (1_000, 2_000))


class Ranks:
    """Two ranks of a simulated world; `fails` has what the cell of so many bytes raises."""

    fails: ClassVar[dict[int, BaseException]] = {}
    orders: ClassVar[list[list[list[Way]]]] = []
    closed: ClassVar[list[bool]] = []

    def __init__(self, size: int) -> None:
        self.size, self.pids = size, ()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_error: object) -> None:
        self.closed.append(True)

    def order(self, do: str, **rest: Any) -> list[Any]:
        if do == "prepare":
            cell: Cell = rest["cell"]
            if cell.bytes in self.fails:
                raise self.fails[cell.bytes]
            return [{"once_s": dict.fromkeys(cell.ways, 0.1), "buckets": [], "share": 1.0, "whole_buckets": 0}] * 2
        if do == "rounds":
            self.orders.append(rest["orders"])
            return [[dict.fromkeys(order, (1.0, 1.5, 0.2, 0.1)) for order in rest["orders"]]] * 2
        if do == "memory":
            return [dict.fromkeys(rest["ways"], 1_000)] * 2
        return [{"ring": {"all_reduces": 1.0, "seal_calls": 4.0}}] * 2


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> type[Ranks]:
    monkeypatch.setattr(run, "World", Ranks)
    for name in ("fails", "orders", "closed"):
        monkeypatch.setattr(Ranks, name, {} if name == "fails" else [])
    return Ranks


def measure(seed: int = 1) -> dict[str, Any]:
    return run.measure([SMALL, LARGE], seconds=0.0, seed=seed)


def test_every_cell_gets_the_least_rounds_even_when_there_is_no_time(ranks: type[Ranks]) -> None:
    kept = measure()
    assert [one["bytes"] for one in kept["cells"]] == [1_000, 2_000]
    assert {one["rounds"] for one in kept["cells"]} == {run.LEAST_ROUNDS}
    assert kept["cells"][0]["samples"]["ring"][0] == [0.5, 0.4, 0.2]  # of both ranks, one repetition
    assert kept["cells"][0]["counts"]["ring"] == {"all_reduces": 1.0, "seal_calls": 8.0}
    assert (kept["failed"], kept["not_measured"], ranks.closed) == (None, [], [True])


@pytest.mark.parametrize("error", [run.RankError("rank 1 ended early"), KeyboardInterrupt()], ids=["dies", "stopped"])
def test_what_was_complete_is_kept_and_the_rest_is_named_with_the_reason(
    ranks: type[Ranks], error: BaseException
) -> None:
    ranks.fails[2_000] = error
    kept = measure()
    assert [one["bytes"] for one in kept["cells"]] == [1_000]
    assert kept["failed"] == (str(error) or "stopped")
    assert [(one["bytes"], one["why"]) for one in kept["not_measured"]] == [(2_000, kept["failed"])]
    assert ranks.closed == [True]


def test_the_same_seed_draws_the_same_orders(ranks: type[Ranks]) -> None:
    drawn = []
    for seed in (1, 1, 2):
        ranks.orders.clear()
        measure(seed)
        drawn.append([order for orders in ranks.orders for order in orders])
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(sorted(order) == sorted(WAYS) for order in drawn[0])


@pytest.mark.parametrize(("error", "code"), [(run.RankError("a rank died"), 1), (KeyboardInterrupt(), 130)])
def test_a_run_that_ended_early_is_kept_and_fails(
    ranks: type[Ranks], tmp_path: Path, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    ranks.fails[25 << 20] = error
    out = tmp_path / "kept.json"
    words = ["--parts", "all-reduce", "--ranks", "2", "--dtypes", "float32", "-o", str(out)]
    assert command.main([*words, "--sizes", "1M", "25M"]) == code
    assert len(json.loads(out.read_bytes())["not_measured"]) == 1
    assert "It ended early, with 1 cells not measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--parts", "all"], "argument --parts: invalid choice: 'all'"),
        (["--ranks", "1"], "argument --ranks: invalid choice: 1"),
        (["--sizes", "25"], "a size is such as 64K or 25M, not '25'"),
        (["--sizes", "0M"], "a size is such as 64K or 25M, not '0M'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    monkeypatch.setattr(command, "measure", None)
    with pytest.raises(SystemExit) as stopped:
        command.main(words)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
