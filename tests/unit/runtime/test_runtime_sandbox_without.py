"""The worker's sandbox on machines that lack something, and under other users: what still holds, and what is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from glasshouse.attestation.claims import CheckResult, WorkspaceKind
from glasshouse.runtime.confine import private_root, seccomp
from glasshouse.runtime.kernel import (
    CAP_SYS_ADMIN,
    CLONE_NEWNS,
    CLONE_NEWUSER,
    PR_CAPBSET_DROP,
    REAL,
    Kernel,
    KernelError,
)
from glasshouse.runtime.worker import sandbox, sandbox_spec
from tools.forked import in_child
from tools.machine import (
    WithoutLandlock,
    WithoutMounts,
    WithoutNamespaces,
    WithoutNoswap,
    WithoutSeccomp,
    needs_filters,
    needs_landlock,
    needs_namespaces,
    needs_root,
)
from tools.sandboxed import TRIED, Ran, children_of, first_message, forking, is_gone, run, specification, start

pytestmark = needs_filters


# degraded, and said


@needs_landlock
def test_without_namespaces_the_workspace_has_a_name_and_is_not_called_memory() -> None:
    ran = run("open('file','w').write('x'); print(__import__('os').getcwd())", kernel=WithoutNamespaces())
    assert ran.report.workspace is WorkspaceKind.DIRECTORY
    assert {"named-workspace", "no-mount-namespace", "no-pid-namespace", "no-network-namespace"} <= set(
        ran.report.notes
    )
    assert {"landlock", "egress-closed", "seccomp-filter"} <= ran.passed()
    assert not Path(ran.output.strip()).exists()


@pytest.mark.parametrize(
    "leave", ["for _ in range(1500): os.mkdir('d'); os.chdir('d')", "os.mkdir('d', 0o300)"], ids=["deep", "unlistable"]
)
def test_a_workspace_with_a_name_goes_whatever_the_worker_leaves_in_it(leave: str) -> None:
    code = f"import os; print(os.getcwd(), flush=True)\n{leave}\nopen('secret', 'w').write('x')"
    workspace = Path(run(code, kernel=WithoutNamespaces()).output.strip())
    assert workspace.name == "work"
    assert not workspace.parent.exists()


def test_without_a_process_namespace_no_child_can_leave_the_group_and_the_group_is_ended() -> None:
    code = """
import os, time
if os.fork() == 0:
    try:
        os.setsid()
    except PermissionError:
        print('kept', flush=True)
    time.sleep(60)
time.sleep(60)
"""

    def story() -> tuple[bytes, bool]:
        worker = start(specification(code), WithoutNamespaces())
        said = os.read(worker.stdout, 16)
        family = [worker.pid or 0, *children_of(worker.pid or 0)]
        worker.end()
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and not all(map(is_gone, family)):
            time.sleep(0.01)
        return said, len(family) == 2 and all(map(is_gone, family))

    assert in_child(story) == (b"kept\n", True)


def test_where_the_agent_is_in_sight_a_script_reads_its_limits_and_sets_none_but_its_own() -> None:
    """A limit on processor time or files that the agent has passed kills it, or keeps it from removing its folder."""
    code = """
import os, resource, subprocess
def above(pid):
    return int(open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1])
