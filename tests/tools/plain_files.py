"""Files that are to be packed, in memory."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Packed"]


@dataclass(frozen=True)
class Packed:
    """A file in memory, as `workloads.params.PlainFile`."""

    data: bytes

    @property
    def bytes(self) -> int:
        return len(self.data)

    @property
    def open(self) -> Callable[[], io.BytesIO]:
        return lambda: io.BytesIO(self.data)
