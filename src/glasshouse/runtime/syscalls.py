"""System call numbers, as data: name → (x86-64, aarch64); None where the architecture never had it.

From the kernel's arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h. Only calls
that the runtime makes or refuses are listed.
"""

from __future__ import annotations

import os

ARCHITECTURES = ("x86_64", "aarch64")

# The last call when the filters were written (mseal). What the kernel adds later is refused.
HIGHEST_KNOWN = 462

_TABLE: dict[str, tuple[int | None, int | None]] = {
    "_sysctl": (156, None),
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bind": (49, 200),
    "bpf": (321, 280),
    "capget": (125, 90),
    "capset": (126, 91),
    "chmod": (90, None),
    "chown": (92, None),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "clone": (56, 220),
    "clone3": (435, 435),
    "connect": (42, 203),
    "create_module": (174, None),
    "delete_module": (176, 106),
    "execve": (59, 221),
    "execveat": (322, 281),
    "fadvise64": (221, 223),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "fcntl": (72, 25),
    "fdatasync": (75, 83),
    "finit_module": (313, 273),
    "flock": (73, 32),
    "fremovexattr": (199, 16),
    "fsconfig": (431, 431),
    "fsetxattr": (190, 7),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "fsync": (74, 82),
    "futex": (202, 98),
    "futimesat": (261, None),
    "get_kernel_syms": (177, None),
    "init_module": (175, 105),
    "io_setup": (206, 0),
    "io_submit": (209, 2),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioctl": (16, 29),
    "ioperm": (173, None),
    "iopl": (172, None),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "landlock_add_rule": (445, 445),
    "landlock_create_ruleset": (444, 444),
    "landlock_restrict_self": (446, 446),
    "lchown": (94, None),
    "listen": (50, 201),
    "listmount": (458, 458),
    "lookup_dcookie": (212, 18),
    "lremovexattr": (198, 15),
    "lsetxattr": (189, 6),
    "lsm_set_self_attr": (460, 460),
    "madvise": (28, 233),
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "modify_ldt": (154, None),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "msgctl": (71, 187),
    "msgget": (68, 186),
    "msgrcv": (70, 188),
    "msgsnd": (69, 189),
    "name_to_handle_at": (303, 264),
    "nfsservctl": (180, 42),
    "open": (2, None),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "openat": (257, 56),
    "openat2": (437, 437),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "query_module": (178, None),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "remap_file_pages": (216, 234),
    "removexattr": (197, 14),
    "request_key": (249, 218),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "seccomp": (317, 277),
    "semctl": (66, 191),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setitimer": (38, 103),
    "setns": (308, 268),
    "setpgid": (109, 154),
    "setpriority": (141, 140),
    "setrlimit": (160, 164),
    "setsid": (112, 157),
    "setsockopt": (54, 208),
    "settimeofday": (164, 170),
    "setxattr": (188, 5),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmget": (29, 194),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "statmount": (457, 457),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "sync": (162, 81),
    "sync_file_range": (277, 84),
    "syncfs": (306, 267),
    "sysfs": (139, None),
    "syslog": (103, 116),
    "truncate": (76, 45),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "uselib": (134, None),
    "userfaultfd": (323, 282),
    "ustat": (136, None),
    "utime": (132, None),
    "utimensat": (280, 88),
    "utimes": (235, None),
    "vhangup": (153, 58),
}


# Groups of calls that filters refuse.