init = os.getppid()
for pid in (init, above(init)):
    for name in ('CPU', 'NOFILE', 'AS', 'FSIZE', 'STACK', 'NPROC', 'CORE'):
        kind = getattr(resource, 'RLIMIT_' + name)
        held = resource.prlimit(pid, kind)
        try:
            resource.prlimit(pid, kind, held)
            print(pid == init, name, 'set')
        except PermissionError:
            pass
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
resource.prlimit(0, resource.RLIMIT_CPU, (100, 100))
shell = subprocess.run(['sh', '-c', 'ulimit -n 150; ulimit -Hn; ulimit -n'], capture_output=True, text=True)
print(resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_CPU), shell.stdout.split())
"""
    ran = run(code, kernel=WithoutNamespaces())
    assert ran.output == "(200, 300) (100, 100) ['150', '150']\n", ran.errors
    assert "seccomp-filter" in ran.passed()


@needs_namespaces
def test_where_mounts_are_refused_the_workspace_has_a_name() -> None:
    ran = run("pass", kernel=WithoutMounts())
    assert ran.report.workspace is WorkspaceKind.DIRECTORY
    assert {"no-private-root", "named-workspace"} <= set(ran.report.notes)


class Half(Kernel):
    """A machine that breaks off within the making of the private root."""

    def __init__(self, *missing: str) -> None:
        super().__init__()
        self.missing = missing

    def pivot_root(self, new: str, old: str) -> None:
        if "pivot" in self.missing:
            raise KernelError("pivot_root", 1)
        super().pivot_root(new, old)

    def umount(self, target: str) -> None:
        if "umount" in self.missing:
            raise KernelError(f"umount {target}", 1)
        super().umount(target)


@needs_namespaces
def test_where_the_root_cannot_be_changed_the_process_is_where_it_was(tmp_path: Path) -> None:
    def act() -> bool:
        os.chdir(tmp_path)
        before = Path("/").stat(), Path("/tmp").stat().st_dev
        REAL.unshare(CLONE_NEWNS | (0 if REAL.capable(CAP_SYS_ADMIN) else CLONE_NEWUSER))
        with pytest.raises(KernelError):
            private_root.build(Half("pivot"), read=["/usr"], devices=[], workspace_bytes=1 << 20)
        return (Path("/").stat(), Path("/tmp").stat().st_dev, Path.cwd()) == (*before, tmp_path)

    assert in_child(act)


@needs_namespaces
@pytest.mark.parametrize("missing", [("umount",), ("pivot", "umount")], ids="-".join)
def test_a_private_root_that_is_left_half_made_ends_the_run(missing: tuple[str, ...]) -> None:
    def act() -> tuple[object, str]:
        worker = sandbox.start(specification("pass"), spawn=forking(Half(*missing)))
        try:
            return first_message(worker), os.read(worker.stderr, 4096).decode()
        finally:
            worker.end()

    message, errors = in_child(act)
    assert message == {"code": "platform-unsupported", "type": "failed"}
    assert "half made" in errors


class BeforeLinux62(WithoutMounts):
    """Landlock's version 2 knows no truncating."""

    def landlock_abi(self) -> int:
        return min(2, super().landlock_abi())


EMPTIED = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for flags in (os.O_RDONLY | os.O_TRUNC, os.O_ACCMODE | os.O_TRUNC, os.O_ACCMODE, os.O_WRONLY | os.O_TRUNC):
    how = flags.to_bytes(8, 'little') + bytes(16)
    try:
        os.close(os.open(NAME, flags))
        print('opened', flags)
    except PermissionError:
        pass
    if libc.syscall(437, -100, NAME.encode(), how, len(how)) != -1:
        print('opened by openat2', flags)
for act in (lambda: os.truncate(NAME, 0), lambda: print(libc.creat(NAME.encode(), 0o600))):
    try:
        act()
    except PermissionError:
        pass
"""


@needs_landlock
@needs_namespaces
def test_before_linux_6_2_no_shown_file_is_emptied_by_opening_it_and_a_trial_has_tried(tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    shown.mkdir()
    for name, text in (("empty.py", ""), ("full.py", "precious")):
        file = shown / name
        file.write_text(text)
        os.utime(file, (1, 1))
        paths = (*specification("").read_paths, str(shown))
        ran = run(EMPTIED.replace("NAME", repr(str(file))), kernel=BeforeLinux62(), read_paths=paths)
        assert (ran.output, file.read_text(), file.stat().st_mtime) == ("-1\n", text, 1)
        assert {"landlock-abi-2", "no-private-root"} <= set(ran.report.notes)
        assert "seccomp-filter" in ran.passed()


def test_a_filter_that_lets_files_be_emptied_by_opening_them_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seccomp._Filter, "opens", lambda _filter: None)
    ran = run("pass", kernel=WithoutNamespaces())
    assert ran.report.observed["seccomp-filter"] is CheckResult.FAILED
    assert {"open-truncate-openat", "open-truncate-openat2"} <= set(ran.report.notes)


def test_a_filter_that_lets_limits_of_others_be_set_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seccomp._Filter, "limits", lambda _filter: None)
    ran = run("pass", kernel=WithoutNamespaces())
    assert ran.report.observed["seccomp-filter"] is CheckResult.FAILED
    assert "open-prlimit64" in ran.report.notes


def test_a_filter_that_lets_others_be_slowed_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seccomp._Filter, "own_scheduling", lambda _filter: None)
    ran = run("pass", kernel=WithoutNamespaces())
    assert ran.report.observed["seccomp-filter"] is CheckResult.FAILED
    assert {"open-sched_setaffinity", "open-setpriority"} <= set(ran.report.notes)


def test_where_the_agent_is_in_sight_a_script_leaves_its_priority_and_processors_as_they_are() -> None:
    """One processor at the lowest priority, behind a crowd: neither a signal nor the lease's end reached the agent."""
    code = """
import os
def above(pid):
    return int(open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1])
init = os.getppid()
for pid in (init, above(init)):
    for attempt in (
        lambda: os.sched_setaffinity(pid, {0}),
        lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)),
        lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
        lambda: os.setpriority(os.PRIO_PGRP, os.getpgid(pid), 19),
        lambda: os.setpriority(os.PRIO_USER, os.getuid(), 19),
    ):
        try:
            attempt()
            print('set')
        except PermissionError:
            pass
os.sched_setaffinity(0, os.sched_getaffinity(0))
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
print(os.nice(3))
"""
    ran = run(code, kernel=WithoutNamespaces())
    assert ran.output == "3\n", ran.errors
    assert "seccomp-filter" in ran.passed()


