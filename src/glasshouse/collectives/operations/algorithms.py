"""Which algorithm carries an operation out, and in chunks of what size, by size and world size.

Law: every rank comes to the same answer from what all ranks agree on.
"""

from __future__ import annotations

from glasshouse.collectives.protocol.headers import Algorithm

__all__ = ["CHUNK_BYTES", "DEVICE_CHUNK_BYTES", "LAG", "all_reduce_algorithm", "chunk_bytes"]

CHUNK_BYTES = 1 << 20
"""The largest chunk: ciphertext and plaintext of one lie in a core's cache together."""

DEVICE_CHUNK_BYTES = 4 << 20
"""The largest chunk of tensors on a device: a launch and its way there and back cost as much as half a MiB."""

LAG = 2
"""How many chunks of contributions go ahead of the first chunk of the result."""

_LEAST_CHUNK_BYTES = 256 << 10
_ALIGNED = 64
_ONE_SHOT_BYTES = 128 << 10
_ONE_SHOT_OF_TWO_BYTES = 1 << 20


def all_reduce_algorithm(nbytes: int, ranks: int) -> Algorithm:
    """Return the algorithm for an all-reduce of so many bytes."""
    # Between two ranks both exchange as many bytes: one-shot has one phase less, direct adds only half.
    one_shot = _ONE_SHOT_OF_TWO_BYTES if ranks == 2 else _ONE_SHOT_BYTES
    return Algorithm.ONE_SHOT if nbytes <= one_shot else Algorithm.DIRECT


def chunk_bytes(nbytes: int, largest: int) -> int:
    """Return the chunk for a span of so many bytes: small enough that sealing, sending, opening and adding overlap.

    A multiple of every element's size.
    """
    wanted = -(-nbytes // 2)
    return min(largest, max(_LEAST_CHUNK_BYTES, -(-wanted // _ALIGNED) * _ALIGNED))