# Ways to read or steer another process.
OTHERS_MEMORY = (
    "kcmp", "migrate_pages", "move_pages", "pidfd_getfd", "process_madvise", "process_vm_writev", "ptrace",
)  # fmt: skip
# Large kernel interfaces that neither training nor the agent uses, and ways around the filter itself.
KERNEL_SURFACE = (
    "_sysctl", "acct", "add_key", "adjtimex", "bpf", "clock_adjtime", "clock_settime", "create_module",
    "delete_module", "fanotify_init", "fanotify_mark", "finit_module", "get_kernel_syms", "init_module",
    "io_uring_enter", "io_uring_register", "io_uring_setup", "ioperm", "iopl", "kexec_file_load", "kexec_load",
    "keyctl", "lookup_dcookie", "lsm_set_self_attr", "modify_ldt", "name_to_handle_at", "nfsservctl",
    "open_by_handle_at", "perf_event_open", "query_module", "quotactl", "quotactl_fd", "reboot", "request_key",
    "setdomainname", "settimeofday", "swapoff", "swapon", "sysfs", "syslog", "uselib", "userfaultfd", "ustat",
    "vhangup",
)  # fmt: skip
# What builds a sandbox also takes one apart.
NAMESPACES = (
    "chroot", "fsconfig", "fsmount", "fsopen", "fspick", "listmount", "mount", "mount_setattr", "move_mount",
    "open_tree", "pivot_root", "sethostname", "setns", "statmount", "umount2", "unshare",
)  # fmt: skip
# Kept by a file system for later readers; copying a file (shutil.copy2, cp) does without where there are none.
XATTRS = ("fremovexattr", "fsetxattr", "lremovexattr", "lsetxattr", "removexattr", "setxattr")
# Times and modes of files by their names: Landlock governs neither.
TIMES_AND_MODES = ("chmod", "fchmod", "fchmodat", "fchmodat2", "futimesat", "utime", "utimensat", "utimes")
OWNERS_AND_SIZES = ("chown", "fchown", "fchownat", "lchown", "truncate")
# By a descriptor for reading they commit what others wrote on its file system, beneath a read-only mount too: of a disk
# all users count commits, flushes and writes, which would follow a script. Its own files are memory.
TO_DISK = ("fadvise64", "fdatasync", "fsync", "sync", "sync_file_range", "syncfs")
# The same for requests that are handed in; how many there may be, which a script chooses, everybody reads (aio-nr).
HANDED_IN = ("io_setup", "io_submit")
# Restrictions of one's own: what they refuse is written to the machine's audit log, with names that a script chooses.
AUDITED = ("landlock_create_ruleset", "landlock_restrict_self", "seccomp")
# A process by its number, as first argument.
SCHEDULING = ("sched_setaffinity", "sched_setparam", "sched_setscheduler")
# Calls that nothing needs here, of which the kernel's log gets the caller's name: old forms, and a capability's.
LOGGED = ("capget", "capset", "remap_file_pages")
# They take many bits for each thread, which every user of the machine reads by the thread's number, `hidepid` or not.
READ_BY_ALL = ("ioprio_set", "sched_setattr")
# What stays in the kernel's memory when its last process has ended. It counts against no limit of the workspace and
# outlives a worker that the kernel killed for want of memory: a keeper is then killed in its place. Others' are near,
# by number. POSIX memory and semaphores, which libraries use, lie in /dev/shm.
LASTING = (
    "mq_open", "mq_unlink", "msgctl", "msgget", "msgrcv", "msgsnd", "semctl", "semget", "semop", "semtimedop", "shmat",
    "shmctl", "shmget",
)  # fmt: skip


class KernelError(OSError):
    """The kernel refused a call: `errno` is how, `operation` what."""

    def __init__(self, operation: str, number: int) -> None:
        super().__init__(number, os.strerror(number))
        self.operation = operation

    def __str__(self) -> str:
        return f"{self.operation}: {self.strerror}"


def number(name: str, machine: str) -> int | None:
    """Return the number of a call on a machine (`os.uname().machine`), or None where there is none."""
    if machine not in ARCHITECTURES:
        return None
    return _TABLE[name][ARCHITECTURES.index(machine)]


def numbers(names: tuple[str, ...], machine: str) -> list[int]:
    """Return the numbers of those of `names` that the machine has."""
    found = (number(name, machine) for name in names)
    return [value for value in found if value is not None]
