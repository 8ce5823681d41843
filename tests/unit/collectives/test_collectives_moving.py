"""Collectives that move bytes: everything arrives where it belongs, of whatever type it is."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from glasshouse.collectives.engine.engine import Engine
from glasshouse.collectives.operations import plans
from glasshouse.collectives.protocol.frame_memory import bytes_of
from simulators.engine_ranks import in_ranks, operate

SMALL = 64 << 10


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int64], ids=str
)
def test_broadcast_gives_everybody_the_roots_tensors(dtype: Any) -> None:
    def story(engine: Engine) -> Any:
        tensors = [torch.full((size,), engine.rank).to(dtype) for size in (1, 50_000, 0, 3)]
        operate(engine, plans.broadcast(tensors, root=1))
        return tensors

    unit = torch.ones(1).to(dtype)
    one = bytes_of(unit).tobytes()
    for tensors in in_ranks(3, story, chunk_bytes=SMALL):
        assert [tensor.numel() for tensor in tensors] == [1, 50_000, 0, 3]
        assert all(bytes_of(tensor) == one * tensor.numel() for tensor in tensors)


def test_tensors_of_different_types_travel_as_one() -> None:
    def story(engine: Engine) -> Any:
        tensors = [torch.full((3,), engine.rank + 0.5), torch.tensor(engine.rank, dtype=torch.int8), torch.ones(2, 2)]
        operate(engine, plans.broadcast(tensors, root=0))
        return tensors

    for tensors in in_ranks(2, story):
        assert tensors[0].tolist() == [0.5] * 3
        assert tensors[1].item() == 0


def test_all_gather_gives_everybody_everything_whatever_its_size() -> None:
    def story(engine: Engine) -> Any:
        inputs = [
            torch.full((40_000 + 7 * engine.rank,), float(engine.rank)),
            torch.tensor([engine.rank], dtype=torch.int64),
        ]
        outputs = [
            [torch.empty(40_000 + 7 * rank) for rank in range(3)],
            [torch.empty(1, dtype=torch.int64) for _ in range(3)],
        ]
        operate(engine, plans.all_gather(inputs, outputs))
        return outputs

    for many, few in in_ranks(3, story, chunk_bytes=SMALL):
        assert all((part == rank).all() for rank, part in enumerate(many))
        assert [part.item() for part in few] == [0, 1, 2]


def test_all_gather_into_parts_of_one_tensor_that_holds_the_input() -> None:
    def story(engine: Engine) -> Any:
        whole = torch.full((4, 1000), -1.0)
        whole[engine.rank] = engine.rank
        operate(engine, plans.all_gather([whole[engine.rank]], [list(whole)]))
        return whole

    for whole in in_ranks(4, story):
        assert whole[:, 0].tolist() == [0, 1, 2, 3]
        assert (whole == whole[:, :1]).all()


def test_gather_and_scatter_meet_at_the_root() -> None:
    def story(engine: Engine) -> Any:
        places = [torch.empty(30_000) for _ in range(3)] if engine.rank == 1 else None
        operate(engine, plans.gather(torch.full((30_000,), float(engine.rank)), places, root=1))
        received = torch.empty(30_000)
        operate(engine, plans.scatter(received, places, root=1))
        return received

    for rank, received in enumerate(in_ranks(3, story, chunk_bytes=SMALL)):
        assert (received == rank).all()


def test_all_to_all_exchanges_pieces_of_any_size() -> None:
    def story(engine: Engine) -> Any:
        me = engine.rank
        inputs = [torch.full((me * 20_000 + to * 3,), 10 * me + to, dtype=torch.int16) for to in range(3)]
        outputs = [torch.empty(source * 20_000 + me * 3, dtype=torch.int16) for source in range(3)]
        operate(engine, plans.all_to_all(inputs, outputs))
        return outputs

    for rank, outputs in enumerate(in_ranks(3, story, chunk_bytes=SMALL)):
        assert all((part == 10 * source + rank).all() for source, part in enumerate(outputs))


def test_nobody_leaves_a_barrier_before_everybody_has_come() -> None:
    here = [threading.Event() for _ in range(3)]

    def story(engine: Engine) -> list[bool]:
        here[engine.rank].set()
        operate(engine, plans.barrier())
        return [event.is_set() for event in here]

    assert in_ranks(3, story) == [[True] * 3] * 3


def test_wrong_numbers_and_sizes_of_tensors_are_the_callers_mistake() -> None:
    two, three = torch.zeros(2), torch.zeros(3)

    def story(engine: Engine) -> None:
        wrong = [
            plans.all_gather([two], [[two]]),
            plans.all_gather([two], [[three, three]]),
            plans.gather(two, [two], engine.rank),
            plans.gather(two, None, engine.rank),
            plans.gather(two, [two, three], engine.rank),
            plans.scatter(two, [two], engine.rank),
            plans.scatter(two, [three, two], engine.rank),
            plans.all_to_all([two], [two]),
        ]
        for operation in wrong:
            with pytest.raises(ValueError, match=r"ranks|bytes"):
                engine.submit(operation, background=False)
        operate(engine, plans.barrier())

    in_ranks(2, story)
