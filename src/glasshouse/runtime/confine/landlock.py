"""Landlock: what a process may do with files, and which processes outside it may signal or call.

Rights are asked for by the version that the kernel offers (linux/landlock.h); nothing that is handled is
allowed outside the listed paths. Landlock governs neither datagrams nor Unix sockets with names: the
system call filter and the namespaces do.
"""

from __future__ import annotations

import os
import stat

from glasshouse.runtime.kernel import Kernel
from glasshouse.runtime.syscalls import KernelError

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_FIRST_RIGHTS = (1 << 13) - 1  # version 1: from EXECUTE to MAKE_SYM
_RIGHTS_BY_ABI = ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV))
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV

_NET_ABI, _NET_RIGHTS = 4, 0b11  # bind and connect of TCP
_SCOPE_ABI, _SCOPES = 6, 0b11  # abstract Unix sockets, signals
_PATH_BENEATH = 1


def rights(abi: int) -> int:
    """Return every right over files that a version of Landlock can take away."""
    return _FIRST_RIGHTS | sum(right for since, right in _RIGHTS_BY_ABI if abi >= since)


def restrict(
    kernel: Kernel,
    *,
    read: list[str],
    write: list[str],
    devices: list[str],
    names: list[str],
    files: list[str] | None = None,
    tcp: bool = False,
) -> int:
    """Restrict this process and its children for good; needs no_new_privs and a single thread.

    Return the version applied; 0 where the kernel has none, and then nothing is restricted.

    Args:
        read: paths that may be read and executed.
        write: directories in which everything is allowed.
        devices: device nodes that may be read, written and controlled.
        names: directories beneath which names may be listed, but no file opened.
        files: directories beneath which files that are there may be written, so far as they let themselves be.
        tcp: whether TCP may be used: in a network namespace in which it leads nowhere.

    Raises:
        OSError: the kernel has Landlock and refuses, or a path is not there.
    """
    abi = kernel.landlock_abi()
    if abi < 1:
        return 0
    handled = rights(abi)
    attributes = handled.to_bytes(8, "little")
    if abi >= _NET_ABI:
        attributes += (0 if tcp else _NET_RIGHTS).to_bytes(8, "little")
    if abi >= _SCOPE_ABI:
        attributes += _SCOPES.to_bytes(8, "little")
    ruleset = kernel.call("landlock_create_ruleset", attributes, len(attributes), 0)
    try:
        for paths, allowed in (
            (read, _EXECUTE | _READ_FILE | _READ_DIR),
            (devices, _READ_FILE | _WRITE_FILE | _IOCTL_DEV),
            (files or [], _WRITE_FILE | _TRUNCATE | _READ_FILE | _READ_DIR),
            (write, handled & ~_IOCTL_DEV),
            (names, _READ_DIR),
        ):
            for path in paths:
                _allow(kernel, ruleset, path, allowed & handled)
        kernel.call("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)
    return abi


def _allow(kernel: Kernel, ruleset: int, path: str, allowed: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            allowed &= _FILE_RIGHTS
        attributes = allowed.to_bytes(8, "little") + descriptor.to_bytes(4, "little")
        try:
            kernel.call("landlock_add_rule", ruleset, _PATH_BENEATH, attributes, 0)
        except KernelError as error:
            raise KernelError(f"landlock rule for {path}", error.errno or 0) from error
    finally:
        os.close(descriptor)
