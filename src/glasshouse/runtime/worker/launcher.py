"""Between agent and worker: builds the sandbox around itself, tries to break it, and becomes the worker.

```
python -I -B -X pycache_prefix=D -c 'from glasshouse.runtime.worker.launcher import main; main()' LINK SPEC PID
```
(`-m` would import 45 ms of the import system.) LINK is the descriptor of the socket to the agent, SPEC
that of a pipe with the specification, which holds no secret (`sandbox.SandboxSpec`), PID that of a socket on
which the agent is told the init's pid and given the view of the package. On `LOOK_FD` comes what was found beneath all
that is shown (`shown_search.Look`). In order:

1. die with the agent;
2. namespaces, each by itself: user (where not allowed otherwise), processes, mounts, network, IPC, host name;
3. a child in them goes on as the init (`init`); this process is gone before it does, so that the agent is its parent;
   the init's child becomes the worker;
4. the package once more, through a read-only mount; where that cannot be, copied into sealed memory;
5. private root in memory; where that cannot be, a named directory; what lies beneath all that is shown, and on which
   file systems; for several ranks, the loopback of the network namespace, and nothing else of it;
6. no capability, no_new_privs, limits, Landlock, system call filter last;
7. trials of all that is forbidden; one `sandbox` frame says what happened;
8. exec of the worker with an environment of its own.

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
import resource
import select
import sys

from glasshouse.runtime import kernel as linux
from glasshouse.runtime.confine import (
    core_dumps,
    file_trials,
    landlock,
    logged_once,
    memory_limits,
    mounts,
    private_root,
    read_only_package,
    seccomp,
    shown_search,
    trials,
)
from glasshouse.runtime.kernel import REAL, Kernel, KernelError
from glasshouse.runtime.worker import worker_init

__all__ = ["attempt", "main", "run"]

LINK_FD = 3
LOOK_FD = 6
PACKAGE_FD = 7
_CONTROL = 1
_KILLED_FIRST, _KILLED_NEXT = 1000, 999
_NO_OOM_SCORE = "no-oom-score"
_EXIT_FAILED = 70
_LEAST_WORKSPACE_BYTES = 1 << 20
_MAX_TOLD = 4  # beside what the trials say less than a pipe holds: it is not read while this process starts
_NAMESPACES = (
    ("pid", linux.CLONE_NEWPID),
    ("mount", linux.CLONE_NEWNS),
    ("network", linux.CLONE_NEWNET),
    ("ipc", linux.CLONE_NEWIPC),
    ("uts", linux.CLONE_NEWUTS),
)
_NETWORK = "/proc/self/ns/net"
_HALF_ISOLATED = frozenset({"no-private-root", *(f"no-{name}-namespace" for name, _ in _NAMESPACES)})


def main() -> None:
    link, pipe, answer = (int(argument) for argument in sys.argv[1:4])
    with os.fdopen(pipe, "rb") as stream:
        spec = marshal.loads(stream.read())  # noqa: S302 - written by the agent, our parent; json costs 80 ms
    attempt(REAL, spec, link, answer)
    os._exit(_EXIT_FAILED)


def attempt(kernel: Kernel, spec: dict[str, object], link: int, answer: int) -> None:
    """Do as `run`, and tell the agent what came of it if it raises."""
    try:
        run(kernel, spec, link, answer)
    except Exception as error:
        os.write(2, f"launcher: {type(error).__name__}: {error}\n".encode())
        code = "out-of-memory" if isinstance(error, MemoryError) else "platform-unsupported"
        os.write(link, frame(f'{{"code":"{code}","type":"failed"}}'))


def run(kernel: Kernel, spec: dict[str, object], link: int, answer: int) -> None:
    """Do all of it; returns only by raising.

    Args:
        kernel: the kernel.
        spec: as `sandbox.SandboxSpec.to_spec` made it.
        link: descriptor of the worker's end of the socket to the agent.
        answer: descriptor of a socket on which the agent is told the init's pid, 4 bytes big endian, then given
            the view of the package, beside one byte, and at the end told the worker's wait status, 4 bytes big endian.

    Raises:
        MemoryError: the package, which has to be copied here, has no room beside the workspace.
    """
    agent_pid = _integer(spec, "agent_pid")
    agent = os.pidfd_open(agent_pid)
    kernel.prctl(linux.PR_SET_PDEATHSIG, _signal.SIGKILL)
    if os.getppid() != agent_pid:
        raise OSError("the agent is gone")
    os.umask(0o077)
    stored = _stored_remotely(kernel, spec)
    # Before this process's children are the first of a namespace.
    logged = logged_once.use_up(kernel)
    network = os.readlink(_NETWORK)  # noqa: PTH115 - pathlib is slow to import
    notes = _separate(kernel)
    notes += [] if logged else ["exec-logged"]
    # The agent's own, as this process inherited it.
    notes += [] if memory_limits.is_low(kernel) else [_NO_OOM_SCORE]
    notes += ["oom-group"] if memory_limits.ends_together() else []
    _hand_over(answer)
    # While /proc can be written, and with its capabilities: the kernel then does not let it be lowered again.
    _be_killed(_KILLED_NEXT, notes)
    worker_init.fork_worker(kernel, agent_pid, agent, answer, own_namespace="no-pid-namespace" not in notes)
    _be_killed(_KILLED_FIRST, notes)
    os.setsid()
    if spec["loopback"] is True and "no-network-namespace" not in notes:
        _keep_quiet(network, notes)  # while /proc can be written
    package, taken = _give_package(kernel, spec, answer, notes)
    notes += [] if taken else stored  # a copy in memory was read before the worker begins
    base = _house(kernel, spec, notes, taken)
    # What is let go because of one of them is held by all: a socket has a name in the network's, a path in the mounts'.
    isolated = base == private_root.BASE and _HALF_ISOLATED.isdisjoint(notes)
    found = _on_this_machine(kernel, spec, base, notes, _found_beneath(kernel, base, notes))
    if isolated and spec["loopback"] is True:
        _connect_ranks(notes)
    abi = _confine(kernel, spec, base, notes, isolated=isolated)
    observed = _observe(kernel, spec, base, abi, notes, package, found, isolated=isolated)
    in_memory, no_swap = private_root.is_memory(kernel, base)
    workspace = "directory" if not in_memory else "tmpfs-noswap" if no_swap else "tmpfs"
    os.write(link, report(observed, workspace, base, notes))
    _become_worker(spec, link, base + "/" + private_root.WORK)


def frame(payload: str) -> bytes:
    """Return a control frame (`wire.frames`) around canonical JSON."""
    data = payload.encode()
    return len(data).to_bytes(4, "big") + bytes([_CONTROL]) + data


def report(observed: dict[str, bool | None], workspace: str, base: str, notes: list[str]) -> bytes:
    """Return the `sandbox` frame.

    Args:
        observed: check → passed, failed (False) or unavailable (None).
        workspace: its kind.
        base: the directory that holds it.
        notes: small words.
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


