"""Hardening is observed, never believed: what holds passes, what was not done fails, what is missing is unavailable."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from glasshouse.attestation.claims import CHECKS, CheckResult
from glasshouse.runtime.confine import core_dumps
from glasshouse.runtime.kernel import PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, REAL, SECCOMP_SPEC_ALLOW, Kernel
from glasshouse.runtime.keys.secret_memory import SecretMemory
from glasshouse.runtime.run import checks, start_processes
from glasshouse.runtime.syscalls import KernelError
from glasshouse.runtime.watchdog import watchdog
from tools.forked import in_child
from tools.machine import (
    WithoutLandlock,
    WithoutMemoryLock,
    WithoutNamespaces,
    WithoutSeccomp,
    WithoutSecretMemory,
    WithSwap,
    needs_filters,
    needs_landlock,
    needs_namespaces,
    needs_root,
    needs_secret_memory,
)
from tools.sandboxed import specification, start, start_held

pytestmark = needs_filters

PASSED, FAILED, UNAVAILABLE = CheckResult.PASSED, CheckResult.FAILED, CheckResult.UNAVAILABLE
AGENT = Path(__file__).parents[2] / "tools" / "hardened_agent.py"
NOT_DUMPABLE = "import ctypes, time; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); print('up', flush=True); time.sleep(30)"

Results = dict[str, CheckResult]


def hardened(*arguments: str, environment: dict[str, str] | None = None) -> dict[str, dict[str, str]]:
    """Run a hardened agent with a worker as a process of its own, as in life."""
    command = [sys.executable, "-I", "-B", AGENT, *arguments]
    clean = {"PATH": os.environ["PATH"], **(environment or {})}
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=clean, check=True)
    return dict(json.loads(done.stdout))


def agent_story(action: Callable[[], object], *, kernel: Kernel = REAL, secret: bool = True) -> Results:
    """Do `action` in a child, then observe that child as an agent."""

    def story() -> Results:
        action()
        memory = SecretMemory(64, kernel=kernel) if secret else None
        return checks.observe_agent(kernel=kernel, watchdog=None, secret=memory)

    return in_child(story)


def worker_story(code: str = NOT_DUMPABLE, *, kernel: Kernel | None = None, observer: Kernel = REAL) -> Results:
    """Start a worker and observe it; `kernel` is the launcher's, `observer` the agent's."""

    def story() -> Results:
        watcher = watchdog.start()
        worker = start(specification(code), kernel)
        try:
            os.read(worker.stdout, 3)
            watcher.watch(worker.pid or 0)
            with closing(SecretMemory(64, kernel=observer)) as secret:
                return checks.observe_worker(worker, kernel=observer, watchdog=watcher, secret=secret)
        finally:
            worker.end()
            watcher.stop()

    return in_child(story)


def untouched() -> None:
    pass


@needs_root
@needs_namespaces
@needs_landlock
@needs_secret_memory
def test_on_a_machine_with_everything_every_check_of_both_processes_passes() -> None:
    answer = hardened()
    assert answer["agent"].keys() == CHECKS["agent"]
    assert answer["worker"].keys() == CHECKS["worker"]
    swap = {"no-swap"} if len(REAL.read("/proc/swaps").splitlines()) > 1 else set()
    for process in ("agent", "worker"):
        assert {name for name, result in answer[process].items() if result != "passed"} <= swap
    assert answer["notes"] == []
    assert answer["details"]["landlock-abi"] == REAL.landlock_abi()


def test_a_process_that_did_nothing_passes_nothing_that_it_would_have_had_to_do() -> None:
    results = agent_story(untouched, secret=False)
    assert results.keys() == CHECKS["agent"]
    done_by_nobody = {"no-new-privs", "not-dumpable", "seccomp-filter", "secret-memory", "watched"}
    assert {results[name] for name in done_by_nobody} == {FAILED}


@needs_namespaces
@needs_landlock
def test_a_worker_that_stays_dumpable_is_found_out() -> None:
    answer = hardened("dumpable-worker")
    assert answer["worker"]["not-dumpable"] == "failed"
    assert answer["agent"]["not-dumpable"] == "passed"


def test_a_worker_that_nobody_watches_is_not_watched() -> None:
    answer = hardened("unwatched")
    assert (answer["worker"]["watched"], answer["agent"]["watched"]) == ("failed", "passed")


@pytest.mark.parametrize(
    ("name", "value", "check"),
    [
        ("LD_PRELOAD", "/nonexistent/spy.so", "preload-clean"),
        ("LD_AUDIT", "/nonexistent/spy.so", "preload-clean"),
        ("PYTHONBREAKPOINT", "pdb.set_trace", "debug-env-clean"),
        ("SSLKEYLOGFILE", "/tmp/keys", "debug-env-clean"),
        ("MALLOC_TRACE", "/tmp/trace", "debug-env-clean"),
    ],
)
def test_an_agent_started_with_a_telling_environment_does_not_pass_by_removing_it(
    name: str, value: str, check: str
) -> None:
    answer = hardened(environment={name: value})
    assert answer["agent"][check] == "failed"
    assert answer["worker"][check] == "passed"  # it was started with an environment of its own


def test_a_library_from_an_unknown_place_is_found_among_the_mappings(tmp_path: Path) -> None:
    def act() -> CheckResult:
        import ctypes
        import shutil

        source = next(path for path in Path("/usr/lib").rglob("libz.so.1*") if path.is_file())
        shutil.copy(source, tmp_path / "libspy.so")
        ctypes.CDLL(str(tmp_path / "libspy.so"))
        return checks.observe_agent(watchdog=None, secret=None)["preload-clean"]

    assert in_child(act) is FAILED


def test_core_dumps_that_are_allowed_again_fail() -> None:
    def act() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    expected = PASSED if hard == 0 else FAILED
    assert agent_story(act)["core-limit-zero"] is expected
    assert agent_story(core_dumps.limit)["core-limit-zero"] is PASSED


@pytest.mark.parametrize(
    ("pattern", "limits", "closed"),
    [
        (b"core", (0, 0), True),
        (b"|/usr/lib/systemd/systemd-coredump %P", (0, 0), False),
        (b"@/run/coredump.socket", (0, 0), False),
        (b"@/run/coredump.socket", (1, 1), False),
        (b"@@/run/systemd/coredump", (1, 1), False),
        (None, (0, 0), False),
        (None, (1, 1), False),
        (b"core", (1, 1), True),
        (b"|/usr/share/apport/apport %p", (1, 1), True),
        (b"core", (0, 1), False),
        (b"core", (-1, -1), False),
    ],
)
def test_a_limit_on_core_dumps_is_none_for_a_program_at_zero_and_for_a_socket_at_all(
    pattern: bytes | None, limits: tuple[int, int], closed: bool
) -> None:
    class Machine(Kernel):
        def read(self, path: str) -> bytes:
            if pattern is None:
                raise FileNotFoundError(path)
            return pattern if path == "/proc/sys/kernel/core_pattern" else super().read(path)

    assert core_dumps.closed(Machine(), limits) is closed


def test_one_thread_without_a_filter_fails_the_whole_process() -> None:
    def act() -> None:
        REAL.prctl(PR_SET_NO_NEW_PRIVS, 1)
        ready = threading.Event()
        threading.Thread(target=lambda: (ready.set(), time.sleep(20)), daemon=True).start()
        ready.wait()
        from glasshouse.runtime.confine import seccomp

        REAL.seccomp(seccomp.agent(REAL.machine, own_pid=os.getpid()), SECCOMP_SPEC_ALLOW)  # without TSYNC

    assert agent_story(act)["seccomp-filter"] is FAILED


def test_a_filter_that_lets_the_forbidden_through_fails() -> None:
    def act() -> None:
        REAL.prctl(PR_SET_NO_NEW_PRIVS, 1)
        REAL.seccomp(bytes.fromhex("0600000000 00ff7f".replace(" ", "")), 0)  # allows everything

    assert agent_story(act)["seccomp-filter"] is FAILED


def test_a_traced_thread_is_seen_in_its_own_status() -> None:
    class Traced(Kernel):
        def status(self, pid: int | str, thread: int | None = None) -> dict[str, str]:
            return {**super().status(pid, thread), "TracerPid": "4711"}

    assert agent_story(untouched, kernel=Traced())["not-traced"] is FAILED
    assert agent_story(untouched)["not-traced"] is PASSED


# where the kernel lacks something


def test_a_kernel_without_filters_leaves_the_check_unavailable() -> None:
    class Older(WithoutSeccomp):
        def status(self, pid: int | str, thread: int | None = None) -> dict[str, str]:
            return {name: text for name, text in super().status(pid, thread).items() if name != "Seccomp"}

    kernel = Older()
    assert agent_story(lambda: start_processes.harden_agent(kernel), kernel=kernel)["seccomp-filter"] is UNAVAILABLE
    worker = worker_story(kernel=kernel, observer=kernel)
    assert worker["seccomp-filter"] is UNAVAILABLE
    assert worker["egress-closed"] is FAILED


def test_a_machine_that_has_no_filter_of_ours_leaves_the_check_unavailable() -> None:
    class Other(Kernel):
        def __init__(self) -> None:
            super().__init__()
            self.machine = "riscv64"

    notes = in_child(lambda: start_processes.harden_agent(Other()))
    assert "no-seccomp" in notes
    assert agent_story(untouched, kernel=Other())["seccomp-filter"] is UNAVAILABLE


def test_a_kernel_without_secret_memory_leaves_the_check_unavailable_for_both() -> None:
    kernel = WithoutSecretMemory()
    assert agent_story(untouched, kernel=kernel)["secret-memory"] is UNAVAILABLE
    assert worker_story(observer=kernel)["secret-memory"] is UNAVAILABLE


@needs_secret_memory
def test_secret_memory_that_a_reader_reads_all_the_same_fails() -> None:
    class Leaky(Kernel):
        def process_vm_readv(self, pid: int, remote: int, length: int, destination: int) -> int:
            return length

    assert agent_story(untouched, kernel=Leaky())["secret-memory"] is FAILED


def test_a_kernel_without_landlock_leaves_the_check_unavailable() -> None:
    assert worker_story(kernel=WithoutLandlock())["landlock"] is UNAVAILABLE


def test_a_machine_without_namespaces_has_no_workspace_in_memory() -> None:
    results = worker_story(kernel=WithoutNamespaces())
    assert results["workspace-in-memory"] is UNAVAILABLE
    assert results["egress-closed"] is PASSED


def test_a_limit_on_locked_memory_is_explained_and_never_passed() -> None:
    kernel = WithoutMemoryLock()

    def act() -> tuple[list[str], CheckResult]:
        notes = start_processes.harden_agent(kernel)
        return notes, checks.observe_agent(kernel=kernel, watchdog=None, secret=None)["memory-locked"]

    notes, result = in_child(act)
    assert "no-memory-lock" in notes
    assert result is not PASSED


@needs_root
def test_locked_memory_is_read_back_from_the_map_of_the_process() -> None:
    assert agent_story(lambda: start_processes._lock_memory(REAL))["memory-locked"] is PASSED
    assert agent_story(untouched)["memory-locked"] is not PASSED


@needs_root
def test_with_swap_the_agent_passes_by_its_lock_and_the_worker_by_nothing() -> None:
    kernel = WithSwap()
    assert agent_story(lambda: start_processes._lock_memory(kernel), kernel=kernel)["no-swap"] is PASSED
    assert agent_story(untouched, kernel=kernel)["no-swap"] is FAILED
    assert worker_story(observer=kernel)["no-swap"] is FAILED


@pytest.mark.parametrize(("limit", "expected"), [(b"0\n", PASSED), (b"max\n", FAILED), (b"4096\n", FAILED)])
def test_with_swap_a_control_group_that_may_not_swap_passes(limit: bytes, expected: CheckResult) -> None:
    class Grouped(WithSwap):
        def read(self, path: str) -> bytes:
            if path.endswith("/cgroup"):
                return b"0::/job/42\n"
            if path == "/sys/fs/cgroup/job/42/memory.swap.max":
                return limit
            return super().read(path)

    assert agent_story(untouched, kernel=Grouped())["no-swap"] is expected


def test_a_proc_that_cannot_be_read_passes_nothing() -> None:
    class Hidden(Kernel):
        def read(self, path: str) -> bytes:
            if path.startswith("/proc/") and not path.endswith(("/maps", "/stat")):
                raise PermissionError(errno.EACCES, "hidden")
            return super().read(path)

    results = agent_story(untouched, kernel=Hidden())
    rest = {"core-limit-zero", "debug-env-clean", "preload-clean", "secret-memory"}
    assert PASSED not in {result for name, result in results.items() if name not in rest}


def test_a_worker_that_is_gone_passes_nothing_that_is_read_from_outside() -> None:
    def story() -> Results:
        worker = start_held("pass")
        while worker.poll() is None:
            time.sleep(0.01)
        results = checks.observe_worker(worker, watchdog=None, secret=None)
        worker.end()
        return results

    results = in_child(story)
    outside = {"core-limit-zero", "no-new-privs", "not-dumpable", "not-traced", "seccomp-filter", "watched"}
    assert {results[name] for name in outside} == {FAILED}


# after sealing


def test_a_sealed_agent_starts_no_program_and_still_reaches_its_broker() -> None:
    def act() -> list[str]:
        start_processes.harden_agent()
        start_processes.seal_agent()
        said = []
        for action in (
            lambda: os.execv("/bin/true", ["true"]),
            lambda: REAL.unshare(0x20000),
            lambda: REAL.prctl(PR_SET_DUMPABLE, 1),
            lambda: socket.socket(socket.AF_INET).close(),
            lambda: socket.socket(socket.AF_UNIX).close(),
        ):
            try:
                action()
                said.append("done")
            except OSError as error:
                said.append(errno.errorcode[error.errno or 0])
        return said

    assert in_child(act) == ["EPERM", "EPERM", "EPERM", "done", "done"]


def test_sealing_where_nothing_can_be_sealed_says_so() -> None:
    class Bare(WithoutSeccomp):
        def drop_capabilities(self, keep: tuple[int, ...] = ()) -> None:
            raise KernelError("capset", errno.EPERM)

    assert in_child(lambda: start_processes.seal_agent(Bare())) == ["no-capability-drop", "no-seccomp"]
