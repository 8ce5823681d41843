"""Between agent and worker: builds the sandbox around itself, tries to break it, and becomes the worker.

```
python -I -B -X pycache_prefix=D -c 'from glasshouse.runtime.worker.launcher import main; main()' LINK SPEC ANSWER
```
(`-m` would import 45 ms of the import system.) LINK is the descriptor of the socket to the agent, SPEC that of a pipe
with the specification, which holds no secret (`Spec`), ANSWER that of a socket on which the agent is sent the init's
pid, 4 bytes big endian, then the view of the package beside one byte, and at the end the worker's wait status, 4 bytes
big endian. On `LOOK_FD` comes what was found beneath all that is shown (`shown_search.Look`).

Nothing here decides whether the result suffices: the agent reads it back and does. What a step could not
do is a note. Imports are few: nothing is compiled beforehand, and this stands in the run's way.
"""

from __future__ import annotations

# The C module beneath `signal`, which costs 40 ms to import without compiled bytecode.
import _signal  # type: ignore[import-not-found]
import _socket
import errno
import marshal
import os
import select
import sys

from glasshouse.runtime import kernel as linux
from glasshouse.runtime.confine import memory_limits, mounts, private_root, read_only_package
from glasshouse.runtime.kernel import REAL, Kernel
from glasshouse.runtime.syscalls import KernelError
from glasshouse.runtime.worker import sandbox_steps as steps
from glasshouse.runtime.worker import worker_init
from glasshouse.runtime.worker.sandbox_steps import NETWORK, PACKAGE_FD, SandboxBuild, Spec, print_line, put_score

LINK_FD = 3
_CONTROL = 1
_KILLED_FIRST, _KILLED_NEXT = 1000, 999
_EXIT_FAILED = 70
_LEAST_WORKSPACE_BYTES = 1 << 20
_NAMESPACES = (
    ("pid", linux.CLONE_NEWPID),
    ("mount", linux.CLONE_NEWNS),
    ("network", linux.CLONE_NEWNET),
    ("ipc", linux.CLONE_NEWIPC),
    ("uts", linux.CLONE_NEWUTS),
)
_HALF_ISOLATED = frozenset({"no-private-root", *(f"no-{name}-namespace" for name, _ in _NAMESPACES)})


def main() -> None:
    """Build the sandbox and become the worker."""
    link, pipe, answer = (int(argument) for argument in sys.argv[1:4])
    with os.fdopen(pipe, "rb") as stream:
        spec = Spec(marshal.loads(stream.read()))  # noqa: S302 - written by the agent, our parent; json costs 80 ms
    attempt(REAL, spec, link, answer)
    os._exit(_EXIT_FAILED)


def attempt(kernel: Kernel, spec: Spec, link: int, answer: int) -> None:
    """Do as `run`, and send the agent a code if it raises."""
    try:
        run(kernel, spec, link, answer)
    except Exception as error:
        print_line(f"{type(error).__name__}: {error}".encode())
        code = "out-of-memory" if isinstance(error, MemoryError) else "platform-unsupported"
        os.write(link, frame(f'{{"code":"{code}","type":"failed"}}'))


def run(kernel: Kernel, spec: Spec, link: int, answer: int) -> None:
    """Do all of it; returns only by raising: `MemoryError` where the package has to be copied here, and has no room."""
    agent = os.pidfd_open(spec.agent_pid)
    kernel.prctl(linux.PR_SET_PDEATHSIG, _signal.SIGKILL)
    if os.getppid() != spec.agent_pid:
        raise OSError("the agent is gone")
    os.umask(0o077)
    box = SandboxBuild(kernel, spec)
    stored = steps.stored_remotely(box)
    # Before this process's children are the first of a namespace.
    logged = steps.use_up_log_lines(kernel)
    network = os.readlink(NETWORK)  # noqa: PTH115 - pathlib is slow to import
    _separate(box)
    box.notes += [] if logged else ["exec-logged"]
    # The agent's own, as this process inherited it.
    box.notes += [] if memory_limits.is_low(kernel.read) else ["no-oom-score"]
    box.notes += ["oom-group"] if memory_limits.ends_together() else []
    _hand_over(answer)
    # While /proc can be written, and with its capabilities: the kernel then does not let it be lowered again. Where
    # memory runs out the worker, or what it started, is ended, then its init, and no other keeper.
    put_score(_KILLED_NEXT, box)
    own_namespace = "no-pid-namespace" not in box.notes
    worker_init.fork_worker(kernel, spec.agent_pid, agent, answer, own_namespace=own_namespace)
    put_score(_KILLED_FIRST, box)
    os.setsid()
    if spec.loopback and "no-network-namespace" not in box.notes:
        steps.keep_quiet(network, box)  # while /proc can be written
    taken = _give_package(box, answer)
    box.notes += [] if taken else stored  # a copy in memory was read before the worker begins
    steps.make_file_system(box, spec.workspace_bytes - taken)
    # What is let go because of one of them is held by all: a socket has a name in the network's, a path in the mounts'.
    box.isolated = box.private and _HALF_ISOLATED.isdisjoint(box.notes)
    found = steps.cover_remote(box, steps.found_beneath(box))
    if box.isolated and spec.loopback:
        steps.connect_ranks(box)
    steps.confine(box)
    observed = steps.observe(box, found)
    in_memory, no_swap = mounts.is_memory(kernel.read, box.base)
    workspace = "directory" if not in_memory else "tmpfs-noswap" if no_swap else "tmpfs"
    os.write(link, report(observed, workspace, box.base, box.notes))
    os.dup2(link, LINK_FD, inheritable=True)
    linux.close_all_but({0, 1, 2, LINK_FD, *box.held})
    _signal.set_wakeup_fd(-1)
    argv = [text.replace("{workspace}", f"{box.base}/{private_root.WORK}") for text in spec.argv]
    os.execve(spec.python, argv, steps.environment(box))  # noqa: S606


