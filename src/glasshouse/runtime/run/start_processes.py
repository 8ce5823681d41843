"""The first moments of a run: read the command line, harden, then start every process that it will have.

What is imported here is what the worker's start needs, and no more: the worker compiles its own modules meanwhile, on
another core. Laws: watchdog and custodian are started before this process has a thread or a secret; nothing is started
from a process that is not hardened yet, but the search beneath what the worker is shown (`shown_search.Look`), which
executes nothing, holds no secret and hardens itself.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from glasshouse.errors import Code, GlasshouseError, InternalError, UsageError
from glasshouse.package.read import Package
from glasshouse.runtime import kernel as linux
from glasshouse.runtime.confine import core_dumps, memory_limits, seccomp
from glasshouse.runtime.confine.shown_search import Look
from glasshouse.runtime.kernel import REAL, Kernel
from glasshouse.runtime.loop import Loop
from glasshouse.runtime.spawn import DEBUGGING, PRELOADING
from glasshouse.runtime.syscalls import KernelError
from glasshouse.runtime.watchdog import watchdog
from glasshouse.runtime.watchdog.watchdog import Watchdog
from glasshouse.runtime.worker import sandbox, sandbox_spec
from glasshouse.runtime.worker.sandbox import Worker
from glasshouse.runtime.worker.shown_paths import default_devices, default_read_paths, has_gpus
from glasshouse.wire.frames import control
from glasshouse.wire.group import MAX_MACHINES
from glasshouse.wire.policy import RANKED

if TYPE_CHECKING:
    from glasshouse.runtime.gate.relay import Relay
    from glasshouse.runtime.keys.custodian import Custodian, Regions

# Two paths and limits, nothing secret. (argparse costs 40 ms uncompiled.)
USAGE = (
    "usage: python -I -B -X pycache_prefix=DIR -m glasshouse.runtime --package FILE --out DIR "
    "[--max-seconds N] [--ranks N] [--peers HOST:PORT,…]"
)

_NAMES = ("--package", "--out", "--max-seconds", "--ranks", "--peers")
_PEER = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9.-]{1,253}):([1-9][0-9]{0,4})")
# Not `-m`: runpy costs 45 ms uncompiled.
_WORKER = "from glasshouse.workloads.worker.__main__ import main; main()"
_LEAST_WORKSPACE_BYTES = 64 << 20
# Inputs are laid out once; outputs, caches and temporary files lie beside them.
_LEAST_BESIDE_INPUTS_BYTES = 32 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentOptions:
    """What the command line gives."""

    package: str
    out: str  # the run's folder, to be made
    max_seconds: int | None = None  # ends the run earlier than the policy would; None for no own limit
    # how many ranks the job has on this machine, as the launch token has too; None for one process, no group
    ranks: int | None = None
    # ``host:port`` of the runtimes of the group's machines in order, this one's too; empty on one machine. No more
    # trustworthy than the network
    peers: tuple[str, ...] = ()


def parse(argv: Sequence[str]) -> AgentOptions:
    """Read the arguments; each is given at most once; raises `UsageError`: `usage`."""
    found: dict[str, str] = {}
    left = list(argv)
    while left:
        name = left.pop(0)
        if name not in _NAMES or name in found or not left:
            raise _usage()
        found[name] = left.pop(0)
    if "--package" not in found or "--out" not in found:
        raise _usage()
    return AgentOptions(
        package=found["--package"],
        out=found["--out"],
        max_seconds=_number(found.get("--max-seconds")),
        ranks=_number(found.get("--ranks")),
        peers=_peers(found.get("--peers")),
    )


def _number(text: str | None) -> int | None:
    if text is not None and not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= 1):
        raise _usage()
    return None if text is None else int(text)


def _peers(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    peers = tuple(text.split(","))
    found = [_PEER.fullmatch(peer) for peer in peers]
    if len(peers) > MAX_MACHINES or not all(one is not None and int(one[2]) < 65536 for one in found):
        raise _usage()
    return peers


def _usage() -> UsageError:
    return UsageError(Code.USAGE, "the runtime was started with arguments that it does not take", hint=USAGE)


@dataclass(kw_only=True, slots=True)
class Processes:
    """What has been started; each field is set when it is."""

    watchdog: Watchdog | None = None
    package_file: BinaryIO | None = None
    package: Package | None = None
    worker: Worker | None = None
    relay: Relay | None = None
    regions: Regions | None = None
    custodian: Custodian | None = None
    least_bytes: int = 0  # what must have room in the worker's workspace
    error: GlasshouseError | None = None  # why there is no more than this


def start_processes(options: AgentOptions, loop: Loop, custodian: str | None, look: Look | None) -> Processes:
    """Harden this process and start the others, with `custodian` executed as custodian; None for our own program.

    The search beneath what the worker is shown (`look`) becomes the worker's, or is ended.
    """
    found = Processes()
    try:
        _start(found, options, loop, custodian, look)
    except GlasshouseError as error:
        found.error = error
    except Exception:
        # Its text may hold a path; what is there is ended in order all the same.
        found.error = InternalError(Code.INTERNAL, "the run could not be started")
    if look is not None and found.worker is None:
        look.end()
    return found


def harden_agent(kernel: Kernel = REAL) -> list[str]:
    """Harden this process, before it has threads, children or secrets; return what could not be done."""
    notes = []
    for name, step in (
        # While this process is dumpable: only then a user may write its own files in /proc.
        ("oom-score", lambda: memory_limits.lower(kernel.read)),
        ("core-limit", core_dumps.limit),
        ("dumpable", lambda: kernel.prctl(linux.PR_SET_DUMPABLE, 0)),
        ("no-new-privs", lambda: kernel.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)),
        ("memory-lock", lambda: _lock_memory(kernel)),
        ("seccomp", lambda: kernel.seccomp(seccomp.agent(kernel.machine, own_pid=os.getpid()))),
    ):
        try:
            step()
        except (OSError, ValueError):
            notes.append(f"no-{name}")
    for name in PRELOADING + DEBUGGING:
        os.environ.pop(name, None)  # for what this process starts
    return notes


def seal_agent(kernel: Kernel = REAL) -> list[str]:
    """Give up what only the building of the sandbox needed, once the worker is confirmed; return what was refused.

    From here on this process starts no program, makes no namespace and has no capability but to write its own files.
    """
    notes = []
    try:
        # The folder of sealed outputs may be another user's; locked memory must stay allowed to grow.
        kernel.drop_capabilities(keep=(linux.CAP_DAC_OVERRIDE, linux.CAP_IPC_LOCK))
    except KernelError:
        notes.append("no-capability-drop")
    try:
        kernel.seccomp(seccomp.sealed_agent(kernel.machine, own_pid=os.getpid()))
    except KernelError:
        notes.append("no-seccomp")
    return notes


def _lock_memory(kernel: Kernel) -> None:
    """Keep all pages of this process, present and future, out of swap; a fork has to do it again; raises `OSError`."""
    for limit in (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]):
        try:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
            break
        except (OSError, ValueError):
            continue
    if not kernel.may_lock():
        raise KernelError("mlockall", errno.ENOMEM)
    # Locked when touched, not at once: a thread's stack would otherwise cost its full size.
    kernel.mlockall(linux.MCL_CURRENT | linux.MCL_FUTURE | linux.MCL_ONFAULT)


def _start(found: Processes, options: AgentOptions, loop: Loop, custodian: str | None, look: Look | None) -> None:
    harden_agent()
    found.watchdog = watchdog.start()
    # Opened once: what is parsed here is what custodian and worker read later, whatever becomes of the name.
    try:
        found.package_file = open(options.package, "rb", buffering=0)  # noqa: PTH123, SIM115 - closed at the end
    except OSError:
        raise UsageError(Code.FILE_MISSING, "the package cannot be read") from None
    found.package = Package.open(found.package_file)
    manifest = found.package.manifest
    if options.ranks is not None and manifest.workload not in RANKED:
        raise UsageError(Code.USAGE, f"the workload {manifest.workload} runs in one process")
    package = found.package_file.fileno()
    found.least_bytes = os.fstat(package).st_size + _LEAST_BESIDE_INPUTS_BYTES
    prefix = sys.pycache_prefix or f"{options.out}/no-bytecode"
    argv = ("-c", _WORKER, "--fd", "3", "--workload", manifest.workload, "--workspace", "{workspace}")
    ranks = () if options.ranks is None else ("--ranks", str(options.ranks))
    specification = sandbox_spec.SandboxSpec(
        argv=(sys.executable, "-I", "-B", "-X", f"pycache_prefix={prefix}", *argv, *ranks),
        pycache_prefix=prefix,
        workspace_bytes=_workspace_bytes(),
        read_paths=default_read_paths() if look is None else look.paths,
        device_paths=default_devices(),
        process_files=has_gpus(),
        egress=manifest.floor.egress,
        loopback=options.ranks is not None,
        hidden=(options.out,),
        package=package,
        least_bytes=found.least_bytes,
        disk=manifest.floor.disk,
    )
    found.worker = sandbox.start(specification, look=look)
    # It may import its frameworks at once; it is given nothing before it has been observed.
    found.worker.link.sendall(control({"type": "prepare"}))

    if options.peers:
        from glasshouse.runtime.gate import relay  # few runs have several machines

        found.relay = relay.start(options.peers)
    from glasshouse.runtime.keys.custodian import PROGRAM, Custodian, Regions

    found.regions = Regions.for_package(manifest, ranks=options.ranks or 1)
    found.custodian = Custodian.start(loop, package, found.regions, pycache_prefix=prefix, program=custodian or PROGRAM)


def _workspace_bytes() -> int:
    """Let the workspace grow to half of the memory that is left to this run; what is not used costs nothing."""
    return max(_LEAST_WORKSPACE_BYTES, memory_limits.available_bytes() // 2)
