"""What a crash leaves on the machine: no core dump of any process of a run, as a file or with a program that takes it.

A limit of 0 keeps the kernel from writing a file, and a program that dumps are piped to (systemd-coredump, apport) gets
the whole memory all the same. A limit of 1 stops both (core(5), fs/coredump.c). A socket, to which a process that
crashes is connected since Linux 6.16, takes the whole memory at any limit. What a training script starts can be dumped:
exec makes every process dumpable again.
"""

from __future__ import annotations

import resource

from glasshouse.runtime.kernel import Kernel

_PATTERN = "/proc/sys/kernel/core_pattern"


def crashes_are_logged(kernel: Kernel) -> bool:
    """Return whether the kernel's log gets a line for a crash: with a name and addresses that a script may choose."""
    try:
        return kernel.read("/proc/sys/debug/exception-trace").strip() != b"0"
    except OSError:
        return True


def limit() -> None:
    """Set this process's limit, and that of all that it starts, to 1; to 0 where it was 0 already for good."""
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    except ValueError:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def closed(kernel: Kernel, limits: tuple[int, int]) -> bool:
    """Return whether nothing is dumped of a process with these limits, soft and hard, on this machine."""
    try:
        pattern = kernel.read(_PATTERN)
    except OSError:
        return False
    # `@socket` is asked for no limit, neither 0 nor 1: coredump_socket() of fs/coredump.c.
    return not pattern.startswith(b"@") and (limits == (1, 1) or (limits == (0, 0) and not pattern.startswith(b"|")))
