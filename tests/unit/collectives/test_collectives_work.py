"""What torch is given for a collective under way: nobody who waits for it, in Python or C++, mistakes a failure."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from glasshouse.collectives.operations import point_to_point
from glasshouse.collectives.torch_backend.process_group import SealedGroup
from glasshouse.collectives.torch_backend.sealed_work import Joined, SealedWork
from glasshouse.errors import Code, CollectiveError
from simulators.sealed_engines import Due, NotingEngine

FORGED = CollectiveError(Code.COLLECTIVE_TAMPERED, "all_reduce 7: a frame of rank 1 is forged")


def wait_in_cpp(future: Any) -> Any:
    """Wait as DistributedDataParallel's reducer does: for the C++ future, without Python's wrapper."""
    return torch.futures.collect_all([future]).wait()[0].value()


def test_a_work_that_succeeds_is_waited_for_once_and_again() -> None:
    due, filled = Due(), torch.ones(3)
    work = SealedWork(due, [filled])
    assert not work.is_completed()
    due.finish()
    assert work.wait()
    assert work.wait(timedelta(seconds=5))
    assert due.waited_s == [None, 5.0]
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result() == [filled]
    assert work.get_future().wait() == [filled]


def test_a_failed_work_raises_wherever_it_is_waited_for() -> None:
    due = Due()
    work = SealedWork(due, [torch.ones(3)])
    early = work.get_future()
    due.finish(FORGED)
    for wait in (work.wait, work.result, work.synchronize, work.block_current_stream):
        with pytest.raises(CollectiveError) as raised:
            wait()
        assert raised.value.code is Code.COLLECTIVE_TAMPERED
    assert work.is_completed()
    assert not work.is_success()
    assert work.exception() is FORGED
    for future in (early, work.get_future()):
        with pytest.raises(RuntimeError, match="rank 1 is forged"):
            future.wait()
        with pytest.raises(RuntimeError, match="rank 1 is forged"):
            wait_in_cpp(future)
        with pytest.raises(RuntimeError, match="rank 1 is forged"):
            future.then(lambda done: done.value()).wait()


def test_a_failed_work_raises_in_wait_tensor() -> None:
    group = SealedGroup(NotingEngine(error=FORGED), name="failing")
    c10d._register_process_group("failing", group)
    reduced = torch.ops._c10d_functional.all_reduce(torch.ones(3), "sum", "failing")
    with pytest.raises(CollectiveError, match="rank 1 is forged"):
        torch.ops._c10d_functional.wait_tensor(reduced)
    c10d._unregister_process_group("failing")


def test_callbacks_may_wait_for_further_collectives() -> None:
    """As the hook of PowerSGD does; the thread that drives the connections must not be the one that waits."""
    first, second = Due(), Due()
    later = SealedWork(second, [torch.ones(1)])
    chained = SealedWork(first, [torch.zeros(1)]).get_future().then(lambda _: later.get_future().wait())
    driver = threading.Thread(target=lambda: (first.finish(), second.finish()))
    driver.start()
    driver.join(10)
    assert not driver.is_alive()
    assert chained.wait() == [torch.ones(1)]


@pytest.mark.parametrize(
    "look",
    [
        lambda work: work.wait(),
        lambda work: work.get_future().wait(),
        lambda work: work.is_completed(),
        lambda work: work.is_success(),
        lambda work: work.result(),
    ],
)
def test_what_was_filled_aside_has_arrived_before_anybody_is_told(look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = NotingEngine(held=True)
    monkeypatch.setattr(point_to_point, "receive", lambda tensors, peer, tag: tensors)
    tensor = torch.zeros(4, 2).t()
    work = SealedGroup(engine, name="").recv([tensor], 0, 0)
    ((aside,), _, _) = engine.given[0]
    assert aside.is_contiguous()
    aside.fill_(7)
    assert not work.is_completed()
    engine.begun[0].finish()
    look(work)
    assert (tensor == 7).all()


def test_a_failed_work_leaves_zeros_where_it_was_to_fill() -> None:
    tensor = torch.ones(4, 2).t()
    work = SealedGroup(NotingEngine(error=FORGED), name="").broadcast([tensor, torch.ones(2)])
    with pytest.raises(CollectiveError):
        work.wait()
    assert work.exception() is FORGED


def test_inference_tensors_are_filled_by_a_thread_that_is_not_in_inference_mode() -> None:
    engine = NotingEngine(held=True)
    with torch.inference_mode():
        tensor = torch.ones(4, 2).t()
        work = SealedGroup(engine, name="").recv([tensor], 0, 0)
    engine.begun[0].finish(FORGED)
    waiter = threading.Thread(target=work.is_completed)
    waiter.start()
    waiter.join()
    assert not tensor.any()


def test_several_operations_are_done_when_the_last_is_and_fail_with_the_first_error() -> None:
    one, other = Due(), Due()
    both = Joined([one, other])
    told: list[Any] = []
    both.add_done_callback(told.append)
    one.finish()
    assert not both.done()
    assert not told
    other.finish(FORGED)
    assert both.done()
    assert told == [both]
    assert both.error is FORGED
    with pytest.raises(CollectiveError):
        both.wait()
    nothing = Joined([])
    nothing.add_done_callback(told.append)
    assert told == [both, nothing]
    assert SealedWork(Joined([]), []).wait()


def test_a_receive_from_anybody_says_who_it_was() -> None:
    group = SealedGroup(NotingEngine(size=2), name="")
    assert group.recv_anysource([torch.ones(1)], 3)._source_rank() == 0
    assert SealedWork(Joined([]), [])._source_rank() == -1