def _separate(kernel: Kernel) -> list[str]:
    """Enter the namespaces that the kernel gives; return notes about those it does not."""
    notes = []
    uid, gid = os.geteuid(), os.getegid()
    # Root in a container mostly lacks this one, and is then no more than any user.
    if not kernel.capable(linux.CAP_SYS_ADMIN):
        try:
            kernel.unshare(linux.CLONE_NEWUSER)
            notes.append("user-namespace")
            # Mapped to itself: the worker needs to be no other user. Root may be mapped only by who had CAP_SETFCAP;
            # unmapped, the other namespaces still hold, and a private root cannot be built.
            for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
                _write(f"/proc/self/{name}", text)
        except OSError:
            notes.append("unmapped-user" if notes else "no-user-namespace")
    for name, flag in _NAMESPACES:
        try:
            kernel.unshare(flag)
        except KernelError:
            notes.append(f"no-{name}-namespace")
    return notes


def _hand_over(answer: int) -> None:
    """Continue in a child whose parent is the agent, which is told its pid."""
    launcher = os.pidfd_open(os.getpid())
    pid = os.fork()
    if pid:
        os.write(answer, pid.to_bytes(4, "big"))
        os._exit(0)
    # Only then is the agent the parent, and the signal of a parent's death the agent's.
    select.select([launcher], [], [])
    os.close(launcher)


def _give_package(kernel: Kernel, spec: dict[str, object], answer: int, notes: list[str]) -> tuple[int | None, int]:
    """Give the agent what the worker will read the package by; return it, and how much memory it takes."""
    package, taken = None, 0
    agent = _socket.socket(fileno=answer)
    if spec["package"]:
        package = read_only_package.view(kernel, PACKAGE_FD)
        if package is None:
            notes.append("sealed-package")
            taken = os.fstat(PACKAGE_FD).st_size
            package = _copied(kernel, taken, _integer(spec, "workspace_bytes"))
        agent.sendmsg([b"p"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, package.to_bytes(4, sys.byteorder))])
        os.close(PACKAGE_FD)
    agent.close()
    return package, taken


def _copied(kernel: Kernel, size: int, workspace_bytes: int) -> int:
    short = f"the package takes {size} bytes of memory here, and the workspace has {workspace_bytes} for both"
    if size > workspace_bytes - _LEAST_WORKSPACE_BYTES:
        raise MemoryError(short)
    try:
        return read_only_package.sealed_copy(kernel, PACKAGE_FD)
    except OSError as error:
        if error.errno in (errno.ENOMEM, errno.ENOSPC):
            raise MemoryError(short) from None
        raise


