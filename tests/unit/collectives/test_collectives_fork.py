"""What a process that was forked from a rank has of its group: nothing, and no hand on what is not its own."""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import Any

import pytest
import torch

from glasshouse.collectives.engine.engine import Engine
from glasshouse.collectives.operations import plans
from glasshouse.collectives.operations.arithmetic import Reduction
from glasshouse.collectives.protocol.headers import ReductionCode
from glasshouse.errors import Code, CollectiveError
from simulators.engine_ranks import in_ranks, operate
from tools.forked import in_child

SUM = Reduction(kind=ReductionCode.SUM)


def summed(engine: Engine) -> Any:
    tensor = torch.full((200_000,), engine.rank + 1.0)
    operate(engine, plans.all_reduce([tensor], SUM))
    return tensor


def test_a_forked_child_can_neither_send_nor_disturb_its_parent() -> None:
    def story(engine: Engine) -> Any:
        summed(engine)
        if engine.rank == 0:

            def child() -> str:
                with pytest.raises(CollectiveError) as raised:
                    operate(engine, plans.barrier())
                return str(raised.value)

            assert "forked" in in_child(child)
        return summed(engine)[0].item()

    assert in_ranks(2, story) == [3.0, 3.0]


def test_what_a_closed_group_had_open_is_not_closed_again_in_a_child() -> None:
    def story(engine: Engine) -> Any:
        summed(engine)
        engine.close()
        return engine

    closed = in_ranks(2, story)  # kept, as a traceback or a variable keeps them
    pipes = [end for _ in range(32) for end in os.pipe()]  # take over the numbers
    assert in_child(lambda: [end for end in pipes if not Path(f"/proc/self/fd/{end}").exists()]) == []
    for engine in closed:
        engine.abort(CollectiveError(Code.COLLECTIVE_ABORTED, "late"))
        engine._progress.wake()
    readable, _, _ = select.select(pipes[::2], [], [], 0)
    assert not readable
    for end in pipes:
        os.close(end)
