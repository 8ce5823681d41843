"""Keeps torch.compile out of this room: what moves bytes between processes is not to be traced into a graph."""

from __future__ import annotations

import inspect
from typing import TypeVar

from torch._C._dynamo import eval_frame

__all__ = ["eager"]

_Class = TypeVar("_Class", bound=type)


def eager(owner: _Class) -> _Class:
    """Have the methods of a class, and all that they call, run as written, also amid code that is being compiled.

    Torch's C++ calls them from there: DistributedDataParallel's reducer within a compiled forward, for instance.
    torch.compiler.disable would do the same and import the compiler, which takes seconds.
    """
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for member in vars(owner).values():
        if inspect.isfunction(member):
            eval_frame.set_code_exec_strategy(member.__code__, skip)
    return owner
