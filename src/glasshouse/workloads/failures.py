"""From an exception to the one word that leaves the worker; everything else goes to the sealed log."""

from __future__ import annotations

import sys
import traceback

from glasshouse.errors import Code, GlasshouseError

__all__ = ["code_of", "explain"]

# How frameworks say that memory ran out without raising MemoryError.
_MEMORY_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")


def code_of(error: BaseException, *, otherwise: Code = Code.WORKER_FAILED) -> Code:
    """Return the code of a failure."""
    if isinstance(error, GlasshouseError):
        return error.code
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return Code.OUT_OF_MEMORY
    if isinstance(error, (RuntimeError, OSError)) and any(word in str(error).lower() for word in _MEMORY_WORDS):
        return Code.OUT_OF_MEMORY
    return otherwise


def explain(error: BaseException) -> None:
    """Write what happened to standard error, which is the sealed log."""
    if isinstance(error, GlasshouseError) and error.__cause__ is None:
        print(f"glasshouse: {error}", file=sys.stderr)  # noqa: T201
    else:
        traceback.print_exception(error)
    if isinstance(error, GlasshouseError) and error.hint:
        print(f"glasshouse: {error.hint}", file=sys.stderr)  # noqa: T201
    sys.stderr.flush()
