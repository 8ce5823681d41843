"""The choice of algorithm and chunk: the same on all ranks, within its limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from glasshouse.collectives.operations.communicator import chunk_bytes
from glasshouse.collectives.operations.plans import all_reduce_algorithm
from glasshouse.collectives.protocol.frame_memory import CHUNK_BYTES
from glasshouse.collectives.protocol.headers import MAX_PAYLOAD_BYTES, Algorithm


@given(some.integers(0, 2**40), some.sampled_from([CHUNK_BYTES, 4 << 20, 64 << 10]))
def test_a_chunk_holds_whole_elements_and_fits_a_frame(nbytes: int, largest: int) -> None:
    chunk = chunk_bytes(nbytes, largest)
    assert chunk % 64 == 0
    assert 0 < chunk <= min(largest, MAX_PAYLOAD_BYTES)


@pytest.mark.parametrize(
    ("nbytes", "ranks", "algorithm"),
    [
        (4, 2, Algorithm.ONE_SHOT),
        (1 << 20, 2, Algorithm.ONE_SHOT),
        (25 << 20, 2, Algorithm.DIRECT),
        (4, 8, Algorithm.ONE_SHOT),
        (1 << 20, 4, Algorithm.DIRECT),
        (25 << 20, 4, Algorithm.DIRECT),
    ],
)
def test_small_sums_take_one_phase_and_large_ones_two(nbytes: int, ranks: int, algorithm: Algorithm) -> None:
    assert all_reduce_algorithm(nbytes, ranks) is algorithm
