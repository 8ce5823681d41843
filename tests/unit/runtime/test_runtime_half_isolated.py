"""The worker's sandbox where one namespace is missing: nobody outside calls the worker, whichever it is."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest

from glasshouse.attestation.claims import CheckResult
from glasshouse.runtime.confine import seccomp
from glasshouse.runtime.kernel import CLONE_NEWPID, REAL, Kernel
from glasshouse.runtime.syscalls import KernelError
from glasshouse.runtime.worker.sandbox import Worker
from tools.machine import (
    HALF_ISOLATED,
    Lacks,
    WithoutLandlock,
    needs_filters,
    needs_landlock,
    needs_namespaces,
    needs_root,
)
from tools.sandboxed import run

pytestmark = [needs_filters, needs_namespaces]

SECRET = "plaintext of the owner's"

# Takes every name that it can get, listens there, and hands plaintext to whatever calls within two seconds.
LISTENER = """
import errno, json, os, select, socket, struct, sys
def tried(action):
    try:
        return action() or "done"
    except OSError as error:
        return errno.errorcode[error.errno]
waiting = []
def listen(kind, name):
    one = socket.socket(socket.AF_UNIX, kind)
    one.bind(name)
    if kind != socket.SOCK_DGRAM:
        one.listen(5)
        waiting.append(one)
def names_itself(option):
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.setsockopt(socket.SOL_SOCKET, option, 1)
    one.send(b"x")
    return "named" if one.getsockname() else "done"
def leave():
    if os.fork() == 0:
        try:
            os.setsid()
        except OSError:
            os._exit(1)
        os._exit(0)
    return "kept" if os.wait()[1] else "done"
found = {
    "abstract": tried(lambda: listen(socket.SOCK_STREAM, chr(0) + NAME)),
    "abstract packets": tried(lambda: listen(socket.SOCK_SEQPACKET, chr(0) + NAME + "-packets")),
    "abstract datagrams": tried(lambda: listen(socket.SOCK_DGRAM, chr(0) + NAME + "-datagrams")),
    "free name": tried(lambda: listen(socket.SOCK_STREAM, "")),
    "path": tried(lambda: listen(socket.SOCK_STREAM, "listener")),
    "call": tried(lambda: socket.socket(socket.AF_UNIX).connect(chr(0) + NAME + "-none")),
    "credentials": tried(lambda: names_itself(16)),
    "pidfd": tried(lambda: names_itself(76)),
    "session": leave(),
}
print(json.dumps(found), flush=True)
for one in select.select(waiting, [], [], 2)[0] if waiting else ():
    one.accept()[0].sendall(SECRET.encode())
"""
# As any other user of the machine, where this one may become one.
CALLER = """
import os, socket, sys
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
one = socket.socket(socket.AF_UNIX)
try:
    one.connect(chr(0) + sys.argv[1])
    print(one.recv(100).decode())
except OSError as error:
    print(type(error).__name__)
"""


def attacked(kernel: Kernel | None) -> tuple[dict[str, str], str, set[str]]:
    """Run a worker that listens, and call it from outside; return what it could do, what was read, what passed."""
    name = f"glasshouse-way-out-{os.getpid()}"

    def call(worker: Worker) -> dict[str, object]:
        tried = b""
        while not tried.endswith(b"\n") and (piece := os.read(worker.stdout, 4096)):
            tried += piece
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", CALLER, name], capture_output=True, text=True, check=False
        )
        return {"tried": tried.decode(), "read": done.stdout.strip(), "errors": done.stderr}

    code = LISTENER.replace("NAME", repr(name)).replace("SECRET", repr(SECRET))
    ran = run(code, kernel=kernel, after=call)
    assert (ran.exit_code, ran.facts["errors"]) == (0, ""), ran.errors
    return json.loads(str(ran.facts["tried"])), str(ran.facts["read"]), ran.passed()


@needs_landlock
@pytest.mark.parametrize("lacking", HALF_ISOLATED)
def test_where_anything_is_missing_the_worker_is_called_by_nobody_and_takes_no_name(lacking: str) -> None:
    """An abstract name is known in the whole of the machine's network namespace, to every user."""
    tried, read, passed = attacked(HALF_ISOLATED[lacking])
    assert read == "ConnectionRefusedError"
    assert tried == {
        "abstract": "EPERM", "abstract packets": "EPERM", "abstract datagrams": "ESOCKTNOSUPPORT", "free name": "EPERM",
        "path": "EPERM", "call": "EPERM", "credentials": "EPERM", "pidfd": "EPERM", "session": "kept",
    }  # fmt: skip
    assert {"egress-closed", "seccomp-filter"} <= passed


