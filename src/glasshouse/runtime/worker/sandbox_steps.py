"""The launcher's steps, one after the other, from a process in its namespaces to a confined one (`launcher.run`)."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
import sys

from glasshouse.runtime import kernel as linux
from glasshouse.runtime.confine import (
    core_dumps,
    file_trials,
    landlock,
    memory_limits,
    mounts,
    private_root,
    seccomp,
    shown_search,
    silent_listener,
    trials,
)
from glasshouse.runtime.kernel import Kernel
from glasshouse.runtime.spawn import DEBUGGING, foreign_libraries
from glasshouse.runtime.syscalls import KernelError

LOOK_FD = 6
PACKAGE_FD = 7
NETWORK = "/proc/self/ns/net"
# An ELF program.
_AT_EMPTY_PATH = 0x1000
_ADDRESS = 0x400000
_HEADER, _SEGMENT = 64, 56
_ELF = b"\x7fELF\x02\x01\x01"
_PT_LOAD, _PT_GNU_STACK = 1, 0x6474E551
_READ_EXECUTE, _READ_WRITE_EXECUTE = 5, 7
# ELF's number of the machine, and the code of exit(0).
_MACHINES = {
    "x86_64": (62, bytes.fromhex("31ff b83c000000 0f05")),
    "aarch64": (183, bytes.fromhex("000080d2 a80b80d2 010000d4")),
}
_MAX_PRINTED = 4  # beside what the trials print less than a pipe holds: it is not read while this process starts


class Spec:
    """What `sandbox` asks for: made by the agent, this process's parent, from a dictionary of the same names."""

    agent_pid: int
    argv: list[str]
    devices: list[str]
    environment: dict[str, str]
    loopback: bool
    named_workspace: str
    package: bool
    process_files: bool
    python: str
    read: list[str]
    targets: dict[str, int | str]
    workspace_bytes: int

    def __init__(self, values: dict[str, object]) -> None:
        self.__dict__.update(values)


class SandboxBuild:
    """The sandbox while it is built: the kernel, what it shall be, notes on what it is not, and where it lies."""

    def __init__(self, kernel: Kernel, spec: Spec) -> None:
        self.kernel, self.spec = kernel, spec
        self.notes: list[str] = []
        self.base = ""
        self.package: int | None = None  # as the worker will be handed it
        self.isolated = False
        self.abi: int | None = None  # Landlock's version; None where it refused
        self.held: set[int] = set()  # descriptors that the worker holds, and uses for nothing

    @property
    def private(self) -> bool:
        return self.base == private_root.BASE


def print_line(text: bytes) -> None:
    os.write(2, b"launcher: " + text + b"\n")


def put_score(score: int, box: SandboxBuild) -> None:
    try:
        memory_limits.put(score)
    except OSError:
        box.notes.append("no-oom-score")


def program(machine: str) -> bytes:
    """Return the smallest program that asks for an executable stack and ends; raises `KeyError` for other machines."""
    number, code = _MACHINES[machine]
    start = _HEADER + 2 * _SEGMENT
    size = start + len(code)
    return b"".join(
        (
            struct.pack("<16sHHIQQQIHHHHHH", _ELF, 2, number, 1, _ADDRESS + start, _HEADER, 0, 0, 64, 56, 2, 0, 0, 0),
            struct.pack("<IIQQQQQQ", _PT_LOAD, _READ_EXECUTE, 0, _ADDRESS, _ADDRESS, size, size, 4096),
            struct.pack("<IIQQQQQQ", _PT_GNU_STACK, _READ_WRITE_EXECUTE, 0, 0, 0, 0, 0, 16),
            code,
        )
    )


def use_up_log_lines(kernel: Kernel) -> bool:
    """Cause in a child what the kernel logs once a boot with a name of the caller's choice; return whether it ran.

    It names a program that is started without arguments, and one that asks for an executable stack, by a path or the
    last four parts of one: some 800 bytes. Neither is an argument that a filter can see.
    """
    try:
        image = program(kernel.machine)
        memory = os.memfd_create("glasshouse", os.MFD_CLOEXEC)
    except (KeyError, OSError):
        return False
    try:
        os.write(memory, image)
        child = os.fork()
        if child == 0:
            try:
                nothing = ctypes.c_void_p(None)
                words = (ctypes.addressof(nothing), ctypes.addressof(nothing), _AT_EMPTY_PATH)
                kernel.call("execveat", memory, b"", *words)
            finally:
                os._exit(1)
        return os.waitpid(child, 0)[1] == 0
    except OSError:
        return False
    finally:
        os.close(memory)


