"""The outside scanner is itself proven: it finds what was planted, wherever it lies, and nothing where nothing is."""

from __future__ import annotations

import base64
import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tools import scanner
from tools.machine import needs_root, needs_secret_memory

pytestmark = needs_root

_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.read.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)

SIZE = 32


class OnStack(ctypes.Structure):
    """Larger than registers: passed by value, it is copied onto the C stack, deeper than what comes after."""

    _fields_ = (("before", ctypes.c_char * 64), ("needle", ctypes.c_char * SIZE), ("after", ctypes.c_char * 65536))


@contextmanager
def process(plant: Callable[[int], object], needle: bytes) -> Iterator[int]:
    """Run `plant` in a child, which reads the needle from a pipe; yield the child's pid while it waits.

    Neither this process nor the child ever has the needle as a Python object of that child.
    """
    source, sender = os.pipe()
    ready, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        # A new program: what this test holds is not in its memory.
        code = f"""
import os, sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[2])]!r}
import {Path(__file__).stem} as stories
kept = stories.{plant.__name__}({source})
os.write({writer}, b'x')
import signal
signal.pause()
"""
        os.set_inheritable(source, True)
        os.set_inheritable(writer, True)
        import sys

        os.execv(sys.executable, [sys.executable, "-c", code])
    try:
        os.write(sender, needle)
        assert os.read(ready, 1) == b"x"
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for descriptor in (source, sender, ready, writer):
            os.close(descriptor)


def plant_in_heap(source: int) -> object:
    block = _libc.malloc(4096)
    _libc.read(source, block + 1000, SIZE)
    return block


def plant_in_freed_block(source: int) -> object:
    block = _libc.malloc(4096)
    guard = _libc.malloc(4096)  # keeps the block from going back to the kernel
    _libc.read(source, block + 1000, SIZE)
    _libc.free(ctypes.c_void_p(block))
    return guard


def plant_on_c_stack(source: int) -> object:
    carried = OnStack()
    place = ctypes.addressof(carried)
    _libc.read(source, place + OnStack.needle.offset, SIZE)
    _libc.abs(carried)
    ctypes.memset(place, 0, ctypes.sizeof(carried))
    return carried


def plant_and_wipe(source: int) -> object:
    block = _libc.malloc(4096)
    _libc.read(source, block + 1000, SIZE)
    ctypes.memset(block, 0, 4096)
    return block


def plant_in_python_object(source: int) -> object:
    return os.read(source, SIZE)


def plant_as_text(source: int) -> object:
    secret = os.read(source, SIZE)
    return [base64.b64encode(b"ab" + secret + b"c"), secret.hex().upper()]


def plant_in_nameless_file(source: int) -> object:
    descriptor = os.memfd_create("nameless")
    os.write(descriptor, os.read(source, SIZE))
    return descriptor


def plant_in_a_child(source: int) -> object:
    if os.fork() == 0:
        _libc.prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG: it stays no longer than who is killed above
        kept = plant_in_heap(source)
        os.waitid(os.P_ALL, 0, os.WEXITED) if kept == 0 else signal.pause()
    import time

    time.sleep(0.2)
    return None


def plant_in_secret_memory(source: int) -> object:
    from glasshouse.runtime.keys.secret_memory import SecretMemory

    memory = SecretMemory(4096)
    _libc.read(source, memory.address, SIZE)
    return memory


def found(plant: Callable[[int], object]) -> scanner.Report:
    needle = os.urandom(SIZE)
    with process(plant, needle) as pid:
        return scanner.scan({"needle": needle, "other": os.urandom(SIZE)}, pids=[pid], shared_memory=False)


def test_a_needle_in_the_heap_is_found() -> None:
    report = found(plant_in_heap)
    assert {(hit.needle, hit.form) for hit in report.hits} == {("needle", "raw")}
    assert any("[heap]" in hit.where for hit in report.hits)


def test_a_needle_in_a_freed_block_is_found() -> None:
    assert any("[heap]" in hit.where for hit in found(plant_in_freed_block).of("needle"))


def test_a_needle_left_on_the_c_stack_is_found() -> None:
    assert any("[stack]" in hit.where for hit in found(plant_on_c_stack).of("needle"))


def test_a_needle_in_a_python_object_is_found() -> None:
    assert found(plant_in_python_object).of("needle")


def test_a_needle_that_was_wiped_is_not_found() -> None:
    report = found(plant_and_wipe)
    assert not report.hits
    assert report.searched_bytes > 1 << 20


def test_a_needle_written_as_text_is_found_also_within_more_text() -> None:
    assert {"base64", "hex-upper"} <= {hit.form for hit in found(plant_as_text).hits}


def test_a_needle_in_a_file_without_a_name_is_found() -> None:
    assert any("nameless" in hit.where for hit in found(plant_in_nameless_file).hits)


def test_a_needle_in_a_child_of_the_process_is_found() -> None:
    assert found(plant_in_a_child).of("needle")


@needs_secret_memory
def test_secret_memory_is_reported_as_unreadable_and_not_as_clean() -> None:
    report = found(plant_in_secret_memory)
    assert not report.hits
    assert any("secretmem" in place for place in report.unreadable)


@pytest.mark.parametrize("shift", range(5))
def test_every_alignment_and_alphabet_of_base64_is_found_in_a_file(shift: int, tmp_path: Path) -> None:
    needle = bytes(range(240, 256)) + b"\xfb\xef\xbe" * 5 + b"!"
    for name, encode in (("std", base64.b64encode), ("url", base64.urlsafe_b64encode)):
        (tmp_path / name).write_bytes(encode(os.urandom(shift) + needle + os.urandom(7)))
    hits = scanner.scan({"needle": needle}, folders=[tmp_path], shared_memory=False).hits
    assert {(hit.form, Path(hit.where).name) for hit in hits} == {("base64", "std"), ("base64url", "url")}


def test_a_needle_across_two_pieces_of_a_large_file_is_found(tmp_path: Path) -> None:
    needle = os.urandom(SIZE)
    (tmp_path / "large").write_bytes(bytes(scanner._CHUNK_BYTES + 40) + needle + bytes(100))
    assert scanner.scan({"needle": needle}, folders=[tmp_path / "large"], shared_memory=False).of("needle")


def test_shared_memory_is_searched() -> None:
    needle = os.urandom(SIZE)
    path = Path(f"/dev/shm/glasshouse-scanner-test-{os.getpid()}")
    path.write_bytes(needle)
    try:
        assert scanner.scan({"needle": needle}).of("needle")
    finally:
        path.unlink()


def test_the_scanner_refuses_to_search_itself_and_needles_that_chance_would_find() -> None:
    with pytest.raises(ValueError, match="holds the needles"):
        scanner.scan({"needle": os.urandom(SIZE)}, pids=[os.getpid()])
    with pytest.raises(ValueError, match="too short"):
        scanner.scan({"needle": b"short"})