def frame(payload: str) -> bytes:
    """Return a control frame (`wire.frames`) around canonical JSON."""
    data = payload.encode()
    return len(data).to_bytes(4, "big") + bytes([_CONTROL]) + data


def report(observed: dict[str, bool | None], workspace: str, base: str, notes: list[str]) -> bytes:
    """Return the `sandbox` frame: the directory that holds it, and what each check came to.

    A check has passed, failed (False) or was unavailable (None).
    """
    words = {True: "passed", False: "failed", None: "unavailable"}
    checks = ",".join(f'"{name}":"{words[observed[name]]}"' for name in sorted(observed))
    listed = ",".join(f'"{note}"' for note in sorted(set(notes)))
    for text in (base, workspace, *notes, *observed):
        if not text.isascii() or not text.isprintable() or '"' in text or "\\" in text:
            raise ValueError("a word that would need escaping")
    return frame(
        f'{{"base":"{base}","notes":[{listed}],"observed":{{{checks}}},"type":"sandbox","workspace":"{workspace}"}}'
    )


def _separate(box: SandboxBuild) -> None:
    """Enter the namespaces that the kernel gives."""
    uid, gid = os.geteuid(), os.getegid()
    # Root in a container mostly lacks this one, and is then no more than any user.
    if not box.kernel.capable(linux.CAP_SYS_ADMIN):
        try:
            box.kernel.unshare(linux.CLONE_NEWUSER)
            box.notes.append("user-namespace")
            # Mapped to itself: the worker needs to be no other user. Root may be mapped only with CAP_SETFCAP;
            # unmapped, the other namespaces still hold, and a private root cannot be built.
            for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
                with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123
                    file.write(text)
        except OSError:
            box.notes.append("unmapped-user" if box.notes else "no-user-namespace")
    for name, flag in _NAMESPACES:
        try:
            box.kernel.unshare(flag)
        except KernelError:
            box.notes.append(f"no-{name}-namespace")


def _hand_over(answer: int) -> None:
    """Continue in a child whose parent is the agent, which is sent its pid."""
    launcher = os.pidfd_open(os.getpid())
    pid = os.fork()
    if pid:
        os.write(answer, pid.to_bytes(4, "big"))
        os._exit(0)
    # Only then is the agent the parent, and the signal of a parent's death the agent's.
    select.select([launcher], [], [])
    os.close(launcher)


def _give_package(box: SandboxBuild, answer: int) -> int:
    """Give the agent what the worker will read the package by; return how much memory it takes."""
    taken = 0
    agent = _socket.socket(fileno=answer)
    if box.spec.package:
        box.package = read_only_package.view(box.kernel, PACKAGE_FD)
        if box.package is None:
            box.notes.append("sealed-package")
            taken = os.fstat(PACKAGE_FD).st_size
            box.package = _copied(box, taken)
        agent.sendmsg([b"p"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, box.package.to_bytes(4, sys.byteorder))])
        os.close(PACKAGE_FD)
    agent.close()
    return taken


def _copied(box: SandboxBuild, size: int) -> int:
    room = box.spec.workspace_bytes
    short = f"the package takes {size} bytes of memory here, and the workspace has {room} for both"
    if size > room - _LEAST_WORKSPACE_BYTES:
        raise MemoryError(short)
    try:
        return read_only_package.sealed_copy(box.kernel, PACKAGE_FD)
    except OSError as error:
        if error.errno in (errno.ENOMEM, errno.ENOSPC):
            raise MemoryError(short) from None
        raise