def stored_remotely(box: SandboxBuild) -> list[str]:
    """Return a note where a server besides this kernel sees what is read and asked of the package."""
    try:
        # In the namespace that it was opened in: the view of it is in no table of mounts.
        read = box.kernel.read
        kind = mounts.MountTable.read(read).kind_of(read, PACKAGE_FD) if box.spec.package else None
    except (OSError, ValueError):
        kind = "unknown"
    return [f"package-remote-{kind}"] if kind else []


def keep_quiet(machines: str, box: SandboxBuild) -> None:
    """Keep floods on the ranks' loopback out of the machine's log: in their own network, never the machine's."""
    from glasshouse.runtime.confine import loopback

    try:
        if os.readlink(NETWORK) == machines:  # noqa: PTH115
            raise OSError("the machine's own network")
        loopback.keep_quiet()
    except OSError:
        box.notes.append("floods-logged")


def make_file_system(box: SandboxBuild, size: int) -> None:
    """Give the worker its file system."""
    if "no-mount-namespace" not in box.notes:
        try:
            private_root.build(
                box.kernel,
                read=box.spec.read,
                devices=box.spec.devices,
                workspace_bytes=size,
                process_files=box.spec.process_files,
                ranks=box.spec.loopback,
            )
            box.base = private_root.BASE
            return
        except OSError as error:
            box.notes.append("no-private-root")
            print_line(f"no private root: {error}".encode())
    box.base = box.spec.named_workspace
    private_root.lay_out(box.base)
    box.notes.append("named-workspace")


def found_beneath(box: SandboxBuild) -> list[tuple[str, str]]:
    """Wait for what was found beneath all that is shown, and cover what could not be looked into."""
    found, whole = shown_search.answer(LOOK_FD)
    os.close(LOOK_FD)
    for folder in [path for kind, path in found if kind == "closed"]:
        try:
            if not box.private:
                raise KernelError("mount", errno.EPERM)
            private_root.cover(box.kernel, folder)
        except OSError:
            whole = False
    if not whole:
        box.notes.append(shown_search.IN_PART)
    return [(kind, path) for kind, path in found if kind != "closed"]


