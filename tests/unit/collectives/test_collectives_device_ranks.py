"""Ranks whose tensors are on a device, over real connections; an emulator stands in for the devices."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.collectives import ring
from benchmarks.collectives.inspection import compile_bulk, compile_finish
from glasshouse.collectives.engine.engine import Engine
from glasshouse.collectives.kernels.cipher import Cipher, Message, Queue, Verdicts
from glasshouse.collectives.kernels.launch_shape import Shape
from glasshouse.collectives.operations import plans, point_to_point
from glasshouse.collectives.operations.arithmetic import Reduction
from glasshouse.collectives.operations.communicator import Communicator
from glasshouse.collectives.protocol.headers import Algorithm, ReductionCode
from simulators.emulated_gpu import emulated_gpu
from simulators.engine_ranks import in_ranks, operate

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _gpu() -> Iterator[None]:
    with emulated_gpu():
        for seal in (True, False):  # seconds of compiling must not look like a rank that says nothing
            compile_finish(seal=seal)
            for unit in (16, 4, 1):
                compile_bulk(seal=seal, unit=unit)
        yield


_ONE_AT_A_TIME = threading.Lock()
"""Ranks are threads here, and each would compile the kernels."""


class Device(Cipher):
    """A rank's own device."""

    sealed: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__("cpu", shape=Shape(programs=1))

    def seal(self, messages: Sequence[Message]) -> None:
        self.sealed.append(len(messages))
        with _ONE_AT_A_TIME:
            super().seal(messages)

    def open(self, messages: Sequence[Message]) -> Verdicts:
        with _ONE_AT_A_TIME:
            return super().open(messages)


class OnDevices(Communicator):
    """A rank whose CPU tensors are on a device."""

    __slots__ = ()

    def queue(self, tensors: Sequence[Any]) -> Queue:
        if "cpu" not in self._queues:
            self._queues["cpu"] = Queue("cpu", cipher=Device())
        return self._queues["cpu"]


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [
        (Algorithm.ONE_SHOT, ReductionCode.AVG),
        (Algorithm.DIRECT, ReductionCode.SUM),
        (Algorithm.RING, ReductionCode.SUM),
    ],
    ids=["one-shot average", "direct sum", "ring sum"],
)
def test_two_ranks_reduce_on_their_devices(algorithm: Algorithm, kind: ReductionCode) -> None:
    parts = [torch.randn(70).bfloat16(), torch.randn(70).bfloat16()]
    wide = [part.float() / (2 if kind is ReductionCode.AVG else 1) for part in parts]

    Device.sealed.clear()

    def story(engine: Engine) -> Any:
        tensor = parts[engine.rank].clone()
        operate(engine, ring.all_reduce([tensor[:30], tensor[30:]], Reduction(kind=kind), algorithm))
        return tensor

    for found in in_ranks(2, story, kind=OnDevices):
        torch.testing.assert_close(found.float(), wide[0] + wide[1], rtol=0.02, atol=0.02)
    assert len(Device.sealed) >= 2, "every frame was sealed on a device"


def test_tensors_move_between_devices() -> None:
    given = [torch.arange(90), torch.arange(90, 180)]

    def story(engine: Engine) -> Any:
        outputs = [torch.zeros(90, dtype=torch.int64) for _ in range(2)]
        operate(engine, plans.all_gather([given[engine.rank].clone()], [outputs]))
        if engine.rank == 0:
            operate(engine, point_to_point.send([outputs[1]], 1, 7))
        else:
            operate(engine, point_to_point.receive([outputs[0]], 0, 7))
        return outputs

    first, second = in_ranks(2, story, kind=OnDevices)
    assert all(torch.equal(found, given[rank]) for rank, found in enumerate(first))
    assert torch.equal(second[0], given[1])
    assert torch.equal(second[1], given[1])
