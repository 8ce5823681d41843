"""Messages sealed and opened by the kernels as they are written, against RFC 8439 and another implementation.

What the compiler makes of them is run by tests/unit/collectives/test_collectives_kernels_compiled.py, on more.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from glasshouse.collectives.kernels.cipher import Cipher
from glasshouse.collectives.kernels.launch_shape import Shape
from simulators.messages import SUNSCREEN_SEALED, back, content, drafts, expected, message, sunscreen, untouched_around

random.seed(8439)


@pytest.fixture(scope="module")
def cipher() -> Cipher:
    # Small enough that a few hundred bytes fill several programs of several steps.
    return Cipher("cpu", shape=Shape(lanes=4, warps=1, programs=5, least_steps=1))


# Nothing; within, at and beyond 16 and 64 bytes; a step of all lanes; several segments. Alignments: byte, word, wide.
BATCH = [
    (0, 0, (0, 0)),
    (17, 16, (3, 5)),
    (64, 0, (0, 0)),
    (191, 40, (4, 8)),
    (256, 12, (0, 0)),
    (576, 12, (0, 0)),
]


def test_many_messages_of_any_length_and_alignment_in_one_call(cipher: Cipher) -> None:
    batch = [message(*parts) for parts in BATCH]
    cipher.seal(batch)
    for one in batch:
        assert content(one.destination) + content(one.tag) == expected(one), one.source.numel()
        assert untouched_around(one.destination)
        assert untouched_around(one.tag)
    again = [back(one) for one in batch]
    assert cipher.open(again).wait() == (True,) * len(batch)
    for one, opened in zip(batch, again, strict=True):
        assert torch.equal(opened.destination, one.source), one.source.numel()
        assert untouched_around(opened.destination)


def test_the_vectors_of_the_rfc(cipher: Cipher) -> None:
    sealing, opening = sunscreen(), drafts()
    cipher.seal([sealing])
    assert content(sealing.destination) + content(sealing.tag) == SUNSCREEN_SEALED
    assert cipher.open([opening]).wait() == (True,)
    assert content(opening.destination).startswith(b"Internet-Drafts are draft documents valid for")


def test_a_changed_message_is_zeroed_and_no_other(cipher: Cipher) -> None:
    honest = [message(150, 20) for _ in range(3)]
    cipher.seal(honest)
    received = [back(one) for one in honest]
    received[1].source[149] ^= 128
    assert cipher.open(received).wait() == (True, False, True)
    assert not received[1].destination.any()
    assert torch.equal(received[2].destination, honest[2].source)


def test_no_key_is_left_in_the_tables(cipher: Cipher, monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[torch.Tensor] = []
    original = Cipher._table

    def remembered(self: Cipher, *given: Any) -> torch.Tensor:
        tables.append(original(self, *given))
        return tables[-1]

    monkeypatch.setattr(Cipher, "_table", remembered)
    one = message(100, 10)
    cipher.seal([one])
    cipher.close()
    for memory in (*tables, *cipher._pinned._free):
        assert one.key[:8] not in content(memory)


def test_nothing_to_do_is_nothing_done(cipher: Cipher) -> None:
    cipher.seal([])
    assert cipher.open([]).wait() == ()