def cover_remote(box: SandboxBuild, found: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Cover remote file systems beneath what is shown, and note those that stay; return what was found elsewhere."""
    cover = (lambda folder: private_root.cover(box.kernel, folder)) if box.private else None
    left, covered = private_root.cover_remote(box.kernel, box.spec.read + box.spec.devices, cover=cover)
    box.notes += left
    for folder in covered[:_MAX_PRINTED]:
        print_line(b"covered, since a server sees each name looked up there: " + os.fsencode(folder))
    return [(kind, path) for kind, path in found if not any(mounts.beneath(path, folder) for folder in covered)]


def connect_ranks(box: SandboxBuild) -> None:
    """Give ranks their loopback, where everything that keeps it from leading outside is there."""
    from glasshouse.runtime.confine import loopback  # only here: ordinary runs do not compile it

    try:
        loopback.raise_up()
        box.notes.append("loopback")
    except OSError as error:
        box.notes.append("no-loopback")
        print_line(f"no loopback: {error}".encode())


def confine(box: SandboxBuild) -> None:
    """Take away what the worker does not need."""
    kernel, base = box.kernel, box.base
    os.chdir(base + "/" + private_root.WORK)
    core_dumps.limit()
    # Above its keepers in the queue for a processor it would leave them none.
    for first in (resource.RLIMIT_NICE, resource.RLIMIT_RTPRIO):
        resource.setrlimit(first, (0, 0))
    kernel.drop_capabilities()
    kernel.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    # Without a socket's name torch hands no tensor from one process to another, and waits: its locks, in shared memory,
    # fail at once.
    kept = (private_root.WORK, private_root.TEMPORARY, *([private_root.SHARED] if box.isolated else []))
    # Where names lead to the machine's own files: all names beneath the search path, which imports look through.
    looked_through = [path for path in sys.path if path.startswith("/") and os.path.isdir(path)]  # noqa: PTH112
    loopback = "loopback" in box.notes
    gpus = box.spec.process_files
    # Elsewhere the files of every process of this user are in sight, the keepers' too: of those no more is open than
    # ranks need, each of which names threads of its own, and none of which has a folder yet.
    alone = file_trials.is_alone(kernel)
    keepers = gpus and not alone and box.spec.loopback and (box.private or private_root.processes_alone_are_open())
    open_files = "/proc" if alone or keepers else "/proc/self/task"
    if gpus:
        box.notes += ["keeper-files"] if keepers else []
        box.notes.append("process-files")
        # What Landlock's rule is of is another folder once the kernel has let go of the name; held, it does not.
        held = os.open(open_files, os.O_PATH)
        os.set_inheritable(held, True)
        box.held.add(held)
    try:
        box.abi = landlock.restrict(
            kernel,
            read=[*filter(_exists, box.spec.read), "/proc", *(["/dev", "/etc"] if box.private else [])],
            write=[f"{base}/{name}" for name in kept],
            devices=[*filter(_exists, box.spec.devices)],
            files=[open_files] if gpus else [],
            names=["/"] if box.private else looked_through,
            tcp=loopback,
        )
        box.notes.append(f"landlock-abi-{box.abi}")
    except OSError as error:
        print_line(f"no Landlock: {error}".encode())
    try:
        init, notices = os.getppid(), None
        if gpus and not box.isolated:
            notices = silent_listener.notices(kernel)
            box.notes += ["listener-spins"] if notices is None else []
        words: dict[str, bool] = {
            "isolated": box.isolated,
            "loopback": loopback,
            "gpus": gpus,
            "waits": notices is not None,
        }
        if notices is not None:
            silent_listener.start(kernel, notices, seccomp.worker(kernel.machine, init=init, answers=True, **words))
        kernel.seccomp(seccomp.worker(kernel.machine, init=init, **words))
    except KernelError:
        box.notes.append("no-seccomp-filter")


def observe(box: SandboxBuild, found: list[tuple[str, str]]) -> dict[str, bool | None]:
    """Try everything that is forbidden; trials that succeed become notes."""
    kernel, spec, notes = box.kernel, box.spec, box.notes
    names = list(environment(box))
    ways_out = file_trials.ways_out(found, private_root=box.private)
    loopback = "loopback" in notes
    tried = {
        "debug-env-clean": [name for name in names if name in DEBUGGING],
        "egress-closed": trials.egress(kernel, spec.targets, isolated=box.isolated, loopback=loopback) + ways_out,
        "landlock": file_trials.files(box.base, [str(spec.targets["file"])]),
        "metadata-closed": file_trials.metadata(kernel, package=box.package, paths=spec.read + spec.devices),
        "preload-clean": foreign_libraries(kernel.read, names),
        "seccomp-filter": trials.system_calls(kernel, isolated=box.isolated),
    }
    if "keeper-files" in notes:  # said, and what ranks with GPUs cannot do without
        tried["landlock"] = [name for name in tried["landlock"] if name != "write-keeper"]
    of_kernel = file_trials.kernel_files(private_root.HIDDEN)
    if box.private:
        tried["landlock"] += of_kernel
    else:
        notes += [f"open-{name}" for name in of_kernel]  # without mounts nothing can hide them
        # What is written elsewhere stays on a disk, or is read from a pipe by another process.
        tried["egress-closed"] += [name for name in tried["landlock"] if name in ("create-outside", "write-outside")]
    observed: dict[str, bool | None] = {name: not succeeded for name, succeeded in tried.items()}
    notes += [f"open-{name}" for succeeded in tried.values() for name in succeeded]
    if "process-files" in notes and "no-network-namespace" in notes and file_trials.network_files():
        notes.append("open-network-files")  # of threads too, and no rule of Landlock's leaves them out
    neighbours = box.private and not box.abi and not file_trials.is_alone(kernel)
    if neighbours:
        notes.append("shown-processes")  # the root of one that starts later leads past all mounts
    if (neighbours or shown_search.IN_PART in notes) and observed["egress-closed"]:
        observed["egress-closed"] = None  # there may be a way out where nothing looked
    if not box.abi:
        observed["landlock"] = None if box.abi == 0 else False
    elif observed["landlock"] and mounts.is_remote(notes):
        observed["landlock"] = None  # no version of it keeps a name from being looked up
    if kernel.status("self").get("Seccomp") != "2":
        observed["seccomp-filter"] = None if "no-seccomp-filter" in notes else False
    return observed


def environment(box: SandboxBuild) -> dict[str, str]:
    work, temporary = f"{box.base}/{private_root.WORK}", f"{box.base}/{private_root.TEMPORARY}"
    return {**box.spec.environment, "HOME": work, "TMPDIR": temporary}


def _exists(path: str) -> bool:
    return os.access(path, os.F_OK)
