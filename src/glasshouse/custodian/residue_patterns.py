"""What the probes search for at a run's end: pieces of keys and inputs, in secret memory only.

Layout of the region: count (4 bytes, big endian), then for each pattern its kind (1 byte) and 32 bytes. The custodian
writes them; the agent reads them in place, as a copy in its heap would be the residue that they find.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

PATTERN_BYTES = 32

_COUNT_BYTES = 4
_STRIDE = 1 + PATTERN_BYTES
# A window of padding or of one repeated word is found in every process, and shows nothing.
_LEAST_DISTINCT_BYTES = 8


class PatternKind(IntEnum):
    """What a pattern was cut from."""

    ASSET_WINDOW = 0
    PACKAGE_KEY = 1
    ASSET_KEY = 2
    HPKE_PRIVATE = 3
    GROUP_SECRET = 4
    RESUME_PRIVATE = 5
    CONTENT_KEY = 6


def region_bytes(patterns: int) -> int:
    """Return the size of a region that holds `patterns`."""
    return _COUNT_BYTES + patterns * _STRIDE


def is_distinctive(window: bytes | bytearray | memoryview) -> bool:
    """Return whether `window`, where it is found, shows where it came from."""
    return len(window) == PATTERN_BYTES and len(set(window)) >= _LEAST_DISTINCT_BYTES


class ResiduePatterns:
    """The patterns in one writable region of secret memory; its first four bytes are zero when it holds none."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def __len__(self) -> int:
        return int.from_bytes(self._view[:_COUNT_BYTES], "big")

    def __iter__(self) -> Iterator[tuple[PatternKind, memoryview]]:
        for index in range(len(self)):
            start = _COUNT_BYTES + index * _STRIDE
            yield PatternKind(self._view[start]), self._view[start + 1 : start + _STRIDE]

    def add(self, kind: PatternKind, window: bytes | bytearray | memoryview) -> None:
        """Write one pattern behind the others; raises `ValueError`: not 32 bytes, or the region is full."""
        self._write(len(self), kind, window)

    def drop(self, indices: set[int]) -> int:
        """Remove the asset windows among `indices`, never a key, and return how many those were."""
        before = len(self)
        kept = 0
        for index, (kind, window) in enumerate(self):
            if index not in indices or kind is not PatternKind.ASSET_WINDOW:
                self._write(kept, kind, window)
                kept += 1
        self._view[:_COUNT_BYTES] = kept.to_bytes(_COUNT_BYTES, "big")
        return before - kept

    def _write(self, index: int, kind: PatternKind, window: bytes | bytearray | memoryview) -> None:
        start = _COUNT_BYTES + index * _STRIDE
        if len(window) != PATTERN_BYTES or start + _STRIDE > len(self._view):
            raise ValueError("a pattern that does not fit")
        self._view[start] = kind
        self._view[start + 1 : start + _STRIDE] = window
        self._view[:_COUNT_BYTES] = (index + 1).to_bytes(_COUNT_BYTES, "big")
