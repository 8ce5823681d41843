"""What the kernel logs once a boot, and by whose name."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import pytest

from glasshouse.runtime import syscalls
from glasshouse.runtime.kernel import REAL, Kernel
from glasshouse.runtime.syscalls import KernelError
from glasshouse.runtime.worker import sandbox_steps as steps
from tools.machine import WithoutNamespaces, needs_filters
from tools.sandboxed import run

pytestmark = needs_filters

STARTED = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
path = os.path.abspath('CANARY%s' % ('x' * 200))
with open(path, 'wb') as file:
    file.write(IMAGE)
os.chmod(path, 0o700)
def start(name, *words):
    child = os.fork()
    if child == 0:
        libc.syscall(NUMBERS[name], *words)
        os._exit(ctypes.get_errno())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
empty, there = (ctypes.c_char_p * 1)(None), os.open(path, os.O_RDONLY)
print(start('execve', path.encode(), None, empty), start('execveat', there, b'', None, empty, 0x1000))
print(start('execve', path.encode(), empty, empty))
"""


@pytest.mark.parametrize("machine", syscalls.ARCHITECTURES)
def test_the_program_asks_for_an_executable_stack_on_both_architectures(machine: str) -> None:
    image = steps.program(machine)
    kind, flags = struct.unpack_from("<II", image, 64 + 56)
    assert (image[:4], kind, flags) == (b"\x7fELF", 0x6474E551, 7)
    entry, segments = struct.unpack_from("<QQ", image, 24)
    size = struct.unpack_from("<Q", image, 64 + 32)[0]
    assert (segments, size) == (64, len(image))
    assert 0x400000 + 64 + 112 == entry < 0x400000 + len(image)


def test_a_program_without_arguments_runs_here_and_where_none_can_it_is_said() -> None:
    class WithoutPrograms(Kernel):
        """A kernel that starts nothing that lies in memory."""

        def call(self, name: str, *arguments: int | bytes | None) -> int:
            if name == "execveat":
                raise KernelError(name, errno.EACCES)
            return super().call(name, *arguments)

    assert steps.use_up_log_lines(REAL)
    assert not steps.use_up_log_lines(WithoutPrograms())


def test_a_kernel_that_could_not_be_made_to_log_first_is_noted() -> None:
    class Unprepared(WithoutNamespaces):
        """One that starts nothing that lies in memory."""

        def call(self, name: str, *arguments: int | bytes | None) -> int:
            if name == "execveat":
                raise KernelError(name, errno.EACCES)
            return super().call(name, *arguments)

    assert "exec-logged" in run("pass", kernel=Unprepared()).report.notes
    assert "exec-logged" not in run("pass", kernel=WithoutNamespaces()).report.notes


def test_no_program_without_arguments_is_named_in_the_kernels_log() -> None:
    numbers = {name: syscalls.number(name, REAL.machine) for name in ("execve", "execveat")}
    code = STARTED.replace("NUMBERS", repr(numbers)).replace("IMAGE", repr(steps.program(REAL.machine)))
    # No pointer is refused; an empty list is not, of which the runtime has caused the one line of this boot.
    assert run(code).output == f"{errno.EFAULT} {errno.EFAULT}\n0\n"
    log = Path("/dev/kmsg")
    try:
        with log.open("rb", buffering=0) as stream:
            os.set_blocking(stream.fileno(), False)
            lines = []
            while piece := stream.read(8192):
                lines.append(piece)
    except OSError:
        pytest.skip("this machine's log of the kernel is not to be read")
    assert not [line for line in lines if b"CANARYxxx" in line]
