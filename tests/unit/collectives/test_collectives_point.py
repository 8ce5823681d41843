"""Messages between two ranks: matched by tag in any order, and never in each other's way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from glasshouse.collectives.engine.engine import Engine
from glasshouse.collectives.operations import plans, point_to_point
from glasshouse.errors import Code, CollectiveError
from simulators.engine_ranks import in_ranks, operate, world

SMALL = 64 << 10


def test_messages_are_received_in_another_order_than_they_were_sent() -> None:
    def story(engine: Engine) -> Any:
        if engine.rank == 0:
            sent = [
                engine.submit(point_to_point.send([torch.full((60_000,), float(tag))], 1, tag), background=True)
                for tag in range(4)
            ]
            for each in sent:
                each.wait()
            return None
        got = []
        for tag in (3, 1, 0, 2):
            tensor = torch.empty(60_000)
            operate(engine, point_to_point.receive([tensor], 0, tag))
            got.append(tensor)
        return got

    _, got = in_ranks(2, story, chunk_bytes=SMALL)
    assert [tensor[0].item() for tensor in got] == [3, 1, 0, 2]
    assert all((tensor == tensor[0]).all() for tensor in got)


def test_messages_under_one_tag_keep_their_order() -> None:
    def story(engine: Engine) -> Any:
        tensors = [torch.tensor([number if engine.rank else -1]) for number in range(20)]
        make = point_to_point.send if engine.rank else point_to_point.receive
        for each in [engine.submit(make([tensor], 1 - engine.rank, 7), background=True) for tensor in tensors]:
            each.wait()
        return [tensor.item() for tensor in tensors]

    assert in_ranks(2, story)[0] == list(range(20))


def test_whoever_sends_first_is_received_first() -> None:
    def story(engine: Engine) -> Any:
        if engine.rank:
            operate(engine, point_to_point.send([torch.tensor([engine.rank])], 0, 5), plans.barrier())
            return None
        sources = []
        for _ in range(2):
            tensor = torch.empty(1, dtype=torch.int64)
            received = engine.submit(point_to_point.receive([tensor], None, 5), background=False)
            received.wait()
            assert tensor.item() == received.source
            sources.append(received.source)
        operate(engine, plans.barrier())
        return sorted(sources)

    assert in_ranks(3, story)[0] == [1, 2]


def test_a_message_that_nobody_receives_yet_blocks_neither_collectives_nor_other_messages() -> None:
    def story(engine: Engine) -> Any:
        big, small = torch.ones(500_000), torch.ones(3)
        if engine.rank == 0:
            waiting = engine.submit(point_to_point.send([big], 1, 1), background=True)
            operate(engine, plans.barrier(), point_to_point.send([small], 1, 2), plans.barrier())
            waiting.wait()
            return None
        operate(engine, plans.barrier(), point_to_point.receive([small.zero_()], 0, 2), plans.barrier())
        operate(engine, point_to_point.receive([big.zero_()], 0, 1))
        return small.sum().item(), big.sum().item()

    assert in_ranks(2, story, chunk_bytes=SMALL)[1] == (3, 500_000)


def test_both_send_before_either_receives() -> None:
    def story(engine: Engine) -> Any:
        mine, theirs = torch.full((400_000,), float(engine.rank)), torch.empty(400_000)
        sent = engine.submit(point_to_point.send([mine], 1 - engine.rank), background=True)
        operate(engine, point_to_point.receive([theirs], 1 - engine.rank))
        sent.wait()
        return theirs[0].item()

    assert in_ranks(2, story, chunk_bytes=SMALL) == [1.0, 0.0]


def test_an_empty_message_is_a_message_and_several_tensors_are_one() -> None:
    def story(engine: Engine) -> Any:
        tensors = [torch.full((2,), float(engine.rank)), torch.full((3, 1), engine.rank, dtype=torch.int16)]
        make = point_to_point.receive if engine.rank else point_to_point.send
        operate(engine, make([torch.empty(0)], 1 - engine.rank), make(tensors, 1 - engine.rank))
        return tensors

    tensors = in_ranks(2, story)[1]
    assert tensors[0].tolist() == [0, 0]
    assert tensors[1].tolist() == [[0]] * 3


@pytest.mark.parametrize("other", [torch.zeros(5), torch.zeros(4, dtype=torch.int32)], ids=["size", "type"])
def test_a_message_of_another_size_or_type_ends_the_group_with_what_each_end_says(other: Any) -> None:
    def story(engine: Engine) -> None:
        operate(
            engine,
            point_to_point.receive([torch.zeros(4)], 1, 3) if engine.rank == 0 else point_to_point.send([other], 0, 3),
        )

    for end in world(2, story):
        assert isinstance(end.error, CollectiveError)
        assert end.error.code is Code.COLLECTIVE_MISMATCH
        kind = str(other.dtype).removeprefix("torch.")
        assert f"rank 1 sends {other.numel()} {kind} with tag 3" in str(end.error)
        assert "rank 0 has room for 4 float32" in str(end.error)


def test_a_message_that_never_comes_is_told_as_such() -> None:
    def story(engine: Engine) -> Any:
        if engine.rank == 0:
            tensor = torch.ones(3)
            with pytest.raises(
                CollectiveError,
                match=r"receive of 3 float32 from rank 1 with tag 0.*from rank 1 within the timeout",
            ) as caught:
                engine.submit(point_to_point.receive([tensor], 1), background=False).wait(0.2)
            return caught.value.code, tensor.tolist()
        with pytest.raises(CollectiveError) as caught:
            operate(engine, plans.barrier())
        return caught.value.code, None

    first, second = in_ranks(2, story)
    assert first == (Code.COLLECTIVE_TIMEOUT, [0, 0, 0])
    assert second[0] is Code.COLLECTIVE_TIMEOUT


def test_messages_to_nobody_to_oneself_and_with_impossible_tags_are_the_callers_mistake() -> None:
    def story(engine: Engine) -> None:
        for peer in (engine.rank, 2, -1):
            with pytest.raises(ValueError, match="exchanges no message"):
                engine.submit(point_to_point.send([torch.zeros(1)], peer), background=False)
        with pytest.raises(ValueError, match="a tag is"):
            point_to_point.send([torch.zeros(1)], 1 - engine.rank, -1)
        operate(engine, plans.barrier())

    in_ranks(2, story)


def test_offers_that_nobody_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(point_to_point, "MAX_OFFERS", 10)

    def story(engine: Engine) -> None:
        if engine.rank == 0:
            for _ in range(11):
                engine.submit(point_to_point.send([torch.zeros(1)], 1), background=True)
        operate(engine, plans.barrier(), plans.barrier(), plans.barrier())
        engine.submit(point_to_point.receive([torch.zeros(2)], 1 - engine.rank, 99), background=False).wait(5)

    for end in world(2, story):
        assert isinstance(end.error, CollectiveError)
        assert "offered 10 messages that are not received" in str(end.error)
