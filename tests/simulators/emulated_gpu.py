"""A GPU that is not there: ciphers launch what was compiled for one, in an emulator, on tensors in host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.collectives.inspection import compile_bulk, compile_finish
from glasshouse.collectives.kernels import cipher
from glasshouse.collectives.kernels.cipher import Cipher
from glasshouse.collectives.kernels.launch_shape import Shape
from simulators.ptx import EmulatedKernel

__all__ = ["emulated_cipher", "emulated_gpu"]


@contextlib.contextmanager
def emulated_gpu() -> Iterator[SimpleNamespace]:
    """Have ciphers of CPU tensors launch the compiled kernels; yields these, with what was launched."""

    def bulk(given: dict[str, Any]) -> str:
        made = compile_bulk(seal=given["SEAL"], unit=given["UNIT"], lanes=given["LANES"], warps=given["num_warps"])
        return made.ptx

    def finish(given: dict[str, Any]) -> str:
        made = compile_finish(
            seal=given["SEAL"], bulk_lanes=given["BULK_LANES"], lanes=given["LANES"], warps=given["num_warps"]
        )
        return made.ptx

    kernels = SimpleNamespace(bulk=EmulatedKernel(bulk), finish=EmulatedKernel(finish))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cipher, "passes", kernels)
        patch.setattr(cipher, "interpreted", lambda: True)
        yield kernels


def emulated_cipher() -> Cipher:
    """Return a cipher whose programs are so short that little data fills several."""
    return Cipher("cpu", shape=Shape(programs=100, least_steps=2))