def _house(kernel: Kernel, spec: dict[str, object], notes: list[str], taken: int) -> str:
    """Give the worker its file system; return the directory that holds its workspace."""
    size = _integer(spec, "workspace_bytes") - taken
    if "no-mount-namespace" not in notes:
        try:
            private_root.build(kernel, read=_texts(spec, "read"), devices=_texts(spec, "devices"), workspace_bytes=size)
            return private_root.BASE
        except OSError as error:
            notes.append("no-private-root")
            os.write(2, f"launcher: no private root: {error}\n".encode())
    named = str(spec["named_workspace"])
    private_root.lay_out(named)
    notes.append("named-workspace")
    return named


def _found_beneath(kernel: Kernel, base: str, notes: list[str]) -> list[tuple[str, str]]:
    """Wait for what was found beneath all that is shown, and cover what could not be looked into."""
    found, whole = shown_search.answer(LOOK_FD)
    os.close(LOOK_FD)
    for folder in [path for kind, path in found if kind == "closed"]:
        try:
            if base != private_root.BASE:
                raise KernelError("mount", errno.EPERM)
            private_root.cover(kernel, folder)
        except OSError:
            whole = False
    if not whole:
        notes.append(shown_search.IN_PART)
    return [(kind, path) for kind, path in found if kind != "closed"]


def _stored_remotely(kernel: Kernel, spec: dict[str, object]) -> list[str]:
    """Return a note where a server besides this kernel sees what is read and asked of the package."""
    try:
        # In the namespace that it was opened in: the view of it is in no table of mounts.
        kind = mounts.Table.read(kernel).kind_of(kernel, PACKAGE_FD) if spec["package"] else None
    except (OSError, ValueError):
        kind = "unknown"
    return [f"package-remote-{kind}"] if kind else []


def _on_this_machine(
    kernel: Kernel, spec: dict[str, object], base: str, notes: list[str], found: list[tuple[str, str]]
) -> list[tuple[str, str]]:
    """Cover remote file systems beneath what is shown, and note those that stay; return what was found elsewhere."""
    cover = (lambda folder: private_root.cover(kernel, folder)) if base == private_root.BASE else None
    left, covered = mounts.close(kernel, _texts(spec, "read") + _texts(spec, "devices"), cover=cover)
    notes += left
    for folder in covered[:_MAX_TOLD]:
        os.write(2, b"launcher: covered, since a server sees each name looked up there: " + os.fsencode(folder) + b"\n")
    return [(kind, path) for kind, path in found if not any(mounts.beneath(path, folder) for folder in covered)]


def _connect_ranks(notes: list[str]) -> None:
    """Give ranks their loopback, where everything that keeps it from leading outside is there; else say so."""
    from glasshouse.runtime.confine import loopback  # only here: ordinary runs do not compile it

    try:
        loopback.raise_up()
        notes.append("loopback")
    except OSError as error:
        notes.append("no-loopback")
        os.write(2, f"launcher: no loopback: {error}\n".encode())


def _keep_quiet(machines: str, notes: list[str]) -> None:
    """Keep floods on the ranks' loopback out of the machine's log: in their own network, never the machine's."""
    from glasshouse.runtime.confine import loopback

    try:
        if os.readlink(_NETWORK) == machines:  # noqa: PTH115
            raise OSError("the machine's own network")
        loopback.keep_quiet()
    except OSError:
        notes.append("floods-logged")


def _confine(kernel: Kernel, spec: dict[str, object], base: str, notes: list[str], *, isolated: bool) -> int | None:
    """Take away what the worker does not need; return Landlock's version, None where it refused."""
    private = base == private_root.BASE
    os.chdir(base + "/" + private_root.WORK)
    core_dumps.limit()
    # Above its keepers in the queue for a processor it would leave them none.
    for first in (resource.RLIMIT_NICE, resource.RLIMIT_RTPRIO):
        resource.setrlimit(first, (0, 0))
    kernel.drop_capabilities()
    kernel.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    # Without a socket's name torch hands no tensor from one process to another, and waits: its locks, in shared memory,
    # fail at once, and say so.
    kept = (private_root.WORK, private_root.TEMPORARY, *([private_root.SHARED] if isolated else []))
    read = [path for path in _texts(spec, "read") if _exists(path)] + ["/proc"]
    if private:
        read += ["/dev", "/etc"]
    # Where names lead to the machine's own files: all names beneath the search path, which imports look through.
    looked_through = [path for path in sys.path if path.startswith("/") and os.path.isdir(path)]  # noqa: PTH112
    abi: int | None
    try:
        abi = landlock.restrict(
            kernel,
            read=read,
            write=[f"{base}/{name}" for name in kept],
            devices=[path for path in _texts(spec, "devices") if _exists(path)],
            names=["/"] if private else looked_through,
            tcp="loopback" in notes,
        )
        notes.append(f"landlock-abi-{abi}")
    except OSError as error:
        abi = None
        os.write(2, f"launcher: no Landlock: {error}\n".encode())
    if not seccomp.supports(kernel.machine):
        notes.append("no-seccomp-filter")
        return abi
    try:
        seccomp.install(
            kernel,
            seccomp.worker(kernel.machine, isolated=isolated, loopback="loopback" in notes, init=os.getppid()),
        )
    except KernelError:
        notes.append("no-seccomp-filter")
    return abi


