"""Runs compiled kernels without a GPU: an emulator of as much PTX as ours consist of, and a tracker of secrets in it.

The interpreter runs what we wrote; this runs what the compiler made of it. All threads of a program go step by step,
side by side; every access to memory is held against the buffers that the kernel was given. What it does not know, it
refuses: our kernels do not compile to it today, and the day they do, a test must fail rather than guess.
Source: PTX ISA 8.7.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["EmulatedKernel", "Instruction", "Memory", "Program", "launch", "parse", "secret_uses"]

_WARP = 32
_BITS = {"b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "b32": 32, "u32": 32, "s32": 32,
         "b64": 64, "u64": 64, "s64": 64}  # fmt: skip
_UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
_SHARED_AT = 1 << 16  # below anything that a process has
_COMPARE = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
            "ne": np.not_equal, "lo": np.less, "hi": np.greater}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its guard ("%p1", "!%p1" or none), its name, its operands as written; vectors are tuples."""

    guard: str
    name: str
    operands: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A kernel's instructions, where its labels point, and how many threads and parameters it has."""

    code: tuple[Instruction, ...]
    labels: dict[str, int]
    threads: int
    parameters: tuple[str, ...]


def parse(ptx: str) -> Program:
    """Read the one kernel of a PTX file."""
    text = re.sub(r"//[^\n]*", "", ptx)
    head, body = re.search(r"\.entry\s+\w+\s*\((.*?)\)(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    parameters = tuple(re.findall(r"(\w+_param_\d+)", head))
    threads = int(re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", body)[1])  # type: ignore[index]
    body = body[body.index("{") + 1 :]
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    body = body[: body.index("\n}")]
    for line in re.sub(r"^\s*\.loc[^\n]*$", "", body, flags=re.MULTILINE).replace("{ .reg", ".reg").split(";"):
        statement = line.lstrip("} \t\n").rstrip()  # behind an inline block
        while label := re.match(r"(\$\w+):\s*", statement):
            labels[label[1]] = len(code)
            statement = statement[label.end() :]
        if not statement or statement.startswith("."):
            continue
        guard = ""
        if guarded := re.match(r"@(!?%?\w+)\s+", statement):
            guard, statement = guarded[1], statement[guarded.end() :]
        name, _, rest = statement.partition(" ") if " " in statement.split("\t")[0] else statement.partition("\t")
        code.append(Instruction(guard, name.strip(), _operands(rest)))
    return Program(tuple(code), labels, threads, parameters)


def _operands(text: str) -> tuple[Any, ...]:
    found: list[Any] = []
    for vector, address, plain in re.findall(r"\{([^}]*)\}|\[([^\]]*)\]|([^\s,{}\[\]]+)", text):
        if vector:
            found.append(tuple(part.strip() for part in vector.split(",")))
        elif address:
            found.append("[" + address.replace(" ", "") + "]")
        else:
            found.append(plain)
    return tuple(found)


class Memory:
    """Buffers at their real addresses; anything else is out of bounds."""

    def __init__(self) -> None:
        self._regions: list[tuple[int, np.ndarray[Any, Any]]] = []

    def give(self, address: int, size: int) -> None:
        """Let a kernel reach `size` bytes of this process at `address`, which the caller keeps alive."""
        if size:
            view = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
            self._regions.append((address, view))

    def add(self, address: int, view: np.ndarray[Any, Any]) -> None:
        self._regions.append((address, view))

    def find(self, addresses: np.ndarray[Any, Any], size: int) -> list[tuple[np.ndarray[Any, Any], Any, Any]]:
        """Return for accesses of `size` bytes: buffer, which of the accesses lie in it, offsets."""
        if (addresses % np.uint64(size)).any():
            raise IndexError("a misaligned access")
        low, high = int(addresses.min()), int(addresses.max()) + size
        for base, view in self._regions:  # as nearly always, all in one
            if base <= low and high <= base + len(view):
                return [(view, slice(None), (addresses - np.uint64(base)).astype(np.int64))]
        found = []
        left = np.ones(len(addresses), bool)
        for base, view in self._regions:
            inside = left & (addresses >= base) & (addresses + np.uint64(size) <= base + len(view))
            if inside.any():
                found.append((view, inside, (addresses[inside] - np.uint64(base)).astype(np.int64)))
                left &= ~inside
        if left.any():
            raise IndexError(f"an access of {size} bytes at {int(addresses[left][0]):#x} lies in no buffer")
        return found


class EmulatedKernel:
    """Stands in for a Triton kernel: what is launched is the compiled code.

    Args:
        compiled: returns the PTX for the launch's compile-time arguments.
    """

    def __init__(self, compiled: Callable[[dict[str, Any]], str]) -> None:
        self._compiled = compiled
        self.launches: list[tuple[tuple[int, ...], int]] = []
        """Grid of each launch, and the instructions of a thread in its longest program."""
        self.beyond: list[tuple[int, int]] | None = None
        """Instead of what the table says, all that messages may reach: address and size."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], rows: Any, keys: Any, parts: Any, *numbers: int, **constants: Any) -> None:
        memory = Memory()
        for table in (rows, keys, parts):
            memory.give(table.data_ptr(), table.numel() * table.element_size())
        for source, destination, tag, length, associated, extra, _, _ in rows.view(-1, 8).tolist():
            data = self.beyond or [(source, length), (destination, length)]
            for address, size in (*data, (tag, 16), (associated, extra)):
                memory.give(address, size)
        values = [rows.data_ptr(), keys.data_ptr(), parts.data_ptr(), *numbers]
        program = _parsed(self._compiled(constants))
        self.launches.append((grid, launch(program, (*grid, 1)[:2], values, memory)))


@functools.cache
def _parsed(ptx: str) -> Program:
    return parse(ptx)


@functools.cache
def _constant(operand: str, threads: int) -> np.ndarray[Any, Any]:
    value = np.full(threads, int(operand, 0) & (2**64 - 1), np.uint64)
    value.flags.writeable = False
    return value


class _Threads:
    """The registers of one program's threads."""

    def __init__(self, program: Program, memory: Memory, values: Sequence[int], place: tuple[int, int]) -> None:
        self._program, self._memory = program, memory
        self._values = dict(zip(program.parameters, values, strict=False))
        count = program.threads
        self.registers: dict[str, np.ndarray[Any, Any]] = {
            "%tid.x": np.arange(count, dtype=np.uint64),
            "%ctaid.x": np.full(count, place[0], np.uint64),
            "%ctaid.y": np.full(count, place[1], np.uint64),
            "global_smem": np.full(count, _SHARED_AT, np.uint64),
        }
        self._all = np.ones(count, bool)
        self._carry = np.zeros(count, np.uint64)

    def run(self) -> int:
        """Run to the end; return how many instructions each thread has executed."""
        at, executed = 0, 0
        code = self._program.code
        with np.errstate(over="ignore"):
            while at < len(code):
                one = code[at]
                executed += 1
                active = self._active(one.guard)
                at += 1
                if one.name == "ret":
                    if active.all():
                        break
                elif one.name.startswith("bra"):
                    if active.any() != active.all():
                        # A jump that only some threads take: our loops and branches ask about what all of them share.
                        raise NotImplementedError("threads that part ways")
                    if active.all():
                        at = self._program.labels[one.operands[0]]
                else:
                    try:
                        self._execute(one, active)
                    except (KeyError, ValueError, IndexError, TypeError) as error:
                        raise RuntimeError(f"at {one}") from error
        return executed

    def _active(self, guard: str) -> np.ndarray[Any, Any]:
        if not guard:
            return self._all
        return ~self.registers[guard[1:]] if guard.startswith("!") else self.registers[guard]

    def _get(self, operand: str, bits: int = 64, *, signed: bool = False) -> np.ndarray[Any, Any]:
        value = self.registers.get(operand)
        if value is None:
            value = _constant(operand, self._program.threads)
        if value.dtype == bool:
            return value
        if value.dtype.itemsize * 8 != bits:
            value = value.astype(_UNSIGNED[bits])
        return value.view(_SIGNED[bits]) if signed else value

    def _set(self, operand: str, value: np.ndarray[Any, Any], active: np.ndarray[Any, Any]) -> None:
        if operand == "_":
            return
        if value.dtype.kind == "i":
            value = value.view(_UNSIGNED[value.dtype.itemsize * 8])
        if active is not self._all and not active.all():
            before = self.registers.get(operand)
            value = np.where(active, value, np.zeros_like(value) if before is None else before.astype(value.dtype))
        self.registers[operand] = value

    def _execute(self, one: Instruction, active: np.ndarray[Any, Any]) -> None:
        kind, *modifiers = one.name.split(".")
        bits = _BITS.get(modifiers[-1], 0) if modifiers else 0
        signed = bool(modifiers) and modifiers[-1].startswith("s")
        if kind in ("ld", "st", "stmatrix"):
            self._move(one, modifiers, bits, active)
        elif kind == "mov":
            self._mov(one, bits, active)
        elif kind == "setp":
            left, right = (self._get(operand, bits, signed=signed) for operand in one.operands[1:])
            self._set(one.operands[0], _COMPARE[modifiers[0]](left, right), active)
        elif kind == "cvt":
            target, source = _BITS[modifiers[-2]], _BITS[modifiers[-1]]
            value = self._get(one.operands[1], source, signed=signed)
            wide = value.astype(_SIGNED[64] if signed else _UNSIGNED[64])
            self._set(one.operands[0], wide.astype(_UNSIGNED[target]), active)
        elif kind == "shfl":
            mask = int(one.operands[2], 0)
            if modifiers[:2] != ["sync", "bfly"]:
                # shfl.up, .down, .idx: our sums over a warp compile to butterflies alone.
                raise NotImplementedError(one.name)
            source = np.arange(self._program.threads) ^ mask
            self._set(one.operands[0].split("|")[0], self._get(one.operands[1], 32)[source], active)
        elif kind not in ("bar", "barrier"):
            self._set(one.operands[0], self._computed(one, kind, modifiers, bits, signed=signed), active)

    def _computed(
        self, one: Instruction, kind: str, modifiers: list[str], bits: int, *, signed: bool
    ) -> np.ndarray[Any, Any]:
        if modifiers[-1] == "pred":
            values = [self._get(operand) for operand in one.operands[1:]]
            values = [value if value.dtype == bool else value != 0 for value in values]
            return {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not}[kind](
                *values
            )
        a = self._get(one.operands[1], bits, signed=signed)
        if kind == "selp":
            return np.where(self.registers[one.operands[3]], a, self._get(one.operands[2], bits))
        if kind in ("not", "neg"):
            return ~a if kind == "not" else -a
        if kind == "bfe":
            start, length = (int(operand, 0) for operand in one.operands[2:])
            lifted = a << a.dtype.type(bits - start - length)
            return lifted >> a.dtype.type(bits - length)
        if kind in ("shl", "shr"):
            count = self._get(one.operands[2], 32).astype(np.uint64)
            moved = a.astype(_SIGNED[64] if signed else _UNSIGNED[64])
            small = np.minimum(count, 63).astype(moved.dtype)
            result = moved << small if kind == "shl" else moved >> small
            if not signed:
                result = np.where(count >= bits, np.zeros_like(result), result)
            return result.astype(_UNSIGNED[bits])
        b = self._get(one.operands[2], bits, signed=signed)
        if kind == "shf":  # l.wrap
            count = self._get(one.operands[3], 32) & np.uint32(31)
            both = (b.astype(np.uint64) << np.uint64(32)) | a
            return (both >> (np.uint64(32) - count)).astype(np.uint32)
        if kind == "prmt":
            return self._permuted(a, b, one.operands[3])
        if kind in ("add", "sub", "and", "or", "xor", "max", "min"):
            return {
                "add": np.add, "sub": np.subtract, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
                "max": np.maximum, "min": np.minimum,
            }[kind](a, b)  # fmt: skip
        if kind in ("mul", "mad", "madc"):
            return self._multiplied(one, kind, modifiers, a, b, bits, signed=signed)
        # Any other computation, such as div, popc or atom: our kernels add, multiply, shift and combine integers.
        raise NotImplementedError(one.name)

    def _multiplied(
        self,
        one: Instruction,
        kind: str,
        modifiers: list[str],
        a: np.ndarray[Any, Any],
        b: np.ndarray[Any, Any],
        bits: int,
        *,
        signed: bool,
    ) -> np.ndarray[Any, Any]:
        wide = _SIGNED[64] if signed else _UNSIGNED[64]
        whole = a.astype(wide) * b.astype(wide)
        if modifiers[0] == "wide":
            c = self._get(one.operands[3], 2 * bits) if kind == "mad" else np.uint64(0)
            return (whole.view(np.uint64) + c).astype(_UNSIGNED[2 * bits])
        if modifiers[0] == "lo" and "cc" not in modifiers:
            c = self._get(one.operands[3], bits) if kind == "mad" else np.uint64(0)
            return (whole.view(np.uint64) + c).astype(_UNSIGNED[bits])
        # The pair that our multiplication is made of: bits are 32, and the sum of 64 has a carry between.
        c = self._get(one.operands[3], 32).astype(np.uint64)
        if (kind, modifiers[0]) == ("mad", "lo"):
            total = (whole & np.uint64(0xFFFFFFFF)) + c
            self._carry = total >> np.uint64(32)
        elif (kind, modifiers[0]) == ("madc", "hi"):
            total = (whole >> np.uint64(32)) + c + self._carry
        else:
            # A high half by itself, or a carry between others: our products are .wide, .lo, or mad.lo.cc with madc.hi.
            raise NotImplementedError(one.name)
        return total.astype(np.uint32)

    def _permuted(self, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], selector: str) -> np.ndarray[Any, Any]:
        both = (b.astype(np.uint64) << np.uint64(32)) | a
        chosen = self._get(selector, 32)
        if (chosen & np.uint32(0x8888)).any():
            # A selector that fills a byte with another's sign: our kernels move bytes as they are.
            raise NotImplementedError("prmt that repeats signs")
        result = np.zeros(len(a), np.uint64)
        for place in range(4):
            which = ((chosen >> np.uint32(4 * place)) & np.uint32(7)).astype(np.uint64)
            result |= ((both >> (which * np.uint64(8))) & np.uint64(0xFF)) << np.uint64(8 * place)
        return result.astype(np.uint32)

    def _mov(self, one: Instruction, bits: int, active: np.ndarray[Any, Any]) -> None:
        target, source = one.operands
        if isinstance(target, tuple):
            part = bits // len(target)
            value = self._get(source, bits)
            for index, name in enumerate(target):
                self._set(name, (value >> value.dtype.type(part * index)).astype(_UNSIGNED[part]), active)
        elif isinstance(source, tuple):
            part = bits // len(source)
            joined = np.zeros(self._program.threads, np.uint64)
            for index, name in enumerate(source):
                joined |= self._get(name, part).astype(np.uint64) << np.uint64(part * index)
            self._set(target, joined.astype(_UNSIGNED[bits]), active)
        elif one.name == "mov.pred":
            self._set(target, self._get(source) != 0, active)
        else:
            self._set(target, self._get(source, bits), active)

    def _move(self, one: Instruction, modifiers: list[str], bits: int, active: np.ndarray[Any, Any]) -> None:
        if one.name.startswith("ld.param"):
            value = np.full(self._program.threads, self._values[one.operands[1][1:-1]] & (2**64 - 1), np.uint64)
            self._set(one.operands[0], value.astype(_UNSIGNED[bits]), active)
            return
        loads = one.name.startswith("ld")
        names, place = (one.operands[0], one.operands[1]) if loads else (one.operands[1], one.operands[0])
        names = names if isinstance(names, tuple) else (names,)
        base, _, offset = place[1:-1].partition("+")
        addresses = self._get(base) + np.uint64(int(offset or "0", 0) & (2**64 - 1))
        if one.name.startswith("stmatrix"):
            self._store_matrices(names, addresses)
            return
        size = bits // 8
        if not active.any():
            return
        where = addresses[active]
        if (where % np.uint64(size * len(names))).any():
            raise IndexError("a misaligned vector access")
        for index, name in enumerate(names):
            for view, inside, offsets in self._memory.find(where + np.uint64(index * size), size):
                chosen = np.flatnonzero(active)[inside]
                lanes = active
                if len(chosen) < len(where):
                    lanes = np.zeros(self._program.threads, bool)
                    lanes[chosen] = True
                cells = view[: len(view) // size * size].view(_UNSIGNED[bits])
                if loads:
                    value = np.zeros(self._program.threads, _UNSIGNED[bits])
                    value[chosen] = cells[offsets // size]
                    self._set(name, value, lanes)
                else:
                    cells[offsets // size] = self._get(name, bits)[chosen]

    def _store_matrices(self, names: tuple[str, ...], addresses: np.ndarray[Any, Any]) -> None:
        """stmatrix.m8n8.b16: lane 8·i + r has the address of row r of matrix i; lane 4·r + j its word j."""
        for warp in range(0, self._program.threads, _WARP):
            for matrix, name in enumerate(names):
                words = self._get(name, 32)
                for row in range(8):
                    for word in range(4):
                        address = addresses[warp + 8 * matrix + row : warp + 8 * matrix + row + 1] + np.uint64(4 * word)
                        for view, _, offsets in self._memory.find(address, 4):
                            view.view(np.uint32)[offsets // 4] = words[warp + 4 * row + word]


def launch(program: Program, grid: tuple[int, int], values: Sequence[int], memory: Memory) -> int:
    """Run every program of a launch, one after the other; return the instructions of a thread in the longest."""
    shared = np.zeros(1 << 16, np.uint8)
    memory.add(_SHARED_AT, shared)
    longest = 0
    for x in range(grid[0]):
        for y in range(grid[1]):
            shared[:] = 0xA5
            longest = max(longest, _Threads(program, memory, values, (x, y)).run())
    return longest


def secret_uses(program: Program, *, public: str) -> list[str]:
    """Return the instructions whose address, guard or jump depends on a secret.

    What is loaded from addresses that were computed from the parameter `public` alone is public, and so are parameters
    and the numbers of threads and programs; whatever else is loaded, from global or shared memory, is secret.
    """
    secret: set[str] = set()
    origins: dict[str, set[str]] = {}
    while True:
        before = (len(secret), sum(map(len, origins.values())))
        for one in program.code:
            _follow(one, public, secret, origins)
        if before == (len(secret), sum(map(len, origins.values()))):
            break
    uses = []
    for one in program.code:
        places = [_name(operand) for operand in one.operands if isinstance(operand, str) and operand.startswith("[")]
        if any(name in secret for name in (*places, one.guard.lstrip("!"))):
            uses.append(f"@{one.guard} {one.name} {one.operands}")
    return uses


def _follow(one: Instruction, public: str, secret: set[str], origins: dict[str, set[str]]) -> None:
    if one.name.startswith(("st", "bra", "bar", "ret")) or not one.operands:
        return
    target, *sources = one.operands
    targets = target if isinstance(target, tuple) else target.split("|")
    names = [name for source in sources for name in (source if isinstance(source, tuple) else (_name(source),))]
    if one.name.startswith("ld.param"):
        for name in targets:
            origins.setdefault(name, set()).add(names[0])
        return
    from_where = set().union(*(origins.get(name, set()) for name in names))
    if one.name.startswith("ld."):
        # Of what the public table holds, addresses lead to what is secret.
        tainted = from_where != {public} or ".shared" in one.name
        from_where = {"loaded"} if from_where == {public} else set()
    else:
        tainted = any(name in secret for name in (*names, one.guard.lstrip("!")))
    for name in targets:
        if tainted:
            secret.add(name)
        origins.setdefault(name, set()).update(from_where)


def _name(operand: str) -> str:
    return operand.strip("[]").partition("+")[0]
