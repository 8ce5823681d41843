"""The engine: who does the work, and how a group ends when something is wrong with it."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.collectives import ring
from glasshouse.collectives.engine.completion import Completion
from glasshouse.collectives.engine.engine import Engine
from glasshouse.collectives.operations import plans, point_to_point
from glasshouse.collectives.operations.arithmetic import Reduction
from glasshouse.collectives.protocol.headers import HEADER_BYTES, Algorithm, ReductionCode
from glasshouse.errors import Code, CollectiveError
from simulators.engine_ranks import Ended, Middle, connect, ended, in_ranks, operate, world
from tools.waiting import wait_for

SUM = Reduction(kind=ReductionCode.SUM)
SMALL = 64 << 10
ELEMENTS = 200_000


def summed(engine: Engine, algorithm: Algorithm | None = None) -> Any:
    tensor = torch.full((ELEMENTS,), engine.rank + 1.0)
    operate(engine, ring.all_reduce([tensor], SUM, algorithm))
    return tensor


def test_what_is_submitted_to_the_background_is_done_while_nobody_waits() -> None:
    def story(engine: Engine) -> list[float]:
        tensors = [torch.full((ELEMENTS,), float(number)) for number in range(5)]
        done = [engine.submit(plans.all_reduce([tensor], SUM), background=True) for tensor in tensors]
        wait_for(lambda: all(each.done() for each in done))
        return [tensor[-1].item() for tensor in tensors]

    assert in_ranks(3, story) == [[0.0, 3.0, 6.0, 9.0, 12.0]] * 3


def test_several_threads_wait_for_what_they_submitted() -> None:
    def story(engine: Engine) -> list[float]:
        tensors = [torch.full((ELEMENTS,), float(number)) for number in range(4)]
        done = [
            engine.submit(plans.all_reduce([tensor], SUM), background=number % 2 == 0)
            for number, tensor in enumerate(tensors)
        ]
        threads = [threading.Thread(target=each.wait) for each in reversed(done)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert all(each.done() for each in done)
        return [tensor[0].item() for tensor in tensors]

    assert in_ranks(2, story) == [[0.0, 2.0, 4.0, 6.0]] * 2


def test_a_callback_may_submit_and_wait() -> None:
    def story(engine: Engine) -> Any:
        first, second = torch.ones(10), torch.ones(ELEMENTS)
        seen: list[Completion] = []

        def more(completion: Completion) -> None:
            operate(engine, plans.all_reduce([second], SUM))
            seen.append(completion)

        completion = engine.submit(plans.all_reduce([first], SUM), background=True)
        completion.add_done_callback(more)
        completion.wait()
        wait_for(lambda: bool(seen))
        completion.add_done_callback(seen.append)
        return len(seen), seen[0] is completion, second[0].item()

    assert in_ranks(2, story) == [(2, True, 2.0)] * 2


def test_ranks_that_are_at_different_operations_are_told_what_each_is_at() -> None:
    def story(engine: Engine) -> None:
        summed(engine)
        tensor = torch.ones(50 if engine.rank else 60)
        operate(engine, plans.all_reduce([tensor], SUM) if engine.rank else plans.broadcast([tensor], 0))
        operate(engine, plans.barrier())

    for end in world(2, story):
        assert isinstance(end.error, CollectiveError)
        assert end.error.code is Code.COLLECTIVE_MISMATCH
    text = str(end.error)
    assert "broadcast of 60 float32 (operation 1)" in text
    assert "all_reduce(sum) of 50 float32 (operation 1)" in text


@pytest.mark.parametrize(
    "other",
    [
        plans.all_reduce([torch.ones(61)], SUM),
        plans.all_reduce([torch.ones(60, dtype=torch.int32)], SUM),
        plans.all_reduce([torch.ones(6, 10)], SUM),
        plans.all_reduce([torch.ones(60)], Reduction(kind=ReductionCode.MAX)),
        plans.all_reduce([torch.ones(60)], SUM, Algorithm.DIRECT),
        plans.barrier(),
    ],
    ids=["size", "type", "shape", "reduction", "algorithm", "collective"],
)
def test_any_difference_between_ranks_ends_the_group(other: Any) -> None:
    def story(engine: Engine) -> None:
        operate(engine, other if engine.rank == 1 else plans.all_reduce([torch.ones(60)], SUM))

    for end in world(3, story):
        assert isinstance(end.error, CollectiveError)
        assert end.error.code is Code.COLLECTIVE_MISMATCH
        assert "rank 1" in str(end.error)


def strike(frames: Callable[[bytes], Sequence[bytes]], at: int = 3) -> Callable[[int, bytes], Sequence[bytes]]:
    return lambda number, frame: frames(frame) if number == at else [frame]


def flipped(frame: bytes, at: int) -> bytes:
    return frame[:at] + bytes([frame[at] ^ 0x10]) + frame[at + 1 :]


ATTACKS = {
    "ciphertext": strike(lambda frame: [flipped(frame, HEADER_BYTES + 100)]),
    "tag": strike(lambda frame: [flipped(frame, len(frame) - 1)]),
    "sequence": strike(lambda frame: [flipped(frame, 31)]),
    "chunk": strike(lambda frame: [flipped(frame, 43)]),
    "repeated": strike(lambda frame: [frame, frame]),
    "dropped": strike(lambda frame: []),
    # Always the same noise: one in 256 announces a frame of a possible length, whose end never comes.
    "noise": strike(lambda frame: [random.Random(3).randbytes(len(frame))]),
    "length": strike(lambda frame: [flipped(frame, 14)]),
}


@pytest.mark.parametrize("algorithm", [Algorithm.ONE_SHOT, Algorithm.DIRECT, Algorithm.RING], ids=lambda one: one.name)
@pytest.mark.parametrize("attack", ATTACKS)
def test_somebody_on_a_connection_ends_the_group_and_nobody_keeps_a_number(attack: str, algorithm: Algorithm) -> None:
    tensors = [torch.full((ELEMENTS,), rank + 1.0) for rank in range(3)]
    # In the ring, rank 2 receives from rank 1.
    middle = Middle((2, 1), ATTACKS[attack])

    def story(engine: Engine) -> None:
        operate(engine, ring.all_reduce([tensors[engine.rank]], SUM, algorithm))
        summed(engine, algorithm)

    ends = world(3, story, chunk_bytes=SMALL, middle=middle)
    for end in ends:
        assert isinstance(end.error, CollectiveError)
        assert end.error.code is Code.COLLECTIVE_TAMPERED
        assert "rank 1" in str(end.error)
        assert end.error.rank == 1
    struck = ends[2].error
    assert f"all_reduce(sum) of {ELEMENTS} float32" in str(struck)
    for tensor in tensors:
        assert (tensor == 0).all() or (tensor == 6).all()


def test_a_rank_that_goes_away_in_the_middle_is_named_by_all_others() -> None:
    store = dist.HashStore()
    gone = threading.Event()

    def story(rank: int) -> None:
        mesh = connect(store, rank, 3)
        if rank == 1:
            for link in (*mesh.collective, *mesh.p2p):
                link.close()
            gone.set()
            return
        engine = Engine(mesh, timeout_s=20)
        try:
            gone.wait(20)
            summed(engine)
        finally:
            engine.close()

    ends = ended(3, story)
    for end in (ends[0], ends[2]):
        assert isinstance(end.error, CollectiveError)
        assert end.error.code is Code.RANK_LOST
        assert "rank 1 is gone" in str(end.error)


def test_a_rank_that_leaves_early_is_told_from_one_that_is_lost() -> None:
    def story(engine: Engine) -> None:
        summed(engine)
        if engine.rank:
            summed(engine)

    ends = world(3, story)
    assert ends[0].error is None
    for end in ends[1:]:
        assert isinstance(end.error, CollectiveError)
        assert end.error.code is Code.RANK_LOST
        assert "rank 0 left the group" in str(end.error)


def test_a_rank_that_leaves_when_all_is_done_disturbs_nobody() -> None:
    def story(engine: Engine) -> None:
        for _ in range(50):
            summed(engine, Algorithm.DIRECT)

    in_ranks(3, story)


@pytest.mark.parametrize("algorithm", [None, Algorithm.DIRECT, Algorithm.RING, Algorithm.SERIAL])
@pytest.mark.parametrize("absent", [{0}, {3}, {1, 2}])
def test_ranks_that_do_not_come_are_named_and_none_of_those_that_wait_for_them(
    absent: set[int], algorithm: Algorithm | None
) -> None:
    tensors = [torch.ones(ELEMENTS) for _ in range(4)]
    failed = threading.Barrier(4)  # No rank leaves before each of those that wait has failed.

    def story(engine: Engine) -> None:
        try:
            if engine.rank not in absent:
                operate(engine, ring.all_reduce([tensors[engine.rank]], SUM, algorithm))
        finally:
            failed.wait(timeout=60)

    ends = world(4, story, timeout_s=0.5)
    for rank in {0, 1, 2, 3} - absent:
        error = ends[rank].error
        assert isinstance(error, CollectiveError)
        assert error.code is Code.COLLECTIVE_TIMEOUT
        named = set(re.findall(r"rank (\d)", str(error).partition("nothing came from ")[2]))
        # In a ring a rank sees the one before it alone; what it finds first is told to all.
        assert named <= {str(number) for number in absent}, str(error)
        assert named, str(error)
        if algorithm is None or len(absent) == 1:
            assert named == {str(number) for number in absent}
            assert error.rank == (min(absent) if len(absent) == 1 else None)
        assert (tensors[rank] == 0).all()


def test_a_background_operation_fails_without_a_waiter_and_tells_its_callbacks() -> None:
    over = threading.Event()

    def story(engine: Engine) -> Any:
        if engine.rank == 0:
            over.wait(20)
            return None
        tensor = torch.ones(9)
        told: list[Completion] = []
        completion = engine.submit(plans.all_reduce([tensor], SUM), timeout_s=0.2, background=True)
        completion.add_done_callback(told.append)
        wait_for(completion.done)
        wait_for(lambda: bool(told))
        over.set()
        with pytest.raises(CollectiveError) as caught:
            completion.wait()
        return caught.value.code, tensor.tolist()

    assert in_ranks(2, story)[1] == (Code.COLLECTIVE_TIMEOUT, [0.0] * 9)


def test_after_a_failure_everything_raises_and_says_what_failed_first() -> None:
    def story(engine: Engine) -> Any:
        pending = []
        if engine.rank == 0:
            some = [point_to_point.receive([torch.ones(5)], 1, tag) for tag in range(3)]
            pending = [engine.submit(operation, background=True) for operation in some]
            engine.abort(CollectiveError(Code.COLLECTIVE_ABORTED, "somebody pulled the plug"))
        errors = []
        for attempt in [*(each.wait for each in pending), lambda: summed(engine)]:
            try:
                attempt()
            except CollectiveError as error:
                errors.append(str(error))
        return errors

    first, second = in_ranks(2, story)
    for errors in (first, second):
        assert errors, "the group went on"
        assert all("somebody pulled the plug" in error for error in errors)
    assert "the group is over" in first[-1]


def test_what_is_asked_of_a_group_that_is_over_does_not_begin_and_leaves_its_tensors_alone() -> None:
    def story(engine: Engine) -> Any:
        engine.abort(CollectiveError(Code.COLLECTIVE_ABORTED, "somebody pulled the plug"))
        tensor = torch.full((9,), 3.0)
        for background in (False, True):
            with pytest.raises(CollectiveError, match="the group is over: "):
                engine.submit(plans.all_reduce([tensor], SUM), background=background)
        return tensor.tolist(), len(engine._unfinished)

    assert in_ranks(2, story) == [([3.0] * 9, 0)] * 2


def test_another_thread_can_end_what_one_waits_for() -> None:
    def story(engine: Engine) -> Any:
        if engine.rank == 1:
            with pytest.raises(CollectiveError, match="rank 0 ended the group: enough"):
                operate(engine, point_to_point.receive([torch.ones(1)], 0))
            return None
        ends = []

        def wait() -> None:
            with pytest.raises(CollectiveError, match="enough") as caught:
                operate(engine, point_to_point.receive([torch.ones(1)], 1))
            ends.append(caught.value.code)

        thread = threading.Thread(target=wait)
        thread.start()
        wait_for(lambda: engine._asleep)
        engine.abort(CollectiveError(Code.COLLECTIVE_ABORTED, "enough"))
        thread.join(20)
        return ends

    assert in_ranks(2, story)[0] == [Code.COLLECTIVE_ABORTED]


def test_an_end_that_is_said_while_the_driving_thread_is_leaving_is_not_lost() -> None:
    def story(engine: Engine) -> Any:
        if engine.rank == 1:
            summed(engine)
            with pytest.raises(CollectiveError, match="rank 0 ended the group: enough"):
                operate(engine, point_to_point.receive([torch.ones(1)], 0))
            return None
        turn = engine._loop

        def leaving(completion: Completion | None) -> None:
            turn(completion)
            other = threading.Thread(target=engine.abort, args=(CollectiveError(Code.COLLECTIVE_ABORTED, "enough"),))
            other.start()
            other.join()  # it found somebody who drives, and went

        engine._loop = leaving  # type: ignore[method-assign]
        summed(engine)
        return engine._failed.code if engine._failed else "nobody heard it"

    assert in_ranks(2, story)[0] is Code.COLLECTIVE_ABORTED


def test_a_signal_handler_can_close_the_group_that_its_thread_waits_in() -> None:
    # The handler runs on the thread that drives, between two of its steps; a test's thread gets none, so it steps in.
    def story(engine: Engine) -> Any:
        if engine.rank == 1:
            with pytest.raises(CollectiveError, match="rank 0 closed the group"):
                operate(engine, plans.barrier())
            return None
        step = engine._progress.step

        def interrupted() -> bool:
            engine._progress.step = step  # type: ignore[method-assign]
            engine.close()
            return step()

        engine._progress.step = interrupted  # type: ignore[method-assign]
        with pytest.raises(CollectiveError, match="closed the group") as caught:
            operate(engine, point_to_point.receive([torch.ones(1)], 1))
        return caught.value.code

    assert in_ranks(2, story)[0] is Code.COLLECTIVE_ABORTED


def test_an_output_that_cannot_be_zeroed_stops_nothing_else() -> None:
    def story(engine: Engine) -> Any:
        first, second = torch.ones(10), torch.ones(10)
        if engine.rank:
            with pytest.raises(CollectiveError):
                operate(engine, plans.all_reduce([first], SUM))
            return None
        messages = [point_to_point.receive([tensor], 1, tag) for tag, tensor in enumerate((first, second))]
        pending = [engine.submit(message, background=False) for message in messages]
        messages[0]._region = _Broken()
        engine.abort(CollectiveError(Code.COLLECTIVE_ABORTED, "enough"))
        for each in pending:
            with pytest.raises(CollectiveError, match="enough"):
                each.wait()
        return second.tolist()

    assert in_ranks(2, story)[0] == [0.0] * 10


def test_the_way_for_messages_is_missed_at_once_when_somebody_cuts_it() -> None:
    def story(engine: Engine) -> Any:
        summed(engine)
        if engine.rank == 1:
            engine._progress._p2p[0].finish()
        for _ in range(200):  # two sums may be through before anybody has to wait, and so to look
            summed(engine)
            time.sleep(0.005)
        return "nobody missed it"

    ends = world(2, story)
    assert isinstance(ends[0].error, CollectiveError)
    assert ends[0].error.code is Code.RANK_LOST


def test_tensors_of_inference_mode_are_summed_behind_the_callers_back() -> None:
    def story(engine: Engine) -> Any:
        with torch.inference_mode():
            tensor = torch.ones(ELEMENTS)
        completion = engine.submit(plans.all_reduce([tensor], SUM), background=True)
        wait_for(completion.done)
        completion.wait()
        return tensor[0].item()

    assert in_ranks(2, story) == [2.0, 2.0]


def test_closing_with_work_unfinished_fails_it_everywhere() -> None:
    def story(engine: Engine) -> Any:
        if engine.rank:
            summed(engine)
            return None
        tensor = torch.ones(ELEMENTS)
        completion = engine.submit(plans.reduce(tensor, SUM, 0), background=False)
        engine.close()
        with pytest.raises(CollectiveError) as caught:
            completion.wait()
        with pytest.raises(CollectiveError):
            summed(engine)
        return caught.value.code, tensor.sum().item()

    ends = world(2, story)
    assert ends[0].value == (Code.COLLECTIVE_ABORTED, 0.0)
    assert isinstance(ends[1].error, CollectiveError)


def test_a_defect_in_the_middle_of_an_operation_ends_the_group_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def story(engine: Engine) -> None:
        tensor = torch.ones(10)
        operation = plans.all_reduce([tensor], SUM)
        completion = engine.submit(operation, background=False)
        if engine.rank == 0:
            monkeypatch.setattr(engine._progress, "step", _interrupted)
        completion.wait()

    ends = world(2, story)
    assert isinstance(ends[0].error, KeyboardInterrupt)
    assert isinstance(ends[1].error, CollectiveError)
    assert "rank 0 was stopped by KeyboardInterrupt" in str(ends[1].error)


class _Broken:
    """A region on a device that is out of order."""

    queue = None

    def zero(self) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")


def _interrupted() -> bool:
    raise KeyboardInterrupt


def test_a_rank_that_did_something_else_and_left_is_told_from_one_that_is_lost() -> None:
    gone = threading.Event()

    def story(engine: Engine) -> None:
        if engine.rank:
            operate(engine, plans.broadcast([torch.ones(50)], 1))  # complete for the root when it is sent
            engine.close()
            gone.set()
        else:
            gone.wait(20)
            operate(engine, plans.all_reduce([torch.ones(50)], SUM))

    error = world(2, story)[0].error
    assert isinstance(error, CollectiveError)
    assert error.code is Code.COLLECTIVE_MISMATCH
    assert "rank 1 is at broadcast" in error.message


def test_buffers_do_not_grow_with_the_tensors() -> None:
    def story(engine: Engine) -> Any:
        held = []
        for elements in (3_000_000, 6_000_000):
            tensor = torch.ones(elements)
            for algorithm in (Algorithm.ONE_SHOT, Algorithm.DIRECT, Algorithm.RING):
                operate(engine, ring.all_reduce([tensor], SUM, algorithm))
            links = engine._progress._links
            pools = engine._communicator._pools.values()
            held.append(
                sum(len(link._in) + len(link._out) for link in links)
                + sum(len(buffer) for pool in pools for kind in (pool.shared, pool.scratch) for buffer in kind._free)
            )
        return held

    for small, large in in_ranks(2, story):
        assert small == large


def test_rank_and_size_are_the_groups() -> None:
    assert in_ranks(3, lambda engine: (engine.rank, engine.size)) == [(0, 3), (1, 3), (2, 3)]
    assert Ended().error is None
