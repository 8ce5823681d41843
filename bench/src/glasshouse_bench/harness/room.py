"""A full disk ends a measurement with one sentence, and what is complete is kept."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from glasshouse.errors import Code, GlasshouseError, UsageError

__all__ = ["room_for", "was_full"]

# All that is known of why a worker failed is what it printed last.
_NO_SPACE = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))


@contextlib.contextmanager
def room_for(folder: Path) -> Iterator[None]:
    """Say of a full disk what to do: the same command goes on.

    Args:
        folder: of the measurement; runs and their outputs lie in the folder for temporary files meanwhile.

    Raises:
        UsageError: `disk-full`.
    """
    try:
        yield
    except GlasshouseError as error:
        if not was_full(error.code, error.message):
            raise
        raise _full(folder, error.message) from None
    except OSError as error:
        # Of a plain input, a log or a package on its way: no file of the measurement is written so.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _full(folder, f"no room to write {error.filename or tempfile.gettempdir()}") from None


def was_full(code: Code | None, reason: str) -> bool:
    """Return whether something failed for want of room."""
    return code is Code.DISK_FULL or any(words in reason for words in _NO_SPACE)


def _full(folder: Path, why: str) -> UsageError:
    hint = f"free some space there; the same command goes on with what is complete: -o {folder}"
    return UsageError(Code.DISK_FULL, why, hint=hint)
