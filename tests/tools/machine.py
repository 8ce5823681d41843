"""What the machine under the tests offers; a test that needs more is skipped and says why."""

from __future__ import annotations

import os

import pytest

from glasshouse.runtime import kernel as linux
from glasshouse.runtime.confine import seccomp
from glasshouse.runtime.kernel import REAL, Kernel
from glasshouse.runtime.syscalls import KernelError
from tools.forked import in_child

CAP_SYS_PTRACE = 19

# As in most containers: no namespace of any kind, and so no mount: the program of an agent.
CONFINED = """
import errno, runpy
from glasshouse.runtime.confine import seccomp
from glasshouse.runtime.kernel import PR_SET_NO_NEW_PRIVS, REAL
refusing = seccomp._Filter(REAL.machine)
refusing.refuse(("unshare",), errno.EPERM)
REAL.prctl(PR_SET_NO_NEW_PRIVS, 1)
REAL.seccomp(refusing.program(), 0)
runpy.run_module("glasshouse.runtime", run_name="__main__", alter_sys=True)
"""


def _namespaces() -> bool:
    def enter() -> bool:
        flags = linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWNET
        try:
            REAL.unshare(flags | (0 if REAL.capable(linux.CAP_SYS_ADMIN) else linux.CLONE_NEWUSER))
        except KernelError:
            return False
        return True

    return in_child(enter)


def _secret_memory() -> bool:
    try:
        os.close(REAL.memfd_secret())
    except KernelError:
        return False
    return True


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="this machine's user is not root")
needs_namespaces = pytest.mark.skipif(not _namespaces(), reason="this machine gives no namespaces")
needs_landlock = pytest.mark.skipif(REAL.landlock_abi() < 1, reason="this kernel has no Landlock")
needs_secret_memory = pytest.mark.skipif(not _secret_memory(), reason="this kernel has no memfd_secret")
needs_filters = pytest.mark.skipif(not seccomp.supports(REAL.machine), reason="this machine has another architecture")
needs_tracing = pytest.mark.skipif(
    not REAL.capable(CAP_SYS_PTRACE),
    reason="this machine gives no CAP_SYS_PTRACE, to attach to a process that is not dumpable",
)


class WithoutLandlock(Kernel):
    """A kernel before 5.13, or one built without it."""

    def landlock_abi(self) -> int:
        return 0


class WithoutSecretMemory(Kernel):
    """A kernel before 5.14, or one booted with secretmem.enable=0."""

    def memfd_secret(self) -> int:
        raise KernelError("memfd_secret", 38)


class WithoutSeccomp(Kernel):
    """A kernel built without system call filters."""

    def seccomp(self, program: bytes, flags: int = 0) -> int:
        raise KernelError("seccomp", 22)


class WithoutNamespaces(Kernel):
    """A container that allows no namespaces."""

    def unshare(self, flags: int) -> None:
        raise KernelError("unshare", 1)

    def read_only_view(self, path: str) -> int:
        raise KernelError("open_tree", 1)


class WithoutMounts(Kernel):
    """A container that gives a mount namespace, but no mounts in it."""

    def mount(self, source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
        raise KernelError(f"mount {target}", 1)

    def read_only_view(self, path: str) -> int:
        raise KernelError("open_tree", 1)


class Lacks(Kernel):
    """A kernel that lacks one namespace, or allows no more of it (sysctl user.max_net_namespaces and its like)."""

    def __init__(self, flag: int) -> None:
        super().__init__()
        self._flag = flag

    def unshare(self, flags: int) -> None:
        if flags & self._flag:
            raise KernelError("unshare", 28)
        super().unshare(flags)


HALF_ISOLATED: dict[str, Kernel] = {
    "no-pid-namespace": Lacks(linux.CLONE_NEWPID),
    "no-mount-namespace": Lacks(linux.CLONE_NEWNS),
    "no-network-namespace": Lacks(linux.CLONE_NEWNET),
    "no-ipc-namespace": Lacks(linux.CLONE_NEWIPC),
    "no-uts-namespace": Lacks(linux.CLONE_NEWUTS),
    "no-private-root": WithoutMounts(),
}


class WithoutNoswap(Kernel):
    """A kernel before 6.4."""

    def mount(self, source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
        if data is not None and "noswap" in data:
            raise KernelError(f"mount {target}", 22)
        super().mount(source, target, kind, flags, data)


class WithoutMemoryLock(Kernel):
    """A machine whose limit on locked memory is too low."""

    def mlockall(self, flags: int) -> None:
        raise KernelError("mlockall", 12)

    def mlock(self, address: int, length: int) -> None:
        raise KernelError("mlock", 12)


class WithSwap(Kernel):
    """A machine with a swap device."""

    def read(self, path: str) -> bytes:
        if path == "/proc/swaps":
            return b"Filename\tType\tSize\tUsed\tPriority\n/dev/sda2 partition 1 0 -1\n"
        return super().read(path)
