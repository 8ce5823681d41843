"""What only a real GPU can show: the kernels on it, and that work on different streams is done in order."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU here; the compiled kernels are emulated elsewhere", allow_module_level=True)

from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from safetensors.torch import save

from benchmarks.collectives import ring
from glasshouse.collectives.engine.engine import Engine
from glasshouse.collectives.kernels.cipher import Cipher, Message, Queue
from glasshouse.collectives.operations.arithmetic import Reduction
from glasshouse.collectives.operations.regions import DeviceRegion, HostRegion
from glasshouse.collectives.protocol.group_keys import ALL, Lane
from glasshouse.collectives.protocol.headers import (
    HEADER_BYTES,
    Algorithm,
    FrameHeader,
    FrameKind,
    ReductionCode,
    frame_bytes,
)
from glasshouse.task.granted import GrantInputs
from glasshouse.task.tensors import load
from glasshouse.wire.crypto import Suite
from glasshouse.workloads.builtin import weights
from simulators.engine_ranks import in_ranks, operate
from simulators.sealed_group import group
from tools.fake_agent import memory_file, sealed_package

CUDA = torch.device("cuda", 0)
LONG = 200_000_000  # cycles: a tenth of a second, in which whoever does not wait is wrong


def content(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().numpy())


@pytest.mark.parametrize("skew", [0, 4, 3])
def test_messages_of_every_length(skew: int) -> None:
    chance = random.Random(skew)
    cipher = Cipher(CUDA)
    batch, sealed = [], []
    for size in [
        0,
        1,
        16,
        63,
        64,
        65,
        8191,
        8192,
        1 << 20,
        (5 << 20) + 77,
        *[chance.randrange(1 << 18) for _ in range(40)],
    ]:
        given = torch.randint(0, 256, (size + skew,), dtype=torch.uint8, device=CUDA)[skew:]
        out = torch.full((size + skew + 16,), 0xA5, dtype=torch.uint8, device=CUDA)[skew:]
        key, nonce, extra = chance.randbytes(32), chance.randbytes(12), chance.randbytes(size % 50)
        batch.append(
            Message(key=key, nonce=nonce, associated_data=extra, source=given, destination=out[:size], tag=out[size:])
        )
        sealed.append(out)
    cipher.seal(batch)
    for one, out in zip(batch, sealed, strict=True):
        assert content(out) == ChaCha20Poly1305(one.key).encrypt(one.nonce, content(one.source), one.associated_data)
    sealed[7][3] ^= 1
    again = [
        Message(
            key=one.key,
            nonce=one.nonce,
            associated_data=one.associated_data,
            source=one.destination,
            destination=torch.full_like(one.source, 0xA5),
            tag=one.tag,
        )
        for one in batch
    ]
    assert cipher.open(again).wait() == tuple(index != 7 for index in range(len(batch)))
    for index, (one, opened) in enumerate(zip(batch, again, strict=True)):
        assert torch.equal(opened.destination, torch.zeros_like(one.source) if index == 7 else one.source)


def test_what_another_stream_makes_is_waited_for_and_what_it_uses_is_there() -> None:
    queue = Queue(CUDA)
    traffic = group(3)
    sealer = traffic[0].sealer(Lane.COLLECTIVE, ALL, Suite.CHACHA20_POLY1305)
    opener = traffic[1].opener(Lane.COLLECTIVE, 0, Suite.CHACHA20_POLY1305, broadcast=True)
    frame = memoryview(bytearray(frame_bytes(4000)))
    header = FrameHeader(kind=FrameKind.DATA, source=0, destination=ALL, suite=Suite.CHACHA20_POLY1305)
    frame[:HEADER_BYTES] = header.encode()
    tensor, target = torch.zeros(1000, device=CUDA), torch.zeros(1000, device=CUDA)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(LONG)
        tensor += 5
        queue.begin()
        with queue.within():
            DeviceRegion([tensor], queue).seal(0, 4000, sealer, frame)
    seen = torch.zeros(1000)
    peer = traffic[2].opener(Lane.COLLECTIVE, 0, Suite.CHACHA20_POLY1305, broadcast=True)
    HostRegion([seen]).open(0, 4000, peer, frame)
    assert bool((seen == 5).all())
    with queue.within():
        torch.cuda._sleep(LONG)
        DeviceRegion([target], queue).open(0, 4000, opener, frame)
    queue.end()
    assert float((target + 1).sum()) == 6000


@pytest.mark.parametrize("algorithm", [Algorithm.ONE_SHOT, Algorithm.DIRECT, Algorithm.RING], ids=lambda one: one.name)
def test_two_ranks_reduce(algorithm: Algorithm) -> None:
    parts = [torch.randn(3_000_001) for _ in range(2)]

    def story(engine: Engine) -> Any:
        tensor = parts[engine.rank].to(CUDA, non_blocking=True)
        for _ in range(3):
            copy = tensor.clone()
            operate(engine, ring.all_reduce([copy], Reduction(kind=ReductionCode.SUM), algorithm))
        return copy.cpu()

    for found in in_ranks(2, story):
        assert torch.equal(found, parts[0] + parts[1])


def test_sealed_weights_are_opened_there(capfd: pytest.CaptureFixture[str]) -> None:
    tensors = {f"layer.{index}": torch.randn(1000 + index, 333).bfloat16() for index in range(8)}
    package, grant = sealed_package({"m.safetensors": save(tensors)}, {}, "script", suite=Suite.CHACHA20_POLY1305)
    secret = memory_file("grant", grant)
    inputs = GrantInputs(secret=secret, secret_bytes=len(grant), package=memory_file("package", package))
    os.close(secret)
    found = load(inputs, "m.safetensors", torch, opener=weights.opener(CUDA))
    inputs.close()
    assert all(found[name].device == CUDA and torch.equal(found[name].cpu(), tensors[name]) for name in tensors)
    assert capfd.readouterr().err == "glasshouse: weights are opened on the GPU\n"
