"""`triton.jit` with a type: what it decorates is written as Python and runs as Python only under the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import triton

F = TypeVar("F", bound=Callable[..., Any])


def interpreted() -> bool:
    """Return whether kernels run as Python, in host memory (TRITON_INTERPRET=1): for tests."""
    return bool(triton.knobs.runtime.interpret)


def jit(function: F) -> F:
    """Make a function one that kernels call; it is inlined."""
    made = triton.jit(function)
    # Called as it is, an interpreted function patches Triton's language anew, which takes longer than the call.
    return cast(F, made.rewrite() if interpreted() else made)


def kernel(unspecialised: Sequence[str]) -> Callable[[Callable[..., Any]], Any]:
    """Make a function a kernel, without variants by the values of some integers: each costs seconds of compiling."""
    return lambda function: triton.jit(function, do_not_specialize=list(unspecialised))
