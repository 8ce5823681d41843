"""What the probes search for, kept in secret memory only.

Layout of the region: count (4 bytes, big endian), then per needle its kind (1 byte) and 32 bytes. The
custodian writes them; agent and probes read them in place, never through a copy, for a copy in the heap
would be the very residue that they look for.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

__all__ = ["NEEDLE_BYTES", "NeedleKind", "Needles", "is_distinctive", "region_bytes"]

NEEDLE_BYTES = 32

_COUNT_BYTES = 4
_STRIDE = 1 + NEEDLE_BYTES
# A window of padding or of one repeated word is found in every process and says nothing.
_LEAST_DISTINCT_BYTES = 8


class NeedleKind(IntEnum):
    """What a needle was cut from."""

    ASSET_WINDOW = 0
    PACKAGE_KEY = 1
    ASSET_KEY = 2
    HPKE_PRIVATE = 3
    GROUP_SECRET = 4


def region_bytes(needles: int) -> int:
    """Return the size of a region that holds `needles`."""
    return _COUNT_BYTES + needles * _STRIDE


def is_distinctive(window: bytes | bytearray | memoryview) -> bool:
    """Return whether finding `window` somewhere says anything about where it came from."""
    return len(window) == NEEDLE_BYTES and len(set(window)) >= _LEAST_DISTINCT_BYTES


class Needles:
    """The needles in one region of secret memory.

    Args:
        view: the region, writable; its first four bytes are zero when it holds none.
    """

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def __len__(self) -> int:
        return int.from_bytes(self._view[:_COUNT_BYTES], "big")

    def __iter__(self) -> Iterator[tuple[NeedleKind, memoryview]]:
        for index in range(len(self)):
            start = _COUNT_BYTES + index * _STRIDE
            yield NeedleKind(self._view[start]), self._view[start + 1 : start + _STRIDE]

    def add(self, kind: NeedleKind, window: bytes | bytearray | memoryview) -> None:
        """Write one needle behind the others.

        Raises:
            ValueError: not 32 bytes, or the region is full.
        """
        count = len(self)
        start = _COUNT_BYTES + count * _STRIDE
        if len(window) != NEEDLE_BYTES or start + _STRIDE > len(self._view):
            raise ValueError("a needle that does not fit")
        self._view[start] = kind
        self._view[start + 1 : start + _STRIDE] = window
        self._view[:_COUNT_BYTES] = (count + 1).to_bytes(_COUNT_BYTES, "big")

    def drop(self, indices: set[int]) -> int:
        """Forget the asset windows among `indices` and return how many those were; keys always stay."""
        dropped, kept = 0, 0
        for index, (kind, window) in enumerate(self):
            if index in indices and kind is NeedleKind.ASSET_WINDOW:
                dropped += 1
                continue
            start = _COUNT_BYTES + kept * _STRIDE
            self._view[start] = kind
            self._view[start + 1 : start + _STRIDE] = window
            kept += 1
        self._view[:_COUNT_BYTES] = kept.to_bytes(_COUNT_BYTES, "big")
        return dropped
