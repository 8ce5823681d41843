"""What a worker on a machine with GPUs may do, because NVIDIA's library ends without it, and nothing beside that."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import time

import pytest

from glasshouse.runtime.confine import file_trials, landlock, private_root, silent_listener
from glasshouse.runtime.kernel import NEW_LISTENER, PR_SET_DUMPABLE, Kernel
from glasshouse.runtime.syscalls import KernelError
from glasshouse.runtime.watchdog import session_record
from glasshouse.runtime.worker.sandbox import Worker
from tools.machine import (
    HALF_ISOLATED,
    WithoutLandlock,
    WithoutNamespaces,
    needs_filters,
    needs_landlock,
    needs_namespaces,
    needs_root,
)
from tools.sandboxed import TRIED, run

# As NVIDIA's library begins: it ends where it cannot name the thread that it has made.
NAME_A_THREAD = """
import os, threading
gone, named = threading.Event(), {}
thread = threading.Thread(target=gone.wait)
thread.start()
try:
    with open(f"/proc/self/task/{thread.native_id}/comm", "w") as name:
        name.write("cuda-EvtHandlr")
    print(open(f"/proc/self/task/{thread.native_id}/comm").read().strip())
except OSError as error:
    print(error.strerror)
gone.set()
written = []
for place, folders, files in os.walk("/proc"):
    if place == "/proc":
        folders[:] = [name for name in folders if not name.isdecimal()]
    for path in [f"{place}/{name}" for name in files]:
        if os.path.islink(path):
            continue
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
            written.append(path)
        except OSError:
            pass
print(written)
"""


@needs_namespaces
@needs_landlock
@pytest.mark.parametrize("kernel", [None, WithoutLandlock()], ids=["landlock", "mounts alone"])
def test_where_there_is_a_gpu_its_library_may_name_threads_and_nothing_else_of_proc_is_written(
    kernel: Kernel | None,
) -> None:
    ran = run(NAME_A_THREAD, kernel=kernel, process_files=True)
    assert ran.output == "cuda-EvtHandlr\n[]\n"
    assert "process-files" in ran.report.notes
    assert kernel is not None or ran.passed() == TRIED
    ran = run(NAME_A_THREAD, kernel=kernel)
    assert ran.output == "Read-only file system\n[]\n"
    assert "process-files" not in ran.report.notes


# As NVIDIA's library goes on: a thread waits at a socket at which other processes ask for memory, and takes what calls.
LISTENER = """
import select, socket, sys, threading
library = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
library.bind(NAME)
library.listen(128)
woken, tries = [], threading.Semaphore(0)
def serve():
    poll = select.poll()
    poll.register(library, select.POLLIN)
    for _ in range(5):
        for _, events in poll.poll(20):
            woken.append(events)
            try:
                library.accept()
            except OSError as error:
                woken.append(error.strerror)
        tries.release()
threading.Thread(target=serve).start()
for _ in range(5):
    tries.acquire()
print(woken, library.getsockname(), flush=True)
sys.stdin.read()
"""


def called(kernel: Kernel, name: str) -> tuple[str, str, set[str], tuple[str, ...]]:
    """Run what listens as NVIDIA's library does, and call it from outside; return what it saw and what the call got."""

    def call(worker: Worker) -> dict[str, object]:
        seen = os.read(worker.stdout, 4096).decode()
        one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with one:
            try:
                one.connect(name)
                return {"pid": worker.pid, "seen": seen, "call": "connected"}
            except OSError as error:
                return {"pid": worker.pid, "seen": seen, "call": errno.errorcode[error.errno or 0]}

    ran = run(LISTENER.replace("NAME", repr(name)), kernel=kernel, process_files=True, after=call)
    assert ran.errors == ""
    assert session_record.members(int(str(ran.facts["pid"]))) == {}  # what answered for it has ended too
    return str(ran.facts["seen"]), str(ran.facts["call"]), ran.passed(), ran.report.notes


