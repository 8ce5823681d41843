"""The worker's sandbox: what it sees, what it cannot do, how it ends, and what is said where the kernel lacks means."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from glasshouse.attestation.claims import CheckResult, WorkspaceKind
from glasshouse.errors import Code, FormatError, PlatformError
from glasshouse.runtime import syscalls
from glasshouse.runtime.kernel import REAL, Kernel
from glasshouse.runtime.worker import named_directory, sandbox, sandbox_spec, shown_paths
from glasshouse.runtime.worker.sandbox import Worker
from glasshouse.runtime.worker.sandbox_spec import SandboxReport
from tools.forked import in_child
from tools.machine import (
    WithoutMounts,
    WithoutNamespaces,
    needs_filters,
    needs_landlock,
    needs_namespaces,
    needs_root,
)
from tools.sandboxed import TRIED, WORKSPACE_BYTES, Ran, children_of, is_gone, run, specification, start

pytestmark = needs_filters

LOOK = """
import json, os, sys
def tried(path, flags):
    try:
        os.close(os.open(path, flags, 0o600))
    except OSError as error:
        return error.errno
    return 0
def group(path):
    try:
        return sorted(os.listdir(path))
    except OSError as error:
        return error.errno
print(json.dumps({
    "pid": os.getpid(), "cwd": os.getcwd(), "argument": sys.argv[1], "environment": sorted(os.environ),
    "processes": [name for name in os.listdir("/proc") if name.isdigit()],
    "descriptors": [name for name in os.listdir("/proc/self/fd")],
    "own": [tried(place + "/file", os.O_CREAT | os.O_RDWR) for place in (".", "/tmp", "/dev/shm")],
    "others": [tried(path, os.O_CREAT | os.O_WRONLY) for path in ("/file", "/usr/file", "/etc/file", "/dev/file")],
    "sysctl": tried("/proc/sys/kernel/core_pattern", os.O_WRONLY), "root": group("/"),
    "devices": group("/dev"), "host": open("/etc/hosts").read(), "users": open("/etc/passwd").read(),
}))
"""


@needs_namespaces
@needs_landlock
def test_on_a_machine_with_everything_all_trials_pass() -> None:
    ran = run("pass")
    assert ran.passed() == TRIED
    assert ran.report.workspace in (WorkspaceKind.TMPFS_NOSWAP, WorkspaceKind.TMPFS)
    assert not [note for note in ran.report.notes if note.startswith(("no-", "open-", "reached-", "unproven-"))]
    assert (ran.exit_code, ran.errors) == (0, "")


@needs_namespaces
@needs_landlock
def test_the_worker_sees_itself_its_workspace_and_little_else(tmp_path: Path) -> None:
    ran = run(LOOK, environment={"OMP_NUM_THREADS": "1"})
    seen = json.loads(ran.output)
    assert seen["pid"] == 2  # beneath its init
    assert seen["processes"] == ["1", "2"]
    assert seen["cwd"] == seen["argument"] == "/run/glasshouse/work"
    assert set(seen["descriptors"]) <= {"0", "1", "2", "3", "4"}  # the last is the listing itself
    assert set(seen["environment"]) >= {"HOME", "LANG", "OMP_NUM_THREADS", "PATH", "TMPDIR"}
    assert set(seen["environment"]) <= set(sandbox.minimal_environment("")) | {"HOME", "OMP_NUM_THREADS", "TMPDIR"}
    assert seen["own"] == [0, 0, 0]
    assert 0 not in [*seen["others"], seen["sysctl"]]
    shown = {path.split("/")[1] for path in shown_paths.default_read_paths()}
    assert set(seen["root"]) <= shown | {"dev", "etc", "proc", "run", "tmp", "var"}
    assert not {"mem", "kmsg", "vda", "sda", "kvm"} & set(seen["devices"])
    assert os.uname().nodename not in seen["host"]
    assert seen["users"].count("\n") == 1


@needs_namespaces
@needs_landlock
def test_the_machines_files_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("owner's")
    assert run(f"import os; print(os.path.exists({str(tmp_path)!r}))").output == "False\n"


@needs_namespaces
def test_a_path_that_lies_in_tmp_is_shown_read_only_and_tmp_stays_writable() -> None:
    # As when everything is installed below /tmp.
    place = Path("/tmp") / f"glasshouse-shown-{os.getpid()}"
    place.mkdir()
    try:
        (place / "file").write_text("to be read")
        code = f"""
