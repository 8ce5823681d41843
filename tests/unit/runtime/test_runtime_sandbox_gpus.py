"""What a worker on a machine with GPUs may do, because NVIDIA's library ends without it, and nothing beside that."""

from __future__ import annotations

import os

import pytest

from glasshouse.runtime.confine import private_root
from glasshouse.runtime.kernel import Kernel
from tools.machine import (
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


@needs_filters
def test_where_names_of_sockets_are_refused_a_gpus_library_is_told_that_it_has_one_and_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As in a container, which is shown what changes the machine read-only.
    monkeypatch.setattr(private_root, "processes_alone_are_open", lambda: True)
    code = """
import socket
library = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
library.bind(b"\\0cuda-uvmfd-4026531836-2")
library.listen(128)
print(repr(library.getsockname()))
"""
    ran = run(code, kernel=WithoutNamespaces(), process_files=True)
    assert (ran.output, ran.errors) == ("''\n", "")
    assert {"egress-closed", "seccomp-filter"} <= ran.passed()
    assert "PermissionError" in run(code, kernel=WithoutNamespaces()).errors


@needs_root
def test_without_namespaces_the_files_of_processes_stay_closed_where_the_machines_settings_are_open() -> None:
    ran = run(NAME_A_THREAD.partition("written =")[0], kernel=WithoutNamespaces(), process_files=True)
    closed = bool(os.statvfs("/proc/sys").f_flag & os.ST_RDONLY)
    assert ran.output == ("cuda-EvtHandlr\n" if closed else "Permission denied\n")
    assert ("process-files" in ran.report.notes) == closed
