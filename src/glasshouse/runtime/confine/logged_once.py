"""Lines that the kernel logs once a boot with a name of the caller's choice: caused here first.

It names a program that is started without arguments, and one that asks for an executable stack, by a path or the last
four parts of one: some 800 bytes. Neither is an argument that a filter can see.
"""

from __future__ import annotations

import ctypes
import os
import struct

from glasshouse.runtime.kernel import Kernel

_AT_EMPTY_PATH = 0x1000
_ADDRESS = 0x400000
_HEADER, _SEGMENT = 64, 56
_ELF = b"\x7fELF\x02\x01\x01"
_PT_LOAD, _PT_GNU_STACK = 1, 0x6474E551
_READ_EXECUTE, _READ_WRITE_EXECUTE = 5, 7
# ELF's number of the machine, and the code of exit(0).
_MACHINES = {
    "x86_64": (62, bytes.fromhex("31ff b83c000000 0f05")),
    "aarch64": (183, bytes.fromhex("000080d2 a80b80d2 010000d4")),
}


def program(machine: str) -> bytes:
    """Return the smallest program that asks for an executable stack and ends; raises `KeyError` for other machines."""
    number, code = _MACHINES[machine]
    start = _HEADER + 2 * _SEGMENT
    size = start + len(code)
    return b"".join(
        (
            struct.pack("<16sHHIQQQIHHHHHH", _ELF, 2, number, 1, _ADDRESS + start, _HEADER, 0, 0, 64, 56, 2, 0, 0, 0),
            struct.pack("<IIQQQQQQ", _PT_LOAD, _READ_EXECUTE, 0, _ADDRESS, _ADDRESS, size, size, 4096),
            struct.pack("<IIQQQQQQ", _PT_GNU_STACK, _READ_WRITE_EXECUTE, 0, 0, 0, 0, 0, 16),
            code,
        )
    )


def use_up(kernel: Kernel) -> bool:
    """Start such a program, without arguments, in a child; return whether it ran: else the worker may be the first."""
    try:
        image = program(kernel.machine)
        memory = os.memfd_create("glasshouse", os.MFD_CLOEXEC)
    except (KeyError, OSError):
        return False
    try:
        os.write(memory, image)
        child = os.fork()
        if child == 0:
            try:
                nothing = ctypes.c_void_p(None)
                words = (ctypes.addressof(nothing), ctypes.addressof(nothing), _AT_EMPTY_PATH)
                kernel.call("execveat", memory, b"", *words)
            finally:
                os._exit(1)
        return os.waitpid(child, 0)[1] == 0
    except OSError:
        return False
    finally:
        os.close(memory)