import os
print(open('{place}/file').read(), sorted(os.listdir('{place}')))
for path in ('{place}/new', '/tmp/new', '/var/tmp/other'):
    try:
        open(path, 'w')
        print('written')
    except OSError as error:
        print(error.strerror)
"""
        ran = run(code, read_paths=(*shown_paths.default_read_paths(), str(place)))
        assert sorted(place.iterdir()) == [place / "file"]
    finally:
        (place / "file").unlink()
        place.rmdir()
    assert "no-private-root" not in ran.report.notes
    assert ran.output.splitlines() == ["to be read ['file']", "Read-only file system", "written", "written"]


@needs_namespaces
def test_nothing_that_the_worker_writes_has_a_name_on_the_machine() -> None:
    marker = "glasshouse-test-marker-file"
    ran = run(f"open('{marker}','w').write('x'); open('/tmp/{marker}','w'); open('/dev/shm/{marker}','w'); print('ok')")
    assert ran.output == "ok\n"
    assert not [path for place in ("/tmp", "/dev/shm", "/run") for path in Path(place).glob(f"*{marker}*")]
    assert b"/run/glasshouse " not in REAL.read("/proc/self/mountinfo")
    assert not list(Path("/dev/shm").glob(f"glasshouse-ws-{os.getpid()}-*"))


KERNELS_OWN = ("kpageflags", "kpagecount", "slabinfo", "vmallocinfo", "kcore", "cmdline")


@needs_namespaces
def test_the_worker_of_an_agent_that_is_root_sees_no_memory_of_the_kernel_and_no_private_keys_of_the_machine() -> None:
    code = f"""
import os
for path in [f'/proc/{{name}}' for name in {KERNELS_OWN}] + ['/etc/ssl/private', '/etc/ssl']:
    try:
        print(path, sorted(os.listdir(path)) if os.path.isdir(path) else len(open(path, 'rb').read(64)))
    except OSError as error:
        print(path, type(error).__name__)
print(open('/proc/meminfo').read(8), os.path.exists('/proc/cpuinfo'))
"""
    ran = run(code)
    seen = dict(line.split(" ", 1) for line in ran.output.splitlines())
    assert {seen[f"/proc/{name}"] for name in KERNELS_OWN} <= {"0", "FileNotFoundError"}
    assert seen["/etc/ssl/private"] == "FileNotFoundError"
    assert "private" not in seen["/etc/ssl"]
    assert seen["MemTotal"] == "True"
    assert not [note for note in ran.report.notes if note.startswith("open-")]


@needs_root
def test_where_nothing_can_hide_them_the_kernels_files_are_named() -> None:
    assert "open-proc-cmdline" in run("pass", kernel=WithoutMounts()).report.notes


@needs_namespaces
def test_the_workspace_is_full_when_its_limit_is_reached() -> None:
    ran = run(f"with open('big','wb') as file: file.write(bytes({WORKSPACE_BYTES + 1}))")
    assert "No space left on device" in ran.errors
    assert ran.exit_code == 1


@needs_namespaces
@needs_landlock
def test_the_workers_state_is_read_back_from_outside() -> None:
    def look(worker: Worker) -> dict[str, object]:
        status = REAL.status(worker.pid or 0)
        facts: dict[str, object] = {name: status[name] for name in ("NoNewPrivs", "Seccomp", "PPid", "NSpid")}
        return facts | {
            "held": int(status["CapEff"], 16) | int(status["CapPrm"], 16),
            "limits": REAL.read(f"/proc/{worker.pid}/limits").decode(),
            "init": str(worker.init_pid),
            "agent": str(os.getpid()),
            "above": REAL.status(worker.init_pid or 0),
        }

    facts = run("import time; time.sleep(0.2)", after=look).facts
    assert (facts["NoNewPrivs"], facts["Seccomp"], facts["held"]) == ("1", "2", 0)
    assert facts["PPid"] == facts["init"]
    assert str(facts["NSpid"]).endswith("\t2")
    above = facts["above"]
    assert isinstance(above, dict)
    assert (above["PPid"], above["NoNewPrivs"], above["Seccomp"]) == (facts["agent"], "1", "2")
    assert int(above["CapEff"], 16) | int(above["CapPrm"], 16) == 0
    core = next(line for line in str(facts["limits"]).splitlines() if "core" in line)
    assert core.split()[4:6] == ["1", "1"]


LASTING = """
import ctypes, multiprocessing, os
from multiprocessing import shared_memory
libc = ctypes.CDLL(None, use_errno=True)
print(libc.shmget(0x47480017, 4096, 0o1600), libc.msgget(0x47480017, 0o1600), libc.semget(0x47480017, 1, 0o1600))
print(libc.syscall(MQ_OPEN, b'glasshouse', os.O_RDWR | os.O_CREAT, 0o600, None))
memory = shared_memory.SharedMemory(create=True, size=4096)
memory.buf[:4] = b'kept'
lock = multiprocessing.Lock()
with lock:
    print(os.listdir('/dev/shm') != [], bytes(memory.buf[:4]))