@needs_filters
@needs_landlock
@pytest.mark.parametrize("lacking", ["no-network-namespace", "no-pid-namespace", "no-mount-namespace"])
def test_where_names_of_sockets_are_refused_a_gpus_library_listens_and_is_called_by_nothing(lacking: str) -> None:
    """It ends where it cannot listen, and takes a processor where its socket is hung up for ever."""
    seen, call, passed, notes = called(HALF_ISOLATED[lacking], f"\0cuda-uvmfd-{os.getpid()}-2")
    assert (seen, call) == ("[] \n", "ECONNREFUSED")
    assert {"egress-closed", "seccomp-filter"} <= passed
    assert "listener-spins" not in notes
    refused = "import socket; socket.socket(socket.AF_UNIX).bind(chr(0) + 'cuda')"
    assert "PermissionError" in run(refused, kernel=HALF_ISOLATED[lacking]).errors


class Watched(WithoutNamespaces):
    """A container whose manager waits for calls itself, as LXD's does: the kernel allows one that does."""

    def seccomp(self, program: bytes, flags: int = 0) -> int:
        if flags & NEW_LISTENER:
            raise KernelError("seccomp", errno.EBUSY)
        return super().seccomp(program, flags) if flags else super().seccomp(program)


@needs_filters
def test_where_no_call_can_wait_a_gpus_library_begins_all_the_same_and_the_report_says_at_what_cost() -> None:
    seen, call, passed, notes = called(Watched(), f"\0cuda-uvmfd-{os.getpid()}-3")
    assert "Invalid argument" in seen
    assert call == "ECONNREFUSED"
    assert "egress-closed" in passed
    assert "listener-spins" in notes


@needs_filters
def test_what_answers_a_librarys_listen_could_give_it_no_name_if_a_script_steered_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def let_go_on(kernel: Kernel, descriptor: int, silent: int) -> None:
        notice = ctypes.create_string_buffer(256)
        kernel.call("ioctl", descriptor, 0xC0502100, ctypes.addressof(notice))
        kernel.call("ioctl", descriptor, 0xC0182101, notice.raw[:8] + bytes(12) + (1).to_bytes(4, "little"))

    monkeypatch.setattr(silent_listener, "_answer", let_go_on)
    code = """
import socket
for name in (chr(0) + "way-out", "way-out", ""):
    library = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    library.bind(name)
    try:
        library.listen(128)
    except OSError as error:
        print(error.strerror, library.getsockname())
"""
    # Of the second it is gone, and nothing answers.
    gone = "Function not implemented \n"
    assert run(code, kernel=WithoutNamespaces(), process_files=True).output == "Invalid argument \n" + 2 * gone


# The memory of what answers, which would run whatever a script writes there.
STEER = """
import os
def is_beside(pid):
    try:
        group = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[2])
    except OSError:
        return False  # another of the machine's, which has ended
    return int(pid) != os.getpid() and group == os.getpgid(0)
for pid in [name for name in os.listdir("/proc") if name.isdecimal() and is_beside(name)]:
    try:
        os.close(os.open(f"/proc/{pid}/mem", os.O_RDWR))
        print("steered")
    except OSError as error:
        print(error.strerror)
"""


@needs_root
@needs_filters
def test_what_answers_is_closed_to_a_script_however_late_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks have the files of processes open, one that can be written to would be theirs, without a filter."""
    monkeypatch.setattr(private_root, "processes_alone_are_open", lambda: True)

    class Late(WithoutNamespaces):
        def prctl(self, option: int, value: int = 0) -> int:
            if option == PR_SET_DUMPABLE:
                time.sleep(1)
            return super().prctl(option, value)

    assert run(STEER, kernel=Late(), process_files=True, loopback=True).output == "Permission denied\n"


# Every file of every keeper's, by each way that leads there; and of the worker's own what it needs.
WRITE_TO_KEEPERS = """
import os
def opens(path, folder=None):
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK, dir_fd=folder))
        return True
    except OSError:
        return False
def parent(pid):
    try:
        return int(next(line for line in open(f"/proc/{pid}/status") if line.startswith("PPid")).split()[1])
    except OSError:
        return 0
held = [fd for fd in map(int, os.listdir("/proc/self/fd")) if os.path.isdir(f"/proc/self/fd/{fd}")]
init = parent("self")  # by the number that it has where it is shown
keepers = {1, init, parent(init)} - {0}
found = set()
for pid in keepers:
    for place in (f"/proc/{pid}", f"/proc/{pid}/task/{pid}", "/proc/self/" + f"root/proc/{pid}"):
        for name in sorted({*os.listdir("/proc/self"), *os.listdir("/proc/self/attr")}):
            found |= {name for path in (f"{place}/{name}", f"{place}/attr/{name}") if opens(path)}
    for folder in held:
        found |= {name for name in ("mem", "oom_score_adj") if opens(f"../../{pid}/{name}", folder)}