LOCK = """
import sys
sys.path[:0] = PATHS
import multiprocessing
from glasshouse.workloads.process.failures import of_script
try:
    multiprocessing.get_context("fork").Lock()
    print("made")
except OSError as error:
    print(of_script(error, error.__traceback__).hint)
"""


@needs_landlock
@pytest.mark.parametrize("lacking", HALF_ISOLATED)
def test_where_anything_is_missing_a_dataloader_with_workers_ends_at_once_with_what_to_do(lacking: str) -> None:
    """Its tensors go from process to process by a socket with a name: it would wait for them for ever."""
    argv = (sys.executable, "-I", "-B", "-c", LOCK.replace("PATHS", repr(sys.path)), "{workspace}")
    ran = run("", kernel=HALF_ISOLATED[lacking], argv=argv)
    assert "num_workers = 0" in ran.output, ran.errors
    assert "finds every namespace" in ran.output


@needs_landlock
def test_where_nothing_is_missing_it_listens_in_a_network_of_its_own_which_nobody_calls() -> None:
    tried, read, passed = attacked(None)
    assert read == "ConnectionRefusedError"
    assert {tried[name] for name in ("abstract", "abstract packets", "abstract datagrams", "path", "session")} == {
        "done"
    }
    assert "egress-closed" in passed


@needs_landlock
def test_a_filter_that_lets_the_worker_listen_on_the_machines_network_fails_egress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caller from outside shows what the trial stands for."""
    whole = seccomp.worker
    monkeypatch.setattr(seccomp, "worker", lambda machine, **words: whole(machine, **{**words, "isolated": True}))
    tried, read, passed = attacked(HALF_ISOLATED["no-network-namespace"])
    assert (tried["abstract"], read) == ("done", SECRET)
    assert "egress-closed" not in passed
    ran = run("import os; print(os.listdir())", kernel=HALF_ISOLATED["no-network-namespace"])
    assert ran.report.observed["egress-closed"] is CheckResult.FAILED
    assert {"open-abstract-listener", "open-named-listener"} <= set(ran.report.notes)
    assert ran.output == "[]\n"  # the trial leaves no name behind


class InSight(WithoutLandlock):
    """An older kernel, in a container that covers parts of /proc: it allows no other, and the machine's is shown."""

    def mount(self, source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
        if kind == "proc":
            raise KernelError("mount", errno.EPERM)
        super().mount(source, target, kind, flags, data)


class Neighbours(Lacks, WithoutLandlock):
    """An older kernel that gives no namespace of processes."""


@needs_root
@pytest.mark.parametrize("kernel", [InSight(), Neighbours(CLONE_NEWPID)], ids=lambda kernel: type(kernel).__name__)
def test_without_landlock_egress_is_not_called_closed_where_other_processes_may_come_into_sight(kernel: Kernel) -> None:
    """The root of one that started later, of the same user, led past every mount: it read a key, and wrote."""
    ran = run("pass", kernel=kernel)
    # Failed where another test's process is there already, which has no capability.
    assert ran.report.observed["egress-closed"] in (CheckResult.UNAVAILABLE, CheckResult.FAILED)
    assert "shown-processes" in ran.report.notes
    assert ran.report.observed["landlock"] is CheckResult.UNAVAILABLE


@needs_root
@needs_landlock
def test_landlock_keeps_the_roots_of_other_processes_closed_whatever_is_in_sight() -> None:
    class Shown(InSight):
        def landlock_abi(self) -> int:
            return REAL.landlock_abi()

    assert "egress-closed" in run("pass", kernel=Shown()).passed()
