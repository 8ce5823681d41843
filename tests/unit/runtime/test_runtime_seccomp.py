"""The filters: read by an interpreter of our own for every call of both architectures, and tried for real."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import socket
import struct
from collections.abc import Callable

import pytest

from glasshouse.runtime import syscalls
from glasshouse.runtime.confine import seccomp
from glasshouse.runtime.kernel import PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, REAL
from glasshouse.runtime.syscalls import KernelError
from tools.forked import ChildDiedError, in_child
from tools.machine import needs_filters

ALLOW, ERRNO = 0x7FFF0000, 0x00050000
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
I386, ARM = 0x40000003, 0x40000028
MACHINES = pytest.mark.parametrize("machine", syscalls.ARCHITECTURES)

pytestmark = needs_filters


def judge(program: bytes, *, arch: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """Run a filter as the kernel would and return its verdict; a jump out of it fails."""
    words = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<IIQ6Q", number, arch, 0, *words)
    lines = list(struct.iter_unpack("<HBBI", program))
    accumulator = position = 0
    while True:
        code, true, false, value = lines[position]
        position += 1
        if code == 0x20:
            accumulator = int.from_bytes(data[value : value + 4], "little")
        elif code == 0x06:
            return value
        elif code == 0x54:
            accumulator &= value
        else:
            taken = {
                0x15: accumulator == value,
                0x25: accumulator > value,
                0x35: accumulator >= value,
                0x45: bool(accumulator & value),
            }[code]
            position += true if taken else false


def worker_filter(machine: str, *, isolated: bool = True) -> bytes:
    return seccomp.worker(machine, isolated=isolated)


def ranks_filter(machine: str) -> bytes:
    return seccomp.worker(machine, isolated=True, loopback=True)


def all_filters(machine: str) -> list[bytes]:
    return [
        worker_filter(machine),
        worker_filter(machine, isolated=False),
        ranks_filter(machine),
        seccomp.agent(machine, own_pid=77),
        seccomp.sealed_agent(machine, own_pid=77),
    ]


def call(program: bytes, machine: str, name: str, *arguments: int) -> int:
    number = syscalls.number(name, machine)
    assert number is not None
    return judge(program, arch=ARCH[machine], number=number, arguments=arguments)


@MACHINES
def test_every_filter_fits_the_kernel_and_ends_for_every_call(machine: str) -> None:
    for program in all_filters(machine):
        assert len(program) % 8 == 0
        assert len(program) // 8 <= 4096
        for number in range(syscalls.HIGHEST_KNOWN + 40):
            assert judge(program, arch=ARCH[machine], number=number) & 0xFFFF0000 in (ALLOW, ERRNO)


@MACHINES
@pytest.mark.parametrize("foreign", [I386, ARM, 0, 0xFFFFFFFF])
def test_no_call_of_a_foreign_abi_exists(machine: str, foreign: int) -> None:
    for program in all_filters(machine):
        assert {judge(program, arch=foreign, number=number) for number in range(400)} == {ERRNO | errno.ENOSYS}


def test_no_call_of_the_x32_abi_exists() -> None:
    for program in all_filters("x86_64"):
        for number in (0x40000000, 0x40000000 | 41, 0x40000000 | 520, 0xFFFFFFFF):
            assert judge(program, arch=ARCH["x86_64"], number=number) == ERRNO | errno.ENOSYS


@MACHINES
def test_a_call_that_nobody_knows_yet_does_not_exist(machine: str) -> None:
    for program in all_filters(machine):
        for number in (syscalls.HIGHEST_KNOWN + 1, 500, 1023, 0x3FFFFFFF):
            assert judge(program, arch=ARCH[machine], number=number) == ERRNO | errno.ENOSYS


@MACHINES
@pytest.mark.parametrize(
    "name",
    [
        "ptrace", "process_vm_readv", "process_vm_writev", "bpf", "perf_event_open", "userfaultfd", "io_uring_setup",
        "io_uring_enter", "io_uring_register", "kexec_load", "kexec_file_load", "init_module", "finit_module",
        "mount", "umount2", "pivot_root", "move_mount", "setns", "unshare", "keyctl", "add_key", "request_key",
        "pidfd_getfd", "open_by_handle_at", "chroot", "swapon", "fsopen", "open_tree", "mount_setattr", "reboot",
    ],
)  # fmt: skip
def test_the_worker_is_refused(machine: str, name: str) -> None:
    assert call(worker_filter(machine), machine, name) == ERRNO | errno.EPERM


@MACHINES
@pytest.mark.parametrize("isolated", [True, False], ids=["isolated", "half-isolated"])
def test_the_worker_leaves_nothing_in_attributes_flags_leases_or_hints(machine: str, isolated: bool) -> None:
    program = worker_filter(machine, isolated=isolated)
    for name in ("setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr"):
        assert call(program, machine, name) == ERRNO | errno.EOPNOTSUPP
    for number in (463, 466, 469):  # setxattrat, removexattrat, file_setattr, newer than all that is known here
        assert judge(program, arch=ARCH[machine], number=number) == ERRNO | errno.ENOSYS
    for request in (0x40086602, 0x40046602, 0x401C5820, 0x40806685):
        assert call(program, machine, "ioctl", 4, request) == ERRNO | errno.ENOTTY
    for command in (1024, 1036, 1038, 5, 6, 7, 36, 37, 38):
        assert call(program, machine, "fcntl", 4, command) == ERRNO | errno.EPERM
    for command in (1, 3, 4, 1030, 1033):
        assert call(program, machine, "fcntl", 4, command) == ALLOW


@MACHINES
def test_no_control_of_a_file_system_is_passed_on_whatever_its_size_and_direction(machine: str) -> None:
    not_theirs = {0x00, ord("F"), ord("m"), ord("T"), 0x89}
    for program in (worker_filter(machine), worker_filter(machine, isolated=False), ranks_filter(machine)):
        for kind in range(256):
            expected = ALLOW if kind in not_theirs else ERRNO | errno.ENOTTY
            for rest in (0x01, 0x40080001, 0x7E800001, 0xC0000001, 1 << 32 | 0x01):
                assert call(program, machine, "ioctl", 4, kind << 8 | rest) == expected
        for request in (0x5401, 0x541B, 0x5421, 0x5450, 0x5451, 0x80045430, 0x8905):  # terminals, FIONREAD, FIOCLEX
            assert call(program, machine, "ioctl", 4, request) == ALLOW
        for request in (0x40049409, 0x4020940D):  # copying falls back on this answer alone
            assert call(program, machine, "ioctl", 4, request) == ERRNO | errno.EOPNOTSUPP


@MACHINES
def test_what_would_outlive_the_worker_is_refused(machine: str) -> None:
    by_number = ("shmat", "shmctl", "msgsnd", "msgrcv", "msgctl", "semop", "semtimedop", "semctl", "mq_unlink")
    for name in ("shmget", "msgget", "semget", "mq_open", *by_number):
        for program in (worker_filter(machine), worker_filter(machine, isolated=False), ranks_filter(machine)):
            assert call(program, machine, name) == ERRNO | errno.ENOSYS


@MACHINES
def test_no_call_of_the_workers_words_a_line_of_the_kernels_log(machine: str) -> None:
    # A filter or ruleset of one's own is audited when it refuses; a futex operand that is too large is logged.
    for isolated in (True, False):
        program = worker_filter(machine, isolated=isolated)
        for name in ("seccomp", "landlock_create_ruleset", "landlock_restrict_self"):
            assert call(program, machine, name) == ERRNO | errno.EPERM
        for mode in (1, 2):
            assert call(program, machine, "prctl", 22, mode) == ERRNO | errno.EPERM
        assert call(program, machine, "prctl", 21) == ALLOW  # asking which mode holds
        for private_futex in (0, 128):
            assert call(program, machine, "futex", 0, 5 | private_futex, 0, 0, 0, 0x80ABC000) == ERRNO | errno.EINVAL
            assert call(program, machine, "futex", 0, 5 | private_futex, 0, 0, 0, 0x04000001) == ALLOW
            for command in (0, 1, 3, 4, 6, 9, 10):
                assert call(program, machine, "futex", 0, command | private_futex, 0, 0, 0, 0xFFFFFFFF) == ALLOW


@MACHINES
def test_where_names_lead_to_the_machine_no_socket_takes_a_name_with_each_message(machine: str) -> None:
    inside, outside = worker_filter(machine), worker_filter(machine, isolated=False)
    refused = ERRNO | errno.ESOCKTNOSUPPORT
    for name in ("socket", "socketpair"):
        for flags in (0, socket.SOCK_CLOEXEC, 1 << 32):
            for kind in range(16):
                connected = kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)
                assert call(inside, machine, name, socket.AF_UNIX, kind | flags) == ALLOW
                assert call(outside, machine, name, socket.AF_UNIX, kind | flags) == (ALLOW if connected else refused)
        assert call(outside, machine, name, socket.AF_INET, socket.SOCK_STREAM) == ERRNO | errno.EAFNOSUPPORT


@MACHINES
def test_the_limit_on_core_dumps_is_answered_and_stays(machine: str) -> None:
    program, core, files = worker_filter(machine), 4, 7
    assert call(program, machine, "setrlimit", core, 1 << 40) == ERRNO
    assert call(program, machine, "setrlimit", files, 1 << 40) == ALLOW
    for new in (1, 1 << 40):
        assert call(program, machine, "prlimit64", 0, core, new, 0) == ERRNO
        assert call(program, machine, "prlimit64", 0, files, new, 0) == ALLOW
    assert call(program, machine, "prlimit64", 0, core, 0, 1 << 40) == ALLOW


@MACHINES
def test_no_file_is_emptied_or_reached_by_opening_it_for_neither_reading_nor_writing(machine: str) -> None:
    refused, truncate = ERRNO | errno.EACCES, os.O_TRUNC
    calls = [("openat", (0, 0)), *([("open", (0,))] if machine == "x86_64" else [])]
    for program in (worker_filter(machine), worker_filter(machine, isolated=False), ranks_filter(machine)):
        for name, before in calls:
            for rest in (0, os.O_CLOEXEC, os.O_NOFOLLOW, os.O_CREAT, 1 << 32):
                for flags in (os.O_RDONLY | truncate, os.O_ACCMODE, os.O_ACCMODE | truncate):
                    assert call(program, machine, name, *before, flags | rest) == refused
                for mode in (os.O_WRONLY, os.O_RDWR):
                    assert call(program, machine, name, *before, mode | truncate | rest) == ALLOW
                assert call(program, machine, name, *before, os.O_RDONLY | rest) == ALLOW
                for unnamed in (0o20000000, 0o20000000 | os.O_DIRECTORY):
                    for mode in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_ACCMODE):
                        answer = call(program, machine, name, *before, mode | unnamed | rest)
                        assert answer == ERRNO | errno.EOPNOTSUPP
        assert call(program, machine, "openat2") == ERRNO | errno.ENOSYS


@MACHINES
def test_calls_that_log_their_caller_for_a_null_pointer_or_by_their_age_are_refused(machine: str) -> None:
    for program in (worker_filter(machine), worker_filter(machine, isolated=False), ranks_filter(machine)):
        for name, before in (("execve", (77,)), ("execveat", (3, 77)), ("setitimer", (0,))):
            assert call(program, machine, name, *before, 0) == ERRNO | errno.EFAULT
            for pointer in (1, 1 << 32, 1 << 47, 0x7FFFFFFFF000):
                assert call(program, machine, name, *before, pointer) == ALLOW
        for operation in (1, 2, 5, 6, 8):
            assert call(program, machine, "flock", 3, operation) == ALLOW
            for mandatory in (32, 32 | 64, 32 | 64 | 128, 1 << 32 | 32):
                assert call(program, machine, "flock", 3, operation | mandatory) == ERRNO | errno.EINVAL
        for name in ("capget", "capset", "remap_file_pages"):
            assert call(program, machine, name) == ERRNO | errno.EPERM
        assert call(program, machine, "setrlimit", 2, 1) == ERRNO | errno.EPERM
        assert call(program, machine, "prlimit64", 0, 2, 1) == ERRNO | errno.EPERM
        assert call(program, machine, "prlimit64", 0, 2, 0, 1) == ALLOW


@MACHINES
@pytest.mark.parametrize("init", [1, 4711])
def test_the_worker_changes_neither_priority_nor_processors_of_its_init(machine: str, init: int) -> None:
    program = seccomp.worker(machine, isolated=True, init=init)
    refused = ERRNO | errno.EPERM
    for name in ("sched_setaffinity", "sched_setparam", "sched_setscheduler"):
        assert [call(program, machine, name, pid) for pid in (init, 0, 2)] == [refused, ALLOW, ALLOW]
    for which in (0, 1):  # a process, a group
        assert [call(program, machine, "setpriority", which, pid) for pid in (init, 0, 2)] == [refused, ALLOW, ALLOW]
    assert call(program, machine, "setpriority", 2, 0) == refused, "a user"


@MACHINES
@pytest.mark.parametrize("init", [None, 4711], ids=["keeper", "worker"])
def test_where_anything_is_missing_priority_and_processors_of_no_other_process_are_changed(
    machine: str, init: int | None
) -> None:
    program = seccomp.worker(machine, isolated=False, init=init)
    refused = ERRNO | errno.EPERM
    for name in ("sched_setaffinity", "sched_setparam", "sched_setscheduler"):
        for pid in (1, 2, 4711, 0xFFFFFFFF):
            assert call(program, machine, name, pid) == refused
        for itself in (0, 1 << 32):  # the kernel takes 32 bits of it
            assert call(program, machine, name, itself) == ALLOW
    for which in range(4):
        for pid in (0, 1, 2, 4711):
            expected = ALLOW if (which, pid) == (0, 0) else refused
            assert call(program, machine, "setpriority", which, pid) == expected


@MACHINES
def test_what_every_user_reads_of_a_thread_is_not_set(machine: str) -> None:
    for program in (worker_filter(machine), worker_filter(machine, isolated=False), ranks_filter(machine)):
        for name in ("sched_setattr", "ioprio_set"):
            assert call(program, machine, name, 0, 0) == ERRNO | errno.EPERM


@MACHINES
@pytest.mark.parametrize("isolated", [True, False], ids=["isolated", "half-isolated"])
@pytest.mark.parametrize("init", [None, 4711], ids=["keeper", "worker"])
def test_limits_of_no_other_process_are_changed_and_those_of_all_are_read(
    machine: str, isolated: bool, init: int | None
) -> None:
    program = seccomp.worker(machine, isolated=isolated, init=init)
    for limit in range(16):
        for pid in (1, 2, 4711, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 32 | 2):
            for new in (1, 1 << 32, 1 << 40):
                assert call(program, machine, "prlimit64", pid, limit, new) == ERRNO | errno.EPERM
            assert call(program, machine, "prlimit64", pid, limit, 0, 1) == ALLOW
    for limit in (0, 1, 7, 9):
        for pid in (0, 1 << 32):  # the kernel takes 32 bits of it
            assert call(program, machine, "prlimit64", pid, limit, 1 << 40) == ALLOW
        assert call(program, machine, "setrlimit", limit, 1 << 40) == ALLOW


@MACHINES
def test_where_anything_is_missing_times_and_modes_are_answered_and_stay_as_they_are(machine: str) -> None:
    inside, outside = worker_filter(machine), worker_filter(machine, isolated=False)
    for name in ("utimensat", "fchmod", "fchmodat", "fchmodat2"):
        assert (call(inside, machine, name), call(outside, machine, name)) == (ALLOW, ERRNO)
    for name in ("fchown", "fchownat", "truncate"):
        assert (call(inside, machine, name), call(outside, machine, name)) == (ALLOW, ERRNO | errno.EPERM)


@MACHINES
def test_the_worker_has_unix_sockets_and_no_others(machine: str) -> None:
    program = worker_filter(machine)
    for name in ("socket", "socketpair"):
        assert call(program, machine, name, socket.AF_UNIX, socket.SOCK_STREAM) == ALLOW
        for family in (0, 2, 4, 10, 15, 16, 17, 31, 38, 40, 44):
            assert call(program, machine, name, family, socket.SOCK_STREAM) == ERRNO | errno.EAFNOSUPPORT


@MACHINES
def test_ranks_have_tcp_and_udp_besides_and_no_other_kind_of_socket(machine: str) -> None:
    program = ranks_filter(machine)
    refused = ERRNO | errno.EAFNOSUPPORT
    for name in ("socket", "socketpair"):
        for kind in range(1 << 12):
            assert call(program, machine, name, socket.AF_UNIX, kind) == ALLOW
        for family in (socket.AF_INET, socket.AF_INET6):
            for flags in (0, socket.SOCK_CLOEXEC, socket.SOCK_NONBLOCK, socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK):
                for kind in range(16):
                    expected = ALLOW if kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM) else refused
                    assert call(program, machine, name, family, kind | flags) == expected
            for protocol in range(1 << 10):  # 1 is ping, 132 SCTP, 136 UDP-Lite, 255 raw, 262 Multipath TCP
                expected = ALLOW if protocol in (0, socket.IPPROTO_TCP, socket.IPPROTO_UDP) else refused
                assert call(program, machine, name, family, socket.SOCK_STREAM, protocol) == expected
        for family in (0, *range(3, 10), *range(11, 64), 1 << 16):
            assert call(program, machine, name, family, socket.SOCK_STREAM) == refused
    for name in ("ptrace", "io_uring_setup", "setns", "unshare", "process_vm_readv", "bpf"):
        assert call(program, machine, name) == ERRNO | errno.EPERM


@MACHINES
def test_the_high_half_of_a_register_does_not_change_a_family(machine: str) -> None:
    ranks = ranks_filter(machine)
    assert call(ranks, machine, "socket", 1 << 32 | 16, 1) == ERRNO | errno.EAFNOSUPPORT
    assert call(ranks, machine, "socket", 2, 1 << 32 | 3) == ERRNO | errno.EAFNOSUPPORT
    assert call(ranks, machine, "socket", 2, 1, 1 << 32 | 132) == ERRNO | errno.EAFNOSUPPORT
    # The kernel takes the family as 32 bits; a filter that compared 64 could be talked out of it.
    program = worker_filter(machine)
    assert call(program, machine, "socket", 1 << 32 | 2) == ERRNO | errno.EAFNOSUPPORT


@MACHINES
def test_the_worker_may_make_threads_and_processes_but_no_namespaces(machine: str) -> None:
    program = worker_filter(machine)
    assert call(program, machine, "clone", 0x3D0F00) == ALLOW  # what libc asks for a thread
    assert call(program, machine, "clone", signal.SIGCHLD) == ALLOW
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert call(program, machine, "clone", flag | signal.SIGCHLD) == ERRNO | errno.EPERM
    assert call(program, machine, "clone3") == ERRNO | errno.ENOSYS


@MACHINES
def test_what_is_not_dumpable_stays_so(machine: str) -> None:
    for program in (worker_filter(machine), seccomp.sealed_agent(machine, own_pid=1)):
        assert call(program, machine, "prctl", PR_SET_DUMPABLE, 0) == ALLOW
        for value in (1, 2, 1 << 32, 1 << 63):
            assert call(program, machine, "prctl", PR_SET_DUMPABLE, value) == ERRNO | errno.EPERM
        assert call(program, machine, "prctl", 15, 1) == ALLOW  # naming a thread


@MACHINES
def test_a_plain_personality_is_allowed_and_an_odd_one_is_not(machine: str) -> None:
    program = worker_filter(machine)
    assert {call(program, machine, "personality", value) for value in (0, 0xFFFFFFFF)} == {ALLOW}
    assert call(program, machine, "personality", 0x0040000) == ERRNO | errno.EPERM


@MACHINES
def test_typing_into_a_terminal_is_refused_and_other_controls_are_not(machine: str) -> None:
    program = worker_filter(machine)
    assert call(program, machine, "ioctl", 0, 0x5412) == ERRNO | errno.EPERM
    assert call(program, machine, "ioctl", 0, 1 << 32 | 0x541C) == ERRNO | errno.EPERM
    assert call(program, machine, "ioctl", 0, 0x5413) == ALLOW


@MACHINES
def test_names_of_sockets_and_new_sessions_only_where_the_sandbox_contains_them(machine: str) -> None:
    inside, outside = worker_filter(machine), worker_filter(machine, isolated=False)
    for name in ("bind", "connect", "setsid", "setpgid"):
        assert call(inside, machine, name) == ALLOW
        assert call(outside, machine, name) == ERRNO | errno.EPERM
    passcred, passpidfd, receive_buffer = 16, 76, 8  # with the first two a socket gets a name when it sends
    for option in (passcred, passpidfd):
        assert call(inside, machine, "setsockopt", 3, 1, option) == ALLOW
        assert call(outside, machine, "setsockopt", 3, 1, option) == ERRNO | errno.EPERM
    assert call(outside, machine, "setsockopt", 3, 1, receive_buffer) == ALLOW
    with pytest.raises(ValueError, match="loopback"):
        seccomp.worker(machine, isolated=False, loopback=True)


@MACHINES
def test_the_agent_reads_its_own_memory_and_no_other(machine: str) -> None:
    for program in (seccomp.agent(machine, own_pid=77), seccomp.sealed_agent(machine, own_pid=77)):
        assert call(program, machine, "process_vm_readv", 77) == ALLOW
        for other in (0, 1, 78, 1 << 32 | 77):
            assert call(program, machine, "process_vm_readv", other) == ERRNO | errno.EPERM


@MACHINES
def test_the_sealed_agent_can_build_no_second_sandbox_and_start_no_program(machine: str) -> None:
    first, second = seccomp.agent(machine, own_pid=77), seccomp.sealed_agent(machine, own_pid=77)
    for name in ("unshare", "mount", "execve", "execveat", "pivot_root"):
        assert call(first, machine, name) == ALLOW
        assert call(second, machine, name) == ERRNO | errno.EPERM


def test_an_unknown_machine_has_no_filter_rather_than_an_empty_one() -> None:
    assert not seccomp.supports("riscv64")
    with pytest.raises(KernelError, match="riscv64"):
        seccomp.worker("riscv64", isolated=True)


# for real


def filtered(action: Callable[[], object]) -> object:
    def story() -> object:
        REAL.prctl(PR_SET_NO_NEW_PRIVS, 1)
        REAL.seccomp(worker_filter(REAL.machine))
        return action()

    return in_child(story)


def refused(action: Callable[[], object]) -> str:
    def story() -> str:
        try:
            action()
        except OSError as error:
            return errno.errorcode[error.errno or 0]
        return "done"

    return str(filtered(story))


def by_number(number: int) -> int:
    return REAL._checked("by number", REAL._libc.syscall(ctypes.c_long(number)))


def test_the_kernel_takes_the_filter_and_refuses_what_it_lists() -> None:
    assert refused(lambda: socket.socket(socket.AF_INET)) == "EAFNOSUPPORT"
    assert refused(lambda: REAL.call("io_uring_setup", 1, bytes(120))) == "EPERM"
    assert refused(lambda: REAL.call("unshare", 0)) == "EPERM"
    assert refused(lambda: REAL.prctl(PR_SET_DUMPABLE, 1)) == "EPERM"
    assert refused(lambda: by_number(500)) == "ENOSYS"
    assert refused(socket.socketpair) == "done"


def test_a_child_and_a_new_program_keep_the_filter() -> None:
    def story() -> int:
        pid = os.fork()
        if pid == 0:
            os.execv("/bin/sh", ["sh", "-c", "grep -q 'Seccomp:.2' /proc/self/status"])
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert filtered(story) == 0


def test_without_no_new_privs_an_ordinary_user_cannot_install_it() -> None:
    def story() -> str:
        REAL.drop_capabilities()
        try:
            REAL.seccomp(worker_filter(REAL.machine))
        except KernelError as error:
            return errno.errorcode[error.errno or 0]
        return "done"

    assert in_child(story) == "EACCES"


@pytest.mark.skipif(REAL.machine != "x86_64", reason="this machine is no x86-64, so that it has no x32 calls")
def test_calling_by_the_x32_abi_is_refused_and_no_log_of_the_machine_names_the_caller() -> None:
    def story() -> str:
        try:
            by_number(0x40000000 | 39)
        except KernelError as error:
            return errno.errorcode[error.errno or 0]
        return "done"

    assert filtered(story) == "ENOSYS"


@pytest.mark.skipif(REAL.machine != "x86_64", reason="this machine is no x86-64, so that it has no int 0x80")
def test_calling_by_the_32_bit_abi_is_refused() -> None:
    # mov eax, 20 (getpid there); int 0x80; ret
    code = b"\xb8\x14\x00\x00\x00\xcd\x80\xc3"

    def story() -> int:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(code)
        return int(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())

    try:
        answer = filtered(story)
    except ChildDiedError as died:
        answer = died.code or 0
    assert answer in (-errno.ENOSYS, -signal.SIGSEGV)  # the latter: no such ABI in this kernel
