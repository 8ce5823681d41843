"""Memory for keys, shared between processes by its descriptor.

`memfd_secret` takes the pages out of the kernel's own map: neither `process_vm_readv` nor /proc/PID/mem
reads them, not even for root. Where it is missing, a locked `memfd` takes its place, and `kind` names it.
Law: after `wipe` every byte is zero; after `close` nothing is mapped.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

from glasshouse.attestation.claims import SecretMemoryKind
from glasshouse.errors import Code, PlatformError
from glasshouse.runtime.kernel import MADV_DONTDUMP, REAL, Kernel
from glasshouse.runtime.syscalls import KernelError


class SecretMemory:
    """One region of shared memory for secrets: `view`, writable, of exactly `size` bytes, zero at first.

    Another process maps the descriptor `fd`, which is closed on exec, shared; `kind` is what the kernel gave. Raises
    `PlatformError`: `platform-unsupported`: this machine has no memory to share at all.
    """

    def __init__(self, size: int, *, kernel: Kernel = REAL) -> None:
        if size <= 0:
            raise ValueError(f"secret memory of {size} bytes")
        self.size = size
        self._kernel = kernel
        try:
            self.fd, secret = kernel.memfd_secret(), True
        except KernelError:
            self.fd, secret = plain_memory(), False
        try:
            os.ftruncate(self.fd, size)
            if not secret:
                # A process that is handed it could cut it short, and this process would die of its next look at it.
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._map = mmap.mmap(self.fd, size)
        except OSError as error:
            os.close(self.fd)
            # RLIMIT_MEMLOCK counts secret memory for a process without CAP_IPC_LOCK.
            raise PlatformError(
                Code.PLATFORM,
                f"this machine gives no {size} bytes of secret memory: {error.strerror}",
                hint="raise the limit on locked memory (ulimit -l)",
            ) from error
        self.view = memoryview(self._map)
        self.kind = SecretMemoryKind.MEMFD_SECRET if secret else self._lock()

    @property
    def address(self) -> int:
        """Where the region lies in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.view))

    @property
    def mapped_bytes(self) -> int:
        """How much address space the region takes: whole pages."""
        return -(-self.size // mmap.PAGESIZE) * mmap.PAGESIZE

    def is_refused_to_readers(self) -> bool:
        """Try `process_vm_readv` on the region, as a reader of this memory would; return whether it was refused."""
        target = ctypes.create_string_buffer(1)
        try:
            self._kernel.process_vm_readv(os.getpid(), self.address, 1, ctypes.addressof(target))
        except KernelError:
            return True
        finally:
            target[0] = b"\0"
        return False

    def is_zero(self) -> bool:
        """Return whether every byte is zero."""
        return self.view == bytes(self.size)

    def wipe(self) -> None:
        ctypes.memset(self.address, 0, self.size)

    def close(self) -> None:
        """Wipe and give back; closing twice is allowed. Slices of `view` must be released before."""
        if self._map.closed:
            return
        self.wipe()
        self.view.release()
        self._map.close()
        os.close(self.fd)

    def __repr__(self) -> str:
        return f"SecretMemory({self.size} bytes, {self.kind})"

    def _lock(self) -> SecretMemoryKind:
        try:
            self._kernel.madvise(self.address, self.size, MADV_DONTDUMP)
            self._kernel.mlock(self.address, self.size)
        except KernelError:
            return SecretMemoryKind.UNLOCKED
        return SecretMemoryKind.LOCKED


def plain_memory() -> int:
    """Return the descriptor of an empty file in memory; raises `PlatformError`: `platform-unsupported`."""
    try:
        return os.memfd_create("glasshouse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise PlatformError(Code.PLATFORM, f"this machine gives no shared memory: {error.strerror}") from error
