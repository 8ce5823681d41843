"""How a batch of messages is cut up for the kernels: arithmetic on lengths, without a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BLOCK_BYTES = 64
MAX_MESSAGE_BYTES = BLOCK_BYTES * (2**32 - 1)  # block 0 is the one-time key (RFC 8439, 2.8)

_TAG_UNIT_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The shape of launches on one device."""

    lanes: int = 128  # blocks that a program of `bulk` makes at a time; a power of two
    warps: int = 4  # of 32 threads; `lanes` / 32, so that each thread makes whole blocks
    programs: int  # how many run at a time on the whole device
    least_steps: int = 4  # a shorter walk does not pay for finding the powers of r

    def __post_init__(self) -> None:
        if self.lanes < 1 or self.lanes & (self.lanes - 1) or min(self.warps, self.programs, self.least_steps) < 1:
            raise ValueError(f"no shape of a launch: {self}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """One batch, cut up."""

    steps: int  # blocks that each lane of a program walks over
    segments: tuple[int, ...]  # programs for each message; none where a message has no whole block
    terms: int  # the most numbers that the end of one message adds up
    exponent_bits: int  # bits of the largest power of r


def cut(lengths: Sequence[int], associated: Sequence[int], shape: Shape) -> Cut:
    """Cut messages of these lengths so that every program has the same work and, if possible, all run at once.

    Raises:
        ValueError: a message longer than RFC 8439 allows.
    """
    if any(not 0 <= length <= MAX_MESSAGE_BYTES for length in lengths):
        raise ValueError(f"a message has at most {MAX_MESSAGE_BYTES} bytes: then its block counter would repeat")
    blocks = [length // BLOCK_BYTES for length in lengths]
    steps = max(shape.least_steps, _up(sum(blocks), shape.lanes * shape.programs))
    if sum(1 for count in blocks if count) <= shape.programs:
        # Programs beyond those that run at once would wait for all of them, and double the time.
        while sum(_up(count, steps * shape.lanes) for count in blocks) > shape.programs:
            steps += max(1, steps // 64)
    segments = tuple(_up(count, steps * shape.lanes) for count in blocks)
    terms = power = 1
    for length, extra, parts in zip(lengths, associated, segments, strict=True):
        tails = _up(length % BLOCK_BYTES, _TAG_UNIT_BYTES)
        headings = _up(extra, _TAG_UNIT_BYTES)
        terms = max(terms, headings + parts + tails + 1)
        last = tails + 2 + max(0, parts - 1) * steps * shape.lanes * (BLOCK_BYTES // _TAG_UNIT_BYTES)
        power = max(power, last, _up(length, _TAG_UNIT_BYTES) + 1 + headings)
    return Cut(steps=steps, segments=segments, terms=terms, exponent_bits=power.bit_length())


def _up(count: int, size: int) -> int:
    return -(-count // size)
