"""The sealed package, or a checkpoint, as the worker is handed it: a descriptor on which no call reaches a disk.

A process that may open a file may mostly set its times, mode and extended attributes too, and those stay on
disk. So the worker's descriptor is opened through a read-only mount; where there can be none, the ciphertext is copied
into memory that the kernel seals.
"""

from __future__ import annotations

import os

from glasshouse.runtime.kernel import Kernel

MOUNT, MEMORY = "read-only-mount", "sealed-memory"

_MFD_CLOEXEC, _MFD_ALLOW_SEALING = 1, 2
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_ALL_SEALS = 0b1111  # that there be no more seals, no shrinking, no growing, no writing
_F_GETFL = 3
_PIECE_BYTES = 1 << 30


def view(kernel: Kernel, descriptor: int) -> int | None:
    """Open the file of a descriptor once more, read-only whatever is called on it.

    Returns:
        a descriptor of the same file, or None where this process has no mount namespace of its own, or the file no
        longer has its name.
    """
    try:
        found = kernel.read_only_view(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115 - slow to import
    except OSError:
        return None
    # The name may lead to another file by now: what was checked is what is handed over.
    if not os.path.samestat(os.fstat(found), os.fstat(descriptor)) or kind(kernel, found) != MOUNT:
        os.close(found)
        return None
    return found


def sealed_copy(kernel: Kernel, descriptor: int) -> int:
    """Copy a file into memory that nothing can change any more; the offset of `descriptor` stays.

    Raises:
        OSError: there is too little memory, the file ends early, or the kernel does not seal.
    """
    size = os.fstat(descriptor).st_size
    memory = unsealed("package")
    try:
        os.posix_fallocate(memory, 0, size)
        copied = 0
        while copied < size:
            count = os.sendfile(memory, descriptor, copied, min(size - copied, _PIECE_BYTES))
            if not count:
                raise OSError("the package ends before its end")
            copied += count
        return seal(kernel, memory)
    finally:
        os.close(memory)


def unsealed(name: str) -> int:
    """Return a file in memory that can be sealed; raises `OSError`."""
    return os.memfd_create(name, _MFD_CLOEXEC | _MFD_ALLOW_SEALING)


def seal(kernel: Kernel, memory: int) -> int:
    """Let nothing change such a file any more, and return a read-only descriptor of it; raises `OSError`."""
    kernel.call("fcntl", memory, _F_ADD_SEALS, _ALL_SEALS)
    return os.open(f"/proc/self/fd/{memory}", os.O_RDONLY | os.O_CLOEXEC)


def kind(kernel: Kernel, descriptor: int) -> str | None:
    """Read back from the kernel why no call on a descriptor reaches a disk; None where one may."""
    try:
        if kernel.call("fcntl", descriptor, _F_GETFL, 0) & os.O_ACCMODE != os.O_RDONLY:
            return None
        if os.fstatvfs(descriptor).f_flag & os.ST_RDONLY:
            return MOUNT
        # Where the machine makes such files not executable it adds a seal of its own.
        return MEMORY if kernel.call("fcntl", descriptor, _F_GET_SEALS, 0) & _ALL_SEALS == _ALL_SEALS else None
    except OSError:
        return None