@needs_root
@needs_namespaces
def test_before_linux_6_4_the_workspace_is_memory_that_could_be_swapped() -> None:
    assert run("pass", kernel=WithoutNoswap()).report.workspace is WorkspaceKind.TMPFS


@needs_namespaces
def test_without_landlock_the_check_is_unavailable_and_the_private_root_still_hides_the_machine(tmp_path: Path) -> None:
    ran = run(f"import os; print(os.path.exists({str(tmp_path)!r}))", kernel=WithoutLandlock())
    assert ran.report.observed["landlock"] is CheckResult.UNAVAILABLE
    assert ran.output == "False\n"
    assert {"egress-closed", "seccomp-filter"} <= ran.passed()


@needs_namespaces
def test_without_filters_no_check_that_rests_on_them_passes() -> None:
    ran = run("pass", kernel=WithoutSeccomp())
    assert ran.report.observed["seccomp-filter"] is CheckResult.UNAVAILABLE
    assert ran.report.observed["egress-closed"] is CheckResult.FAILED
    assert "no-seccomp-filter" in ran.report.notes


def test_a_worker_that_reaches_the_agents_listener_fails_whatever_the_launcher_says() -> None:
    class Open(WithoutNamespaces, WithoutSeccomp, WithoutLandlock):
        """Nothing at all."""

    ran = run("pass", kernel=Open())
    assert not ran.passed() & {"egress-closed", "landlock", "seccomp-filter"}
    assert {"open-tcp", "reached-tcp", "reached-udp", "reached-abstract", "reached-named"} <= set(ran.report.notes)


def test_a_launcher_that_fails_says_so_and_nothing_runs() -> None:
    def story() -> tuple[object, bytes]:
        spec = specification("print('ran')", python=sys.executable)
        worker = sandbox.start(spec, spawn=_broken)
        message = first_message(worker)
        worker.end()
        return message, os.read(worker.stderr, 4096) + os.read(worker.stdout, 16)

    message, said = in_child(story)
    assert message == {"code": "platform-unsupported", "type": "failed"}
    assert b"AttributeError" in said
    assert b"ran" not in said


def _broken(spec: sandbox_spec.SandboxSpec, streams: list[int]) -> int:
    """Spawn a launcher that finds nothing in its specification."""
    os.read(int(streams[4]), 1 << 16)
    reader, writer = os.pipe()
    os.write(writer, b"{0")  # an empty mapping, as marshal writes it
    os.close(writer)
    return sandbox._spawn(spec, [*streams[:4], reader, *streams[5:]])


# as another user


@needs_root
@needs_namespaces
@needs_landlock
@pytest.mark.parametrize("loopback", [False, True], ids=["one process", "ranks"])
def test_an_ordinary_user_gets_the_same_sandbox_in_a_user_namespace(loopback: bool) -> None:
    script = Path(__file__).parents[2] / "tools" / "as_nobody.py"
    words = [sys.executable, script, *(["--loopback"] if loopback else [])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode == 77:
        pytest.skip("this machine has no user namespaces for ordinary users")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert set(answer["passed"]) == TRIED
    assert answer["workspace"] == "tmpfs"
    assert "user-namespace" in answer["notes"]
    assert ("loopback" in answer["notes"]) is loopback
    assert answer["output"] == "65534\n"


@needs_root
@needs_namespaces
@needs_landlock
@pytest.mark.parametrize("private", [True, False], ids=["without-admin", "without-any"])
def test_root_without_its_capabilities_as_in_a_container_uses_a_user_namespace(private: bool, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.touch()

    def story() -> Ran:
        if private:
            REAL.prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN)  # the launcher, a new program, does not get it back
        else:
            REAL.drop_capabilities()
        return run(f"import os; print(os.path.exists({str(outside)!r}))")

    ran = in_child(story)
    if "no-user-namespace" in ran.report.notes:
        pytest.skip("this machine has no user namespaces for ordinary users")
    assert ran.passed() == TRIED
    assert ("unmapped-user" in ran.report.notes) is not private
    assert ran.report.workspace is (WorkspaceKind.TMPFS if private else WorkspaceKind.DIRECTORY)
    assert not private or ran.output == "False\n"


def test_where_neither_mounts_nor_landlock_keep_files_closed_egress_is_not_called_closed() -> None:
    class Neither(WithoutMounts, WithoutLandlock):
        """As in a container on an older kernel."""

    ran = run("pass", kernel=Neither())
    assert ran.report.observed["egress-closed"] is CheckResult.FAILED
    assert "open-write-outside" in ran.report.notes
