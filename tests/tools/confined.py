"""Runs a command as a container of Docker's defaults, or of a marketplace's, would: ``python confined.py COMMAND…``.

Capabilities beside Docker's default set are gone for good, and a filter refuses what Docker's default profile refuses
without CAP_SYS_ADMIN: no new namespace, mount, keyring or counter, and ``clone3`` is not there. A command that begins
with ``-m`` is run by this interpreter, with its options. With ``SHM=BYTES`` before the command, for root, /dev/shm is a
fresh tmpfs of that size, and no other but /tmp can be written to.
Source: moby/profiles/seccomp/default.json; capabilities(7).
"""

from __future__ import annotations

import errno
import os
import sys

from glasshouse.runtime import kernel as linux
from glasshouse.runtime.confine import mounts, seccomp
from glasshouse.runtime.kernel import REAL
from glasshouse.runtime.syscalls import KernelError

# CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE, NET_RAW, SYS_CHROOT, MKNOD,
# AUDIT_WRITE, SETFCAP
KEPT = {0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31}
REFUSED = (
    "acct", "add_key", "bpf", "clock_settime", "delete_module", "fanotify_init", "finit_module", "fsconfig", "fsmount",
    "fsopen", "fspick", "init_module", "io_uring_enter", "io_uring_register", "io_uring_setup", "ioperm", "iopl",
    "kcmp", "kexec_file_load", "kexec_load", "keyctl", "lookup_dcookie", "migrate_pages", "mount", "mount_setattr",
    "move_mount", "move_pages", "open_by_handle_at", "open_tree", "perf_event_open", "pidfd_getfd", "pivot_root",
    "process_madvise", "quotactl", "reboot", "request_key", "setdomainname", "sethostname", "setns", "settimeofday",
    "swapoff", "swapon", "syslog", "umount2", "unshare", "userfaultfd", "vhangup",
)  # fmt: skip

# mbind, set_mempolicy, get_mempolicy: the product's filters never name them.
POLICIES = {"x86_64": (237, 238, 239), "aarch64": (235, 236, 237)}


def confine() -> None:
    """Confine this process and all that it starts."""
    REAL.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    for capability in set(range(64)) - KEPT:
        try:
            REAL.prctl(linux.PR_CAPBSET_DROP, capability)
        except KernelError as error:
            if error.errno not in (errno.EINVAL, errno.EPERM):  # past the last; an ordinary user has none
                raise
    refusing = seccomp._Filter(REAL.machine)
    refusing.refuse(REFUSED, errno.EPERM)
    for number in POLICIES[REAL.machine]:
        refusing._code += [(seccomp._JEQ, 0, 1, number), seccomp._answer(errno.EPERM)]
    refusing.clone()
    REAL.seccomp(refusing.program())


def small_shared_memory(size: str) -> None:
    """Mount a fresh /dev/shm, which this process and its own alone see."""
    REAL.unshare(linux.CLONE_NEWNS)
    REAL.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    for place in mounts.MountTable.read(REAL.read).places("tmpfs"):
        if place != "/tmp" and not place.startswith(("/dev/", "/proc/", "/sys/")):
            REAL.mount("none", place, None, linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY)
    REAL.mount("shm", "/dev/shm", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC, f"mode=1777,size={size}")


def main() -> None:
    words = sys.argv[1:]
    if words[0].startswith("SHM="):
        small_shared_memory(words.pop(0).removeprefix("SHM="))
    if words[0] == "-m":
        words = [sys.executable, "-I", "-B", "-X", f"pycache_prefix={sys.pycache_prefix}", *words]
    confine()
    os.execvp(words[0], words)


if __name__ == "__main__":
    main()
