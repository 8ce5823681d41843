"""What the compiler made of the kernels: compiled for a GPU that need not be there, and read back.

Registers, spills and the width of accesses are read from the machine code, and the instructions of the loop that every
block goes through are counted: with clock and multiprocessors of a device they say how fast it can be at most.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from glasshouse.collectives.kernels import passes
from glasshouse.collectives.kernels.launch_shape import BLOCK_BYTES

__all__ = ["Compiled", "compile_bulk", "compile_finish"]

_WARP = 32
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_TABLES = {"messages": "*i64", "keys": "*u32", "parts": "*u64"}
# Of the two kinds of integer units of a Hopper multiprocessor, multiplications and the additions that the assembler
# writes as such go to one, everything else to the other; either starts an instruction of a warp every other cycle.
_MULTIPLIER = re.compile(r"IMAD|IMUL|LDG|STG|BRA|UIADD|UMOV|CS2R")


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """One kernel as machine code.

    Attributes:
        registers: of a thread.
        stack_bytes: of a thread: what was spilled.
        ptx: the assembler's input.
        loop: opcodes of the largest loop, and how often each occurs in it.
    """

    registers: int
    stack_bytes: int
    ptx: str
    loop: Counter[str]

    @property
    def loop_instructions(self) -> int:
        return self.loop.total()

    @property
    def instructions_per_byte(self) -> float:
        """Instructions of a lane for each byte, where the loop is that of `bulk`: one block a turn."""
        return self.loop_instructions / BLOCK_BYTES

    @property
    def integer_per_byte(self) -> float:
        """Those of them that only the units for logic, shifts and comparisons execute."""
        return sum(count for code, count in self.loop.items() if not _MULTIPLIER.match(code)) / BLOCK_BYTES

    def ceiling(self, processors: int, clock_hz: float) -> float:
        """Return the bytes a second that a Hopper device cannot exceed: four schedulers, two cycles an instruction."""
        return processors * clock_hz * 4 * _WARP / (2 * self.integer_per_byte)


@functools.cache
def compile_bulk(*, seal: bool, unit: int = 16, lanes: int = 128, warps: int = 4, capability: int = 90) -> Compiled:
    """Compile `passes.bulk` for a CUDA device of that capability."""
    constants = {"SEAL": seal, "UNIT": unit, "LANES": lanes, "LANES_LOG2": lanes.bit_length() - 1}
    return _compile(passes.bulk, {"steps": "i32", "most_segments": "i32"}, constants, warps, capability)


@functools.cache
def compile_finish(
    *, seal: bool, bulk_lanes: int = 128, lanes: int = 32, warps: int = 1, capability: int = 90
) -> Compiled:
    """Compile `passes.finish`."""
    constants = {"SEAL": seal, "BULK_LANES": bulk_lanes, "LANES": lanes}
    numbers = {"steps": "i32", "most_segments": "i32", "bits": "i32"}
    return _compile(passes.finish, numbers, constants, warps, capability)


def _compile(
    function: Any, numbers: dict[str, str], constants: dict[str, Any], warps: int, capability: int
) -> Compiled:
    signature = _TABLES | numbers | dict.fromkeys(constants, "constexpr")
    aligned = {(index,): [["tt.divisibility", 16]] for index in range(len(_TABLES))}
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, _WARP), options={"num_warps": warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(made.asm["cubin"])
        cubin.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", cubin.name)
        listing = _tool("nvdisasm", "--print-code", cubin.name)
    return Compiled(
        registers=int(_found(r"REG:(\d+)", usage)),
        stack_bytes=int(_found(r"STACK:(\d+)", usage)),
        ptx=made.asm["ptx"],
        loop=_largest_loop(listing),
    )


def _tool(name: str, *words: str) -> str:
    return subprocess.run([_TOOLS / name, *words], capture_output=True, text=True, check=True).stdout


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"no {pattern} in what the tool says")
    return match[1]


def _largest_loop(listing: str) -> Counter[str]:
    """Return the opcodes between the target of the farthest branch backwards and the branch itself."""
    labels: dict[str, int] = {}
    codes: list[str] = []
    largest = (0, 0)
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(codes)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][\w.]*)(.*?);", line):
            codes.append(instruction[1])
            target = re.search(r"`\((\.L_\w+)\)", instruction[2])
            if instruction[1].startswith("BRA") and target and target[1] in labels:
                largest = max(largest, (len(codes) - labels[target[1]], labels[target[1]]))
    length, start = largest
    return Counter(codes[start : start + length])