memory.close()
memory.unlink()
"""


@needs_namespaces
def test_no_memory_that_outlives_its_processes_is_made_and_that_of_dev_shm_works() -> None:
    # The kernel's own: they count against nothing, and outlive a worker that was killed for want of memory.
    ran = run(LASTING.replace("MQ_OPEN", str(syscalls.number("mq_open", REAL.machine))))
    assert (ran.output, ran.errors) == ("-1 -1 -1\n-1\nTrue b'kept'\n", "")


NAMES = """
import os
made = 0
try:
    while True:
        os.close(os.open(f'{made:0200}', os.O_CREAT | os.O_WRONLY))
        made += 1
except OSError as error:
    print(error.errno, made)
"""


@needs_root
@needs_namespaces
def test_empty_files_are_as_many_as_the_workspace_has_pages() -> None:
    number, made = map(int, run(NAMES, workspace_bytes=4 << 20).output.split())
    assert number == errno.ENOSPC
    assert 900 < made <= 1024


BY_NUMBER = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
place = libc.shmat(int(NUMBER), None, 0)
if place != ctypes.c_void_p(-1).value:
    ctypes.memmove(place, b"plaintext", 9)
print(place != ctypes.c_void_p(-1).value)
"""


def test_a_script_writes_into_no_shared_memory_of_the_machine_whose_number_it_guesses() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    number = libc.shmget(0, 4096, 0o1600)  # IPC_PRIVATE | IPC_CREAT
    assert number >= 0
    try:
        code = BY_NUMBER.replace("NUMBER", str(number))
        assert run(code).output == run(code, kernel=WithoutNamespaces()).output == "False\n"
    finally:
        libc.shmctl(number, 0, None)


DATAGRAM = """
import socket
reached = 0
for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):
    for make in (socket.socket, lambda *how: socket.socketpair(*how)[0]):
        try:
            reached += make(socket.AF_UNIX, kind).sendto(b'plaintext', NAME)
        except OSError:
            pass
print(reached)
"""


@needs_landlock
def test_a_script_sends_no_datagram_to_a_log_of_the_machine(tmp_path: Path) -> None:
    name = str(tmp_path / "log")
    code = DATAGRAM.replace("NAME", repr(name))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(name)
        log.setblocking(False)
        for kernel in (None, WithoutNamespaces()):
            ran = run(code, kernel=kernel)
            assert (ran.output, "egress-closed" in ran.passed()) == ("0\n", True)
            with pytest.raises(BlockingIOError):
                log.recv(16)


