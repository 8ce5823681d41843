"""What the compiler makes of the kernels for a Hopper GPU: its size, its accesses, that it keeps secrets and is right.

No GPU is needed: the compiled code itself is run, by an emulator.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.collectives.inspection import compile_bulk, compile_finish
from glasshouse.collectives.kernels.cipher import PROGRAMS_PER_PROCESSOR, Message
from simulators.emulated_gpu import emulated_cipher, emulated_gpu
from simulators.messages import (
    SUNSCREEN_SEALED,
    back,
    content,
    drafts,
    expected,
    message,
    room,
    sunscreen,
    untouched_around,
)
from simulators.ptx import parse, secret_uses

pytestmark = pytest.mark.slow

FEW, MANY = {"lanes": 32, "warps": 1}, {"lanes": 512, "warps": 16}
REGISTERS_OF_A_PROCESSOR = 65536


@pytest.fixture
def gpu() -> Iterator[SimpleNamespace]:
    with emulated_gpu() as kernels:
        yield kernels


@pytest.mark.parametrize("seal", [True, False])
def test_the_loop_of_every_block_fits_the_machine(seal: bool) -> None:
    made = compile_bulk(seal=seal)
    threads = PROGRAMS_PER_PROCESSOR * 128
    assert made.registers <= REGISTERS_OF_A_PROCESSOR // threads // 8 * 8, "fewer programs run at once than are started"
    assert made.stack_bytes == 0
    assert made.instructions_per_byte < 18.5
    wide = {code: count for code, count in made.loop.items() if code.startswith(("LD", "ST"))}
    assert wide == {"LDG.E.128": 4, "STG.E.128": 4}, "every access is of 128 bits, and none is to local memory"
    assert made.loop["IMAD.WIDE.U32"] <= 102, "four products of five limbs by five"
    # The bar is 600 GB/s on an H200 (132 multiprocessors at 1.755 GHz or more): the arithmetic leaves twice that.
    assert made.ceiling(132, 1.755e9) > 1200e9


@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize("seal", [True, False])
def test_messages_of_other_alignments_do_not_spill_either(seal: bool, unit: int) -> None:
    made = compile_bulk(seal=seal, unit=unit)
    assert made.stack_bytes == 0
    assert made.registers <= 128


@pytest.mark.parametrize("size", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("seal", [True, False])
def test_the_end_does_not_spill(seal: bool, size: dict[str, int]) -> None:
    made = compile_finish(seal=seal, **size)
    assert made.stack_bytes == 0
    assert made.registers <= 128


@pytest.mark.parametrize("unit", [1, 4, 16])
@pytest.mark.parametrize("seal", [True, False])
def test_no_address_and_no_branch_depends_on_key_or_data(seal: bool, unit: int) -> None:
    program = parse(compile_bulk(seal=seal, unit=unit).ptx)
    assert secret_uses(program, public=program.parameters[0]) == []


@pytest.mark.parametrize("size", [FEW, MANY], ids=["few", "many"])
def test_the_end_depends_on_the_verdict_alone(size: dict[str, int]) -> None:
    sealing, opening = (parse(compile_finish(seal=seal, **size).ptx) for seal in (True, False))
    assert secret_uses(sealing, public=sealing.parameters[0]) == []
    uses = secret_uses(opening, public=opening.parameters[0])
    assert len(uses) == 1, "whether the output is zeroed, and nothing else"
    assert " bra " in uses[0]


@triton.jit
def _leaky(messages: tl.tensor, keys: tl.tensor, parts: tl.tensor) -> None:
    secret = tl.load(keys)
    tl.store(parts, tl.load(parts + (secret & 7)))
    if secret > 1000:
        tl.store(parts + 1, 0)


def test_a_kernel_that_leaks_is_caught() -> None:
    signature = {"messages": "*i64", "keys": "*u32", "parts": "*u64"}
    source = ASTSource(fn=_leaky, signature=signature, constexprs={})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    program = parse(made.asm["ptx"])
    uses = secret_uses(program, public=program.parameters[0])
    assert any(" ld.global" in use for use in uses)
    assert any(" bra " in use or " st.global" in use for use in uses)


def test_compiled_code_seals_and_opens_the_vectors_of_the_rfc(gpu: SimpleNamespace) -> None:
    sealing, opening = sunscreen(), drafts()
    emulated_cipher().seal([sealing])
    assert content(sealing.destination) + content(sealing.tag) == SUNSCREEN_SEALED
    assert emulated_cipher().open([opening]).wait() == (True,)
    assert content(opening.destination).startswith(b"Internet-Drafts are draft documents valid for")


def lengths_and_alignments() -> list[tuple[int, int, tuple[int, int]]]:
    """Return what is around every boundary, and some at random: sizes, associated data, both alignments."""
    chance = random.Random(1)
    step, segment = 128 * 64, 2 * 128 * 64
    edges = [0, 1, 16, 17, 63, 64, 65, 127, step - 1, step, step + 64, segment, 2 * segment + 77]
    sizes = edges + [chance.choice([chance.randrange(200), chance.randrange(10000)]) for _ in range(6)]
    extras = [0, 1, 15, 16, 17, 84, 1600]
    skews = [(0, 0), (0, 0), (4, 12), (8, 0), (0, 4), (1, 0), (2, 6), (15, 9)]
    return [(size, chance.choice(extras), chance.choice(skews)) for size in sizes]


def test_compiled_code_gives_what_another_implementation_gives(gpu: SimpleNamespace) -> None:
    random.seed(2)
    batch = [message(*parts) for parts in lengths_and_alignments()]
    maker = emulated_cipher()
    maker.seal(batch)
    for one in batch:
        assert content(one.destination) + content(one.tag) == expected(one), one.source.numel()
        assert untouched_around(one.destination)
        assert untouched_around(one.tag)
    # One launch of each kernel for each alignment, not for each message.
    assert len(gpu.bulk.launches) == len(gpu.finish.launches) == 3
    again = [back(one) for one in batch]
    assert maker.open(again).wait() == (True,) * len(batch)
    for one, opened in zip(batch, again, strict=True):
        assert torch.equal(opened.destination, one.source), one.source.numel()
        assert untouched_around(opened.destination)


def test_compiled_code_refuses_every_kind_of_change(gpu: SimpleNamespace) -> None:
    honest = [message(300, 20) for _ in range(9)]
    maker = emulated_cipher()
    maker.seal(honest)
    received = [back(one) for one in honest]
    received[1].source[0] ^= 1
    received[2].source[299] ^= 128  # in the tail
    received[3].tag[15] ^= 1
    received[4] = back(honest[4], associated_data=honest[4].associated_data[:-1])
    received[5] = back(honest[5], nonce=honest[6].nonce)
    received[6] = back(honest[6], key=honest[7].key)
    received[7] = back(honest[7], source=honest[7].destination[:-64], destination=room(236))
    assert maker.open(received).wait() == (True, *[False] * 7, True)
    for index, one in enumerate(received):
        assert untouched_around(one.destination)
        if index in (0, 8):
            assert torch.equal(one.destination, honest[index].source)
        else:
            assert not one.destination.any()


def test_compiled_code_works_in_place(gpu: SimpleNamespace) -> None:
    memory = room(20000, 4)
    before = memory.clone()
    sealing = message(20000, 3, source=memory, destination=memory)
    wanted = expected(sealing)
    maker = emulated_cipher()
    maker.seal([sealing])
    assert content(memory) + content(sealing.tag) == wanted
    assert maker.open([back(sealing, source=memory, destination=memory)]).wait() == (True,)
    assert torch.equal(memory, before)


def test_counters_and_lengths_beyond_32_bits_are_carried(gpu: SimpleNamespace) -> None:
    """Only the end of such a message can be tried here: its tail's block counter, and its block of lengths."""
    from cryptography.hazmat.primitives.ciphers import Cipher as Stream
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    length = 64 * (2**32 - 2) + 10  # the last counter but one
    key, nonce = bytes(range(32)), bytes(range(12))
    tail = room(10)
    row = torch.tensor([tail.data_ptr() - (length - 10)] * 2 + [0, length, 0, 0, 0, 0], dtype=torch.int64)
    out = room(16)
    row[2] = out.data_ptr()
    plain = content(tail)
    keys = torch.frombuffer(bytearray(key + nonce + bytes(20)), dtype=torch.uint32)
    parts = torch.zeros(5, dtype=torch.uint64)
    gpu.finish.beyond = [(tail.data_ptr(), 10)]
    gpu.finish[(1,)](row, keys, parts, 1, 0, 40, SEAL=True, BULK_LANES=128, LANES=32, num_warps=1)
    counter = (length // 64 + 1).to_bytes(4, "little")
    assert content(tail) == Stream(ChaCha20(key, counter + nonce), mode=None).encryptor().update(plain)
    assert not keys.to(torch.int64).any()


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": bytes(31)},
        {"nonce": bytes(8)},
        {"destination": torch.zeros(99, dtype=torch.uint8)},
        {"tag": torch.zeros(15, dtype=torch.uint8)},
        {"source": torch.zeros(100)},
        {"source": torch.zeros(200, dtype=torch.uint8)[::2]},
    ],
)
def test_what_is_no_message_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"bytes|flat"):
        message(100, 0, **wrong)


def test_overlapping_memory_is_refused() -> None:
    memory = room(200)
    with pytest.raises(ValueError, match="overlap"):
        message(100, 0, source=memory[:100], destination=memory[50:150])
    Message(key=bytes(32), nonce=bytes(12), associated_data=b"", source=memory[:92], destination=memory[92:184],
            tag=memory[184:])  # fmt: skip
