"""How work is cut up for the kernels; and the tests that need Triton's interpreter, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glasshouse.collectives.kernels.launch_shape import BLOCK_BYTES, MAX_MESSAGE_BYTES, Shape, cut

ROOT = Path(__file__).resolve().parents[3]
H200 = Shape(programs=660)


@pytest.mark.slow
def test_the_kernels_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/interpreted"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@given(st.lists(st.tuples(st.integers(0, 1 << 34), st.integers(0, 4000)), min_size=1, max_size=40))
def test_every_block_has_a_slot_and_no_program_is_idle(messages: list[tuple[int, int]]) -> None:
    lengths, extras = [length for length, _ in messages], [extra for _, extra in messages]
    made = cut(lengths, extras, H200)
    for length, segments in zip(lengths, made.segments, strict=True):
        slots = segments * made.steps * H200.lanes
        blocks = length // BLOCK_BYTES
        assert slots >= blocks
        assert segments == 0 or slots - blocks < made.steps * H200.lanes  # only the first segment has empty slots
    assert sum(made.segments) <= max(H200.programs, len(messages))
    # No term is multiplied by a power of r that the kernel does not reach.
    for length, extra in messages:
        assert -(-length // 16) + -(-extra // 16) + 1 < 1 << made.exponent_bits


def test_large_messages_fill_the_device_in_one_wave() -> None:
    one = cut([256 << 20], [84], H200)
    assert 0.97 * H200.programs <= sum(one.segments) <= H200.programs
    many = cut([4 << 20] * 64, [84] * 64, H200)
    assert 0.94 * H200.programs <= sum(many.segments) <= H200.programs
    assert len(set(many.segments)) == 1


def test_small_messages_are_not_cut_into_crumbs() -> None:
    assert cut([1 << 10] * 1000, [0] * 1000, H200).segments == (1,) * 1000
    assert cut([63], [0], H200).segments == (0,)


def test_a_message_whose_counter_would_repeat_is_refused() -> None:
    cut([MAX_MESSAGE_BYTES], [0], H200)
    with pytest.raises(ValueError, match="counter would repeat"):
        cut([MAX_MESSAGE_BYTES + 1], [0], H200)


@pytest.mark.parametrize("wrong", [{"lanes": 96}, {"lanes": 0}, {"programs": 0}, {"least_steps": 0}])
def test_impossible_shapes_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="no shape"):
        Shape(**({"programs": 1} | wrong))
