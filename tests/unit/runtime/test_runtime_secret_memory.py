"""Memory for keys: shared, refused to readers, wiped, and honest about what the machine gave."""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import closing
from pathlib import Path

import pytest

from glasshouse.attestation.claims import SecretMemoryKind
from glasshouse.errors import Code, PlatformError
from glasshouse.runtime.kernel import REAL, Kernel
from glasshouse.runtime.keys.secret_memory import SecretMemory
from tools.forked import in_child
from tools.machine import WithoutMemoryLock, WithoutSecretMemory, needs_root, needs_secret_memory


class WithoutBoth(WithoutSecretMemory, WithoutMemoryLock):
    """Neither secret nor locked memory."""


def read_from_outside(pid: int, address: int, size: int) -> bytes | None:
    """Read another process's memory as root would; None when the kernel refuses."""
    try:
        descriptor = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
        try:
            return os.pread(descriptor, size, address)
        finally:
            os.close(descriptor)
    except OSError:
        return None


@needs_secret_memory
def test_secret_memory_starts_as_zeros_of_the_size_asked_for() -> None:
    with closing(SecretMemory(5000)) as memory:
        assert (memory.kind, len(memory.view), memory.mapped_bytes) == (SecretMemoryKind.MEMFD_SECRET, 5000, 8192)
        assert memory.is_zero()
        assert "5000 bytes" in repr(memory)


@needs_secret_memory
def test_a_reader_of_this_process_is_refused() -> None:
    with closing(SecretMemory(64)) as memory:
        memory.view[:4] = b"key!"
        assert memory.is_refused_to_readers()


@needs_root
@needs_secret_memory
def test_root_reads_ordinary_memory_of_a_process_and_no_secret_memory() -> None:
    with closing(SecretMemory(64)) as memory:
        ordinary = mmap.mmap(-1, 64)
        memory.view[:4] = ordinary[:4] = b"key!"
        place = ctypes.addressof(ctypes.c_char.from_buffer(ordinary))
        pid, secret = os.getpid(), memory.address
        found = in_child(lambda: (read_from_outside(pid, place, 4), read_from_outside(pid, secret, 4)))
        assert found == (b"key!", None)


def test_what_one_process_writes_another_reads() -> None:
    with closing(SecretMemory(64)) as memory:

        def story() -> None:
            with mmap.mmap(memory.fd, 64) as other:
                other[:5] = b"hello"

        in_child(story)
        assert bytes(memory.view[:5]) == b"hello"


def test_wiping_leaves_zeros() -> None:
    with closing(SecretMemory(5000)) as memory:
        memory.view[:] = b"x" * 5000
        assert not memory.is_zero()
        memory.wipe()
        assert memory.is_zero()


def test_closing_wipes_first_and_can_be_done_twice() -> None:
    memory = SecretMemory(64)
    again = mmap.mmap(memory.fd, 64)
    memory.view[:] = b"x" * 64
    memory.close()
    memory.close()
    assert again[:] == bytes(64)
    again.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(memory.fd)


def test_its_descriptor_does_not_survive_an_exec() -> None:
    with closing(SecretMemory(64)) as memory:
        assert not os.get_inheritable(memory.fd)


def test_without_secret_memory_it_is_locked_memory_and_says_so() -> None:
    with closing(SecretMemory(64, kernel=WithoutSecretMemory())) as memory:
        assert memory.kind is SecretMemoryKind.LOCKED
        assert not memory.is_refused_to_readers()


def test_without_a_lock_either_it_is_ordinary_memory_and_says_so() -> None:
    with closing(SecretMemory(64, kernel=WithoutBoth())) as memory:
        assert memory.kind is SecretMemoryKind.UNLOCKED


def test_a_machine_that_gives_no_memory_is_a_platform_error_and_leaks_no_descriptor() -> None:
    class TooLittle(Kernel):
        def memfd_secret(self) -> int:
            return os.open(os.devnull, os.O_RDWR)  # cannot be given a size

    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(PlatformError) as caught:
        SecretMemory(64, kernel=TooLittle())
    assert caught.value.code is Code.PLATFORM
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_no_size_is_no_memory() -> None:
    with pytest.raises(ValueError, match="0 bytes"):
        SecretMemory(0)


@pytest.mark.parametrize("kernel", [REAL, WithoutSecretMemory()], ids=["secret", "plain"])
def test_whoever_is_handed_it_cannot_cut_it_short(kernel: Kernel) -> None:
    with closing(SecretMemory(8192, kernel=kernel)) as secret:
        for size in (0, 4096, 16384):
            with pytest.raises(OSError, match=r"not permitted|Invalid argument"):
                os.ftruncate(secret.fd, size)
        secret.view[8191] = 1
