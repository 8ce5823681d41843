"""The kernel behind one object: errors, capabilities, memory and what /proc says."""

from __future__ import annotations

import ctypes
import errno
import os

import pytest

from glasshouse.runtime import syscalls
from glasshouse.runtime.kernel import PR_SET_NO_NEW_PRIVS, REAL, Kernel
from glasshouse.runtime.syscalls import KernelError
from tools.forked import in_child
from tools.machine import needs_root


def test_a_refused_call_says_what_was_refused_and_how() -> None:
    with pytest.raises(KernelError, match="umount /nowhere-at-all: No such file") as caught:
        REAL.umount("/nowhere-at-all")
    assert caught.value.errno in (errno.ENOENT, errno.EPERM)
    assert caught.value.errno != errno.ENOSYS


def test_a_call_that_this_architecture_never_had_is_absent() -> None:
    class Arm(Kernel):
        def __init__(self) -> None:
            super().__init__()
            self.machine = "aarch64"

    with pytest.raises(KernelError) as caught:
        Arm().call("uselib")
    assert caught.value.errno == errno.ENOSYS


def test_an_unknown_machine_has_no_calls_at_all() -> None:
    assert syscalls.number("socket", "riscv64") is None
    assert syscalls.numbers(("socket", "bpf"), "riscv64") == []


def test_numbers_of_one_architecture_are_all_different() -> None:
    for machine in syscalls.ARCHITECTURES:
        found = syscalls.numbers(tuple(syscalls._TABLE), machine)
        assert len(found) == len(set(found)) > 60
        assert max(found) <= syscalls.HIGHEST_KNOWN


def test_memory_of_this_process_is_copied_and_a_wild_address_is_an_error() -> None:
    source = ctypes.create_string_buffer(b"forty-two bytes of nothing in particular..", 42)
    target = ctypes.create_string_buffer(42)
    count = REAL.process_vm_readv(os.getpid(), ctypes.addressof(source), 42, ctypes.addressof(target))
    assert (count, target.raw) == (42, source.raw)
    with pytest.raises(KernelError) as caught:
        REAL.process_vm_readv(os.getpid(), 4096, 42, ctypes.addressof(target))
    assert caught.value.errno == errno.EFAULT


def test_a_needle_is_found_where_it_lies_and_nowhere_else() -> None:
    hay = ctypes.create_string_buffer(b"a haystack with one needle in it")
    needle = ctypes.create_string_buffer(b"needle", 6)
    place = ctypes.addressof(hay)
    assert REAL.memmem(place, 32, ctypes.addressof(needle), 6) == place + 20
    assert REAL.memmem(place, 25, ctypes.addressof(needle), 6) is None


def test_status_is_read_for_a_process_and_for_each_thread() -> None:
    status = REAL.status(os.getpid())
    assert (status["Pid"], status["TracerPid"]) == (str(os.getpid()), "0")
    assert REAL.status(os.getpid(), REAL.threads(os.getpid())[0])["Tgid"] == str(os.getpid())
    with pytest.raises(FileNotFoundError):
        REAL.status(2**22 + 1)


def test_no_new_privs_is_set_and_read_back() -> None:
    def story() -> tuple[int, str]:
        REAL.prctl(PR_SET_NO_NEW_PRIVS, 1)
        return REAL.prctl(39), REAL.status("self")["NoNewPrivs"]

    assert in_child(story) == (1, "1")


def test_dropped_capabilities_are_gone_and_a_new_program_does_not_bring_them_back() -> None:
    def story() -> list[str]:
        REAL.drop_capabilities()
        held = REAL.status("self")["CapEff"]
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.dup2(writer, 1)
            os.execv("/bin/cat", ["cat", "/proc/self/status"])
        os.waitpid(pid, 0)
        lines = os.read(reader, 8192).decode().splitlines()
        return [held, next(line.split()[1] for line in lines if line.startswith("CapEff"))]

    assert [int(word, 16) for word in in_child(story)] == [0, 0]


@needs_root
def test_a_kept_capability_stays_and_the_others_go() -> None:
    def story() -> int:
        REAL.drop_capabilities(keep=(1,))
        return int(REAL.status("self")["CapEff"], 16)

    assert in_child(story) == 1 << 1