def _be_killed(score: int, notes: list[str]) -> None:
    """Where memory runs out, have the kernel end the worker, or what it started, then its init, and no other keeper."""
    try:
        memory_limits.put(score)
    except OSError:
        notes.append(_NO_OOM_SCORE)


def _observe(
    kernel: Kernel,
    spec: dict[str, object],
    base: str,
    abi: int | None,
    notes: list[str],
    package: int | None,
    found: list[tuple[str, str]],
    *,
    isolated: bool,
) -> dict[str, bool | None]:
    """Try everything that is forbidden; failed trials become notes."""
    names = list(_environment(spec, base))
    targets = spec["targets"]
    if not isinstance(targets, dict):
        raise TypeError("targets")
    seen = _texts(spec, "read") + _texts(spec, "devices")
    ways_out = file_trials.ways_out(found, private_root=base == private_root.BASE)
    tried = {
        "debug-env-clean": trials.environment(names),
        "egress-closed": trials.egress(kernel, targets, isolated=isolated, loopback="loopback" in notes) + ways_out,
        "landlock": trials.files(base, [str(targets["file"])]),
        "metadata-closed": file_trials.metadata(kernel, package=package, paths=seen),
        "preload-clean": trials.libraries(kernel, names),
        "seccomp-filter": trials.system_calls(kernel, isolated=isolated),
    }
    of_kernel = trials.kernel_files(private_root.HIDDEN)
    if base == private_root.BASE:
        tried["landlock"] += of_kernel
    else:
        notes += [f"open-{name}" for name in of_kernel]  # without mounts nothing can hide them
        # What is written elsewhere stays on a disk, or is read from a pipe by another process.
        tried["egress-closed"] += [name for name in tried["landlock"] if name in ("create-outside", "write-outside")]
    observed: dict[str, bool | None] = {name: not succeeded for name, succeeded in tried.items()}
    notes += [f"open-{name}" for succeeded in tried.values() for name in succeeded]
    neighbours = base == private_root.BASE and not abi and not file_trials.is_alone(kernel)
    if neighbours:
        notes.append("shown-processes")  # the root of one that starts later leads past all mounts
    if (neighbours or shown_search.IN_PART in notes) and observed["egress-closed"]:
        observed["egress-closed"] = None  # there may be a way out where nothing looked
    if not abi:
        observed["landlock"] = None if abi == 0 else False
    elif observed["landlock"] and mounts.is_remote(notes):
        observed["landlock"] = None  # no version of it keeps a name from being looked up
    if kernel.status("self").get("Seccomp") != "2":
        observed["seccomp-filter"] = None if "no-seccomp-filter" in notes else False
    return observed


def _become_worker(spec: dict[str, object], link: int, workspace: str) -> None:
    python, argv = str(spec["python"]), [text.replace("{workspace}", workspace) for text in _texts(spec, "argv")]
    os.dup2(link, LINK_FD, inheritable=True)
    linux.close_all_but({0, 1, 2, LINK_FD})
    _signal.set_wakeup_fd(-1)
    os.execve(python, argv, _environment(spec, os.path.dirname(workspace)))  # noqa: PTH120, S606


def _environment(spec: dict[str, object], base: str) -> dict[str, str]:
    given = spec["environment"]
    if not isinstance(given, dict):
        raise TypeError("environment")
    work = f"{base}/{private_root.WORK}"
    return {**given, "HOME": work, "TMPDIR": f"{base}/{private_root.TEMPORARY}"}


def _exists(path: str) -> bool:
    return os.access(path, os.F_OK)


def _integer(spec: dict[str, object], name: str) -> int:
    value = spec[name]
    if not isinstance(value, int):
        raise TypeError(name)
    return value


def _texts(spec: dict[str, object], name: str) -> list[str]:
    value = spec[name]
    if not isinstance(value, list):
        raise TypeError(name)
    return [str(item) for item in value]


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