print(sorted(found), all(opens(f"/proc/self/task/{one}/comm") for one in os.listdir("/proc/self/task")))
"""


@needs_landlock
@pytest.mark.parametrize("lacking", [None, "no-pid-namespace", "no-mount-namespace", "no-private-root"])
def test_no_file_of_a_keepers_is_written_wherever_its_processes_are_in_sight(lacking: str | None) -> None:
    """Its score made it the first to be killed, its group's priority the last to run; as root, with nothing between."""
    ran = run(WRITE_TO_KEEPERS, kernel=None if lacking is None else HALF_ISOLATED[lacking], process_files=True)
    assert ran.output == "[] True\n"
    assert "landlock" in ran.passed()


@needs_namespaces
def test_by_mounts_alone_no_file_of_a_keepers_is_written_where_the_machines_processes_are_shown() -> None:
    class InSight(WithoutLandlock):
        def mount(self, source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
            if kind == "proc":
                raise KernelError("mount", errno.EPERM)
            super().mount(source, target, kind, flags, data)

    assert run(WRITE_TO_KEEPERS, kernel=InSight(), process_files=True).output == "[] True\n"


NAMED_BY_A_RANK = """
import subprocess, sys
code = "import os; os.close(os.open('/proc/self/task/' + str(os.getpid()) + '/comm', os.O_WRONLY)); print('named')"
print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() or "refused")
"""


@needs_root
@needs_landlock
def test_ranks_name_their_threads_where_the_keepers_are_in_sight_and_the_report_says_what_that_opens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As in a container, which is shown what changes the machine read-only.
    monkeypatch.setattr(private_root, "processes_alone_are_open", lambda: True)
    ran = run(NAMED_BY_A_RANK, kernel=WithoutNamespaces(), process_files=True, loopback=True)
    assert ran.output == "named\n"
    assert "landlock" in ran.passed()
    assert "keeper-files" in ran.report.notes
    ran = run(NAMED_BY_A_RANK, kernel=WithoutNamespaces(), process_files=True)
    assert ran.output == "refused\n"
    assert "keeper-files" not in ran.report.notes


@needs_root
def test_ranks_name_none_where_the_machines_settings_would_be_open_too() -> None:
    ran = run(NAMED_BY_A_RANK, kernel=WithoutNamespaces(), process_files=True, loopback=True)
    closed = bool(os.statvfs("/proc/sys").f_flag & os.ST_RDONLY)
    assert ran.output == ("named\n" if closed else "refused\n")
    assert ("keeper-files" in ran.report.notes) == closed


@needs_root
@needs_landlock
def test_a_way_to_a_keepers_score_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = landlock.restrict
    monkeypatch.setattr(landlock, "restrict", lambda kernel, **words: whole(kernel, **{**words, "files": ["/proc"]}))
    ran = run(WRITE_TO_KEEPERS, kernel=WithoutNamespaces(), process_files=True)
    assert "oom_score_adj" in ran.output
    assert "landlock" not in ran.passed()
    assert "open-write-keeper" in ran.report.notes


@needs_root
def test_without_namespaces_the_machines_settings_stay_closed_while_threads_are_named() -> None:
    ran = run(NAME_A_THREAD, kernel=WithoutNamespaces(), process_files=True)
    assert ran.output == "cuda-EvtHandlr\n[]\n"


@needs_filters
@pytest.mark.parametrize("kernel", [None, WithoutNamespaces()], ids=["its own network", "the machine's"])
def test_files_of_the_machines_network_that_a_script_may_write_are_reported(
    monkeypatch: pytest.MonkeyPatch, kernel: Kernel | None
) -> None:
    """Those of NFS and of a firewall's lists lie beneath each thread's; this machine may have none."""
    monkeypatch.setattr(file_trials, "network_files", lambda: True)
    ran = run("pass", kernel=kernel or Kernel(), process_files=True)
    assert ("open-network-files" in ran.report.notes) == ("no-network-namespace" in ran.report.notes)
