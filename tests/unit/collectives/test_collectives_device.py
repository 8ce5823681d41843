"""Frames between a rank whose tensors are on a device and others; an emulator stands in for the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from glasshouse.collectives.kernels.cipher import Queue
from glasshouse.collectives.operations.regions import DeviceRegion, HostRegion
from glasshouse.collectives.protocol.group_keys import ALL, Lane, Membership, Schedule
from glasshouse.collectives.protocol.headers import HEADER_BYTES, Element, FrameHeader, FrameKind, frame_bytes
from glasshouse.collectives.protocol.traffic import FrameOpener, FrameSealer, Traffic
from glasshouse.errors import Code, CollectiveError, PlatformError
from glasshouse.wire.crypto import Suite

pytest.importorskip("triton")

from simulators.emulated_gpu import emulated_cipher, emulated_gpu

CHACHA = Suite.CHACHA20_POLY1305

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _gpu() -> Iterator[None]:
    with emulated_gpu():
        yield


@pytest.fixture
def queue() -> Queue:
    return Queue("cpu", cipher=emulated_cipher())


@pytest.fixture
def streams() -> tuple[FrameSealer, FrameOpener]:
    """Rank 0's broadcast frames, sealed at rank 0 and opened at rank 1."""
    ends = []
    for rank in (0, 1):
        membership = Membership(group="0", ranks=(0, 1), rank=rank, incarnation=1)
        ends.append(Traffic(Schedule(membership, b"s" * 32, [b"a" * 32, b"b" * 32]), rekey_after=2))
    return ends[0].sealer(Lane.COLLECTIVE, ALL, CHACHA), ends[1].opener(Lane.COLLECTIVE, 0, CHACHA, broadcast=True)


def blank_frame(size: int) -> memoryview:
    frame = memoryview(bytearray(frame_bytes(size)))
    header = FrameHeader(kind=FrameKind.DATA, source=0, destination=ALL, suite=CHACHA, element=Element.FLOAT32)
    frame[:HEADER_BYTES] = header.encode()
    return frame


def tensors() -> list[torch.Tensor]:
    return [torch.randn(7), torch.empty(0), torch.randn(30), torch.randn(1, 2)]


def whole(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("sealed_on", ["device", "host"])
def test_device_and_host_understand_each_other(
    queue: Queue, streams: tuple[FrameSealer, FrameOpener], sealed_on: str
) -> None:
    sealer, opener = streams
    source, target = tensors(), [torch.zeros_like(part) for part in tensors()]
    here: DeviceRegion | HostRegion = DeviceRegion(source, queue)
    there: DeviceRegion | HostRegion = HostRegion(target)
    if sealed_on == "host":
        here, there = HostRegion(source), DeviceRegion(target, queue)
    # Within a tensor, across three, and from the middle of one to the end of all; past a rekey.
    for low, high in ((0, 28), (20, 100), (100, 156)):
        frame = blank_frame(high - low)
        here.seal(low, high, sealer, frame)
        assert source[0].numpy().tobytes()[:16] not in bytes(frame)
        there.open(low, high, opener, frame)
    expected = whole(source)
    assert torch.equal(whole(target), expected)


def test_a_contribution_is_opened_beside_the_tensor_it_is_added_to(
    queue: Queue, streams: tuple[FrameSealer, FrameOpener]
) -> None:
    sealer, opener = streams
    theirs, mine = torch.randn(40), torch.randn(40)
    expected = theirs.double() + mine.double()
    frame = blank_frame(160)
    HostRegion([theirs]).seal(0, 160, sealer, frame)
    region = DeviceRegion([mine], queue)
    buffer, other = memoryview(bytearray(640)), memoryview(bytearray(640))
    opened = region.opened(160, opener, frame, buffer)
    assert bytes(buffer) == bytes(640)  # nothing came into host memory
    partial = region.blank(160, torch.float64, other)
    torch.add(opened.double(), region.read(0, 160).double(), out=partial)
    assert torch.equal(partial, expected)
    region.write(0, 160, partial.float())
    assert torch.equal(mine, expected.float())


@pytest.mark.parametrize("where", [HEADER_BYTES - 20, HEADER_BYTES, HEADER_BYTES + 159, -1])
def test_a_changed_frame_zeroes_and_ends_the_stream(
    queue: Queue, streams: tuple[FrameSealer, FrameOpener], where: int
) -> None:
    sealer, opener = streams
    frame, following = blank_frame(160), blank_frame(160)
    source = DeviceRegion([torch.randn(40)], queue)
    source.seal(0, 160, sealer, frame)
    source.seal(0, 160, sealer, following)
    frame[where] ^= 1
    target = torch.ones(40)
    for sent in (frame, following):
        with pytest.raises(CollectiveError) as refused:
            DeviceRegion([target], queue).open(0, 160, opener, sent)
        assert refused.value.code in (Code.COLLECTIVE_TAMPERED, Code.COLLECTIVE_ABORTED)
        assert not target.any()
        target.fill_(1)


def test_a_frame_out_of_turn_is_not_opened(queue: Queue, streams: tuple[FrameSealer, FrameOpener]) -> None:
    sealer, opener = streams
    frames = [blank_frame(64) for _ in range(2)]
    region = DeviceRegion([torch.randn(16)], queue)
    for frame in frames:
        region.seal(0, 64, sealer, frame)
    target = torch.ones(16)
    with pytest.raises(CollectiveError) as refused:
        DeviceRegion([target], queue).open(0, 64, opener, frames[1])
    assert refused.value.code is Code.COLLECTIVE_TAMPERED
    assert not target.any()


def test_a_frame_of_another_size_is_not_opened(queue: Queue, streams: tuple[FrameSealer, FrameOpener]) -> None:
    sealer, opener = streams
    frame = blank_frame(64)
    DeviceRegion([torch.randn(16)], queue).seal(0, 64, sealer, frame)
    target = torch.ones(15)
    with pytest.raises(CollectiveError):
        DeviceRegion([target], queue).open(0, 60, opener, frame)
    assert not target.any()


def test_a_script_may_be_in_inference_mode_or_on_another_default_device(
    queue: Queue, streams: tuple[FrameSealer, FrameOpener]
) -> None:
    sealer, opener = streams
    with torch.inference_mode():
        source, target = torch.randn(20), torch.zeros(20)
    for mode in (torch.inference_mode(), torch.device("meta"), torch.enable_grad()):
        with mode, queue.within():
            frame = blank_frame(80)
            DeviceRegion([source[:3], source[3:]], queue).seal(0, 80, sealer, frame)
            there = DeviceRegion([target[:5], target[5:]], queue)
            there.open(0, 80, opener, frame)
        assert torch.equal(target, source)
        with queue.within():
            there.zero()
    with torch.inference_mode():
        target.copy_(source)  # still what it was: a tensor of inference mode


def test_elsewhere_or_with_gaps_is_refused(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        DeviceRegion([torch.zeros(4, 4).t()], queue)
    monkeypatch.setattr("glasshouse.collectives.kernels.cipher.interpreted", lambda: False)
    with pytest.raises(PlatformError) as refused:
        Queue("cpu")
    assert refused.value.code is Code.DEVICE_MISSING