@needs_namespaces
def test_a_project_of_more_modules_than_files_may_be_open_is_shown_in_a_private_root(tmp_path: Path) -> None:
    modules = [tmp_path / f"module_{number}.py" for number in range(300)]
    for module in modules:
        module.touch()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    code = "import os, resource, sys; print(len(os.listdir(sys.argv[2])), resource.getrlimit(resource.RLIMIT_NOFILE))"

    def story() -> Ran:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        argv = (sys.executable, "-I", "-S", "-B", "-c", code, "{workspace}", str(tmp_path))
        return run(code, argv=argv, read_paths=(*shown_paths.default_read_paths(), *map(str, modules)))

    ran = in_child(story, alone=True)
    assert (ran.output, ran.errors) == (f"300 (256, {hard})\n", "")


@needs_filters
def test_a_script_cannot_have_its_memory_dumped_into_a_program_of_the_machine() -> None:
    # At 0 the kernel writes no file, but systemd-coredump or apport get all of it, and keep it on the disk.
    code = """
import resource, subprocess, sys
for limits in ((0, 0), (0, 1), (1, 1)):
    resource.setrlimit(resource.RLIMIT_CORE, limits)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
ask = 'import resource; print(resource.getrlimit(resource.RLIMIT_CORE), resource.getrlimit(resource.RLIMIT_NOFILE))'
exec(ask, {}, {})
sys.stdout.flush()
subprocess.run([sys.executable, '-I', '-S', '-c', ask], check=True)
"""
    ran = run(code)
    assert ran.output == "(1, 1) (64, 64)\n" * 2, ran.errors


def test_a_script_cannot_go_before_its_keepers_where_the_machine_would_let_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = resource.setrlimit

    def told(which: int, limits: tuple[int, int]) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"{which} {limits}\n".encode())
        real(which, limits)

    monkeypatch.setattr(resource, "setrlimit", told)
    ran = run("", kernel=REAL)
    assert {f"{which} (0, 0)" for which in (resource.RLIMIT_NICE, resource.RLIMIT_RTPRIO)} <= set(
        ran.errors.split("\n")
    )


def test_the_workers_exit_code_is_the_agents_to_read() -> None:
    assert run("raise SystemExit(7)").exit_code == 7


@needs_namespaces
def test_the_end_of_the_worker_is_the_end_of_all_that_it_started() -> None:
    code = "import os,time\nif os.fork()==0: os.setsid()\nprint('up',flush=True); time.sleep(60)"

    def story() -> tuple[int, int, bool]:
        worker = start(specification(code))
        os.read(worker.stdout, 3)
        family = [worker.pid or 0, *children_of(worker.pid or 0)]
        first, second = worker.end(), worker.end()
        return first, second, len(family) == 2 and all(map(is_gone, family))

    assert in_child(story) == (-signal.SIGKILL, -signal.SIGKILL, True)


@needs_namespaces
def test_an_agent_that_is_killed_takes_the_worker_and_its_children_along() -> None:
    code = "import os,time\nif os.fork()==0: os.setsid()\nprint('up',flush=True); time.sleep(60)"

    def story() -> bool:
        reader, writer = os.pipe()
        agent = os.fork()
        if agent == 0:
            worker = start(specification(code))
            os.read(worker.stdout, 3)
            family = [worker.pid or 0, *children_of(worker.pid or 0)]
            os.write(writer, json.dumps(family).encode())
            time.sleep(60)
        family = json.loads(os.read(reader, 256))
        os.kill(agent, signal.SIGKILL)
        os.waitpid(agent, 0)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and not all(map(is_gone, family)):
            time.sleep(0.01)
        named_directory.sweep()
        return len(family) == 2 and all(map(is_gone, family))

    assert in_child(story)


def test_a_worker_can_be_ended_before_it_has_said_anything() -> None:
    def story() -> tuple[int, list[int]]:
        worker = sandbox.start(specification("import time; time.sleep(60)"))
        code = worker.end()
        return code, children_of(os.getpid())

    code, left = in_child(story)
    assert (code < 0 or code == 70, left) == (True, [])


