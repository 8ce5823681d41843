"""The search for plaintext in what was captured finds what is there, wherever it lies, and nothing else."""

from __future__ import annotations

import random

import pytest

from tools.wire_capture import blocks_found

CHANCE = random.Random(4)
SECRET, NOISE = CHANCE.randbytes(4096), CHANCE.randbytes(1 << 16)


@pytest.mark.parametrize("at", range(9))
def test_a_block_is_found_at_any_byte_of_the_capture(at: int) -> None:
    captured = NOISE[: 1000 + at] + SECRET[400:416] + NOISE[1000:]
    assert blocks_found([SECRET], [captured]) == 1
    assert blocks_found([SECRET], [NOISE, captured]) == 1


@pytest.mark.parametrize("start", [0, 4, 8, 12, 4080])
def test_a_block_of_any_element_is_found(start: int) -> None:
    assert blocks_found([SECRET], [NOISE + SECRET[start : start + 16]]) == 1


def test_all_of_a_plaintext_is_counted_once() -> None:
    every = (len(SECRET) - 16) // 4 + 1
    assert blocks_found([SECRET, SECRET], [SECRET + NOISE + SECRET]) == every


def test_noise_and_shorter_pieces_are_not_found() -> None:
    assert blocks_found([SECRET], [NOISE]) == 0
    assert blocks_found([SECRET], [NOISE + SECRET[100:115] + NOISE]) == 0
    assert blocks_found([SECRET], [b"", b"short", SECRET[:15]]) == 0


def test_blocks_that_say_nothing_are_left_out() -> None:
    assert blocks_found([SECRET + bytes(64)], [bytes(1 << 12)]) == 0
    for nothing in ([], [b""], [bytes(1000)], [SECRET[:15]]):
        with pytest.raises(ValueError, match="nothing to look for"):
            blocks_found(nothing, [NOISE])
