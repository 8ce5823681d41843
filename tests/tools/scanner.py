"""Searches processes and files for secrets from outside, as root would; shares no code with what it searches.

What it looks at: all readable memory of processes and of everything that descends from them, through
/proc/PID/mem; the files that they hold open without a name (deleted files, memfds); files below folders;
/dev/shm. What it looks for: each needle raw, in hexadecimal, in base64 of both alphabets at every
alignment. What it could not read it says.
"""

from __future__ import annotations

import base64
import ctypes
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_CHUNK_BYTES = 4 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.memmem.restype = ctypes.c_void_p
_libc.memmem.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t)


@dataclass(frozen=True)
class Hit:
    """A needle that was found.

    Attributes:
        needle: its name.
        form: how it was written: raw, hex, base64…
        where: the process and region, or the file.
    """

    needle: str
    form: str
    where: str


@dataclass
class Report:
    """What a scan came to.

    Attributes:
        hits: what was found.
        searched_bytes: how much was read.
        unreadable: what was not, e.g. secret memory.
    """

    hits: set[Hit] = field(default_factory=set)
    searched_bytes: int = 0
    unreadable: list[str] = field(default_factory=list)

    def of(self, needle: str) -> set[Hit]:
        return {hit for hit in self.hits if hit.needle == needle}


def scan(
    needles: Mapping[str, bytes],
    *,
    pids: Iterable[int] = (),
    folders: Iterable[Path] = (),
    shared_memory: bool = True,
) -> Report:
    """Search everything named.

    Args:
        needles: name → bytes, at least 8 each.
        pids: processes; their descendants are searched too. This process is refused: it holds the needles.
        folders: searched recursively; a file is taken as it is.
        shared_memory: whether /dev/shm is searched.
    """
    patterns = _Patterns(needles)
    report = Report()
    for pid in sorted(family(pids)):
        if pid == os.getpid():
            raise ValueError("the scanner holds the needles itself")
        _scan_memory(pid, patterns, report)
        _scan_nameless_files(pid, patterns, report)
    for folder in [*folders, *([Path("/dev/shm")] if shared_memory else [])]:
        for path in [folder] if folder.is_file() else sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink():
                _scan_file(path, str(path), patterns, report)
    return report


def family(pids: Iterable[int]) -> set[int]:
    """Return processes and all that descends from them."""
    children: dict[int, list[int]] = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                parent = int((process / "stat").read_text().rpartition(") ")[2].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(process.name))
    found: set[int] = set()
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, [])
    return found


class _Patterns:
    """All written forms of all needles, and one buffer to search in."""

    def __init__(self, needles: Mapping[str, bytes]) -> None:
        self.forms: list[tuple[str, str, bytes]] = []
        for name, needle in needles.items():
            if len(needle) < 8:
                raise ValueError(f"{name} is too short to be told from chance")
            self.forms += [(name, form, pattern) for form, pattern in _written(needle)]
        self.overlap = max((len(pattern) for _, _, pattern in self.forms), default=1) - 1
        self.buffer = bytearray(_CHUNK_BYTES + self.overlap)
        self._anchor = (ctypes.c_char * len(self.buffer)).from_buffer(self.buffer)
        self._place = ctypes.addressof(self._anchor)

    def search(self, count: int) -> Iterator[tuple[str, str]]:
        for name, form, pattern in self.forms:
            if _libc.memmem(self._place, count, pattern, len(pattern)):
                yield name, form


def _written(needle: bytes) -> Iterator[tuple[str, bytes]]:
    yield "raw", needle
    yield "hex", needle.hex().encode()
    yield "hex-upper", needle.hex().upper().encode()
    for shift in range(3):
        # Of a text that holds the needle somewhere, only the characters that depend on nothing else.
        text = base64.b64encode(bytes(shift) + needle)
        first, last = -(-shift * 8 // 6), (shift + len(needle)) * 8 // 6
        yield "base64", text[first:last]
        yield "base64url", text[first:last].translate(bytes.maketrans(b"+/", b"-_"))


def _scan_memory(pid: int, patterns: _Patterns, report: Report) -> None:
    try:
        regions = Path(f"/proc/{pid}/maps").read_text().splitlines()
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    except OSError:
        report.unreadable.append(f"process {pid}")
        return
    try:
        for line in regions:
            fields = line.split(None, 5)
            name = fields[5] if len(fields) == 6 else "anonymous"
            if "r" not in fields[1] or name in ("[vvar]", "[vvar_vclock]", "[vsyscall]"):
                continue
            start, end = (int(bound, 16) for bound in fields[0].split("-"))
            _scan_range(memory, start, end, f"process {pid} {name}", patterns, report)
    finally:
        os.close(memory)


def _scan_range(descriptor: int, at: int, end: int, where: str, patterns: _Patterns, report: Report) -> None:
    view = memoryview(patterns.buffer)
    while at < end:
        wanted = min(len(view), end - at)
        try:
            count = os.preadv(descriptor, [view[:wanted]], at)
        except OSError:
            count = 0
        if not count:
            report.unreadable.append(where)
            return
        report.hits |= {Hit(name, form, where) for name, form in patterns.search(count)}
        report.searched_bytes += count
        if at + count >= end:
            return
        at += max(1, count - patterns.overlap) if count == wanted else count


def _scan_nameless_files(pid: int, patterns: _Patterns, report: Report) -> None:
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return
    for link in descriptors:
        try:
            target = str(link.readlink())
            regular = stat.S_ISREG(link.stat().st_mode)
        except OSError:
            continue
        if regular and (target.endswith("(deleted)") or target.startswith("/memfd:")):
            _scan_file(link, f"process {pid} file {target}", patterns, report)


def _scan_file(path: Path, where: str, patterns: _Patterns, report: Report) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        report.unreadable.append(where)
        return
    try:
        _scan_range(descriptor, 0, os.fstat(descriptor).st_size, where, patterns, report)
    finally:
        os.close(descriptor)