def test_a_launcher_that_is_held_up_does_not_hold_up_the_end() -> None:
    def spawn(_spec: sandbox_spec.SandboxSpec, _streams: list[int]) -> int:
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        return pid

    def story() -> tuple[int, list[int], bool]:
        begun = time.monotonic()
        code = sandbox.start(specification("pass"), spawn=spawn).end(patience_s=0.1)
        return code, children_of(os.getpid()), time.monotonic() - begun < 15

    assert in_child(story) == (-signal.SIGKILL, [], True)


# the specification and the report


@pytest.mark.parametrize("path", ["/", "/home", "/etc", "/root", "usr", "/usr/../etc", "/usr/", "/proc"])
def test_a_sandbox_cannot_be_told_to_show_the_machine(path: str) -> None:
    with pytest.raises(ValueError, match="cannot show"):
        specification("pass", read_paths=(path,))


def test_a_list_of_peers_is_refused_because_it_could_not_be_kept() -> None:
    with pytest.raises(PlatformError) as caught:
        specification("pass", egress=("huggingface.co:443",))
    assert caught.value.code is Code.POLICY_IMPOSSIBLE


def test_what_a_worker_may_read_never_includes_a_home_or_the_machines_settings() -> None:
    paths = shown_paths.default_read_paths()
    assert {"/usr", f"{sys.prefix}/lib", f"{sys.prefix}/pyvenv.cfg"} <= set(paths)
    assert not {"/", "/etc", "/home", "/root", "/tmp", "/var", str(Path.home())} & set(paths)


def test_a_program_that_does_not_exist_is_a_platform_error_and_leaves_nothing() -> None:
    def story() -> tuple[str, list[Path]]:
        with pytest.raises(PlatformError) as caught:
            sandbox.start(specification("pass", python="/no/such/python"))
        return caught.value.code.value, list(Path("/dev/shm").glob(f"glasshouse-ws-{os.getpid()}-*"))

    assert in_child(story) == ("platform-unsupported", [])


GOOD = {
    "base": "/run/glasshouse",
    "notes": ["landlock-abi-7"],
    "observed": {"landlock": "passed"},
    "type": "sandbox",
    "workspace": "tmpfs",
}


@pytest.mark.parametrize(
    "change",
    [
        {"type": "ready"},
        {"workspace": "cloud"},
        {"observed": {"landlock": "yes"}},
        {"observed": []},
        {"notes": ["two words"]},
        {"notes": ["x"] * 129},
        {"base": 7},
        {"more": 1},
    ],
)
def test_a_report_of_another_shape_is_refused(change: dict[str, object]) -> None:
    assert SandboxReport.from_json(GOOD).observed == {"landlock": CheckResult.PASSED}
    with pytest.raises(FormatError):
        SandboxReport.from_json({**GOOD, **change})  # type: ignore[dict-item]


def test_a_second_report_is_refused() -> None:
    def story() -> str:
        worker = start(specification("import time; time.sleep(60)"))
        try:
            worker.confirm(GOOD)
        except FormatError as error:
            return error.message
        finally:
            worker.end()
        return ""

    assert in_child(story) == "a second sandbox frame"


@pytest.mark.parametrize("kernel", [None, WithoutMounts()], ids=["private root", "no mounts"])
def test_a_file_that_was_open_above_a_limit_which_was_lowered_since_is_closed_to_the_worker(
    tmp_path: Path, kernel: Kernel | None
) -> None:
    def story() -> str:
        high = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1
        os.dup2(os.open(tmp_path / "outside", os.O_CREAT | os.O_RDWR, 0o600), high)
        resource.setrlimit(resource.RLIMIT_NOFILE, (high - 1, high))
        return run(f"import os; os.write({high}, b'plaintext')", kernel=kernel).errors

    assert "Bad file descriptor" in in_child(story)
    assert (tmp_path / "outside").read_bytes() == b""
