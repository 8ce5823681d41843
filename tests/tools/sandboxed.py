"""Runs a line of Python in the real sandbox, on the real kernel or on one that lacks something."""

from __future__ import annotations

import fcntl
import marshal
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from glasshouse.runtime.kernel import REAL, Kernel
from glasshouse.runtime.worker import launcher, sandbox, shown_paths
from glasshouse.runtime.worker.sandbox import Worker
from glasshouse.runtime.worker.sandbox_spec import SandboxReport, SandboxSpec
from glasshouse.wire import frames
from tools.forked import in_child

WORKSPACE_BYTES = 8 << 20
# What the launcher tries from inside before the worker begins.
TRIED = {"debug-env-clean", "egress-closed", "landlock", "metadata-closed", "preload-clean", "seccomp-filter"}
# pytest puts the folder of every test file on the search path; no user has hundreds of modules there.
TESTS = f"{Path(__file__).parent.parent}/"


@dataclass
class Ran:
    """What a sandboxed program did."""

    report: SandboxReport
    output: str
    errors: str
    exit_code: int
    facts: dict[str, object] = field(default_factory=dict)

    def passed(self) -> set[str]:
        return {name for name, result in self.report.observed.items() if result == "passed"}


def specification(code: str, **changes: object) -> SandboxSpec:
    given: dict[str, object] = {
        "argv": (sys.executable, "-I", "-S", "-B", "-c", code, "{workspace}"),
        "pycache_prefix": sys.pycache_prefix or "",
        "workspace_bytes": WORKSPACE_BYTES,
        "read_paths": tuple(path for path in shown_paths.default_read_paths() if not path.startswith(TESTS)),
        "device_paths": shown_paths.default_devices(),
        "process_files": shown_paths.has_gpus(),
        **changes,
    }
    return SandboxSpec(**given)  # type: ignore[arg-type]


def start(spec: SandboxSpec, kernel: Kernel | None = None) -> Worker:
    """Start a worker; with a kernel of its own, the launcher runs in a fork of this process."""
    worker = sandbox.start(spec, spawn=None if kernel is None else forking(kernel))
    message = first_message(worker)
    if not isinstance(message, dict) or message.get("type") != "sandbox":
        worker.end()
        raise AssertionError(f"no sandbox: {message} {os.read(worker.stderr, 65536).decode()}")
    worker.confirm(message)
    return worker


def start_held(code: str, kernel: Kernel | None = None, **changes: object) -> Worker:
    """Start a worker whose code begins once it was confirmed.

    A busy machine confirms late, and a worker that has ended by then is refused.
    """
    worker = start(specification(f"import posix; posix.read(3, 1)\n{code}", **changes), kernel)
    worker.link.send(b"x")
    return worker


def first_message(worker: Worker) -> object:
    decoder = frames.Decoder()
    while data := worker.link.recv(65536):
        for _kind, value in decoder.feed(data):
            return value
    return None


def run(
    code: str,
    *,
    kernel: Kernel | None = None,
    after: Callable[[Worker], dict[str, object]] | None = None,
    **changes: object,
) -> Ran:
    """Run `code` to its end in the sandbox, all of it in a child of this process.

    Args:
        code: Python; ``sys.argv[1]`` is the workspace.
        kernel: what the launcher believes to be the kernel.
        after: called once the worker is confirmed; its answer is `Ran.facts`.
        changes: other values of the specification.
    """

    def story() -> Ran:
        ends = after is None
        worker = start_held(code, kernel, **changes) if ends else start(specification(code, **changes), kernel)
        assert worker.report is not None
        try:
            facts = after(worker) if after is not None else {}
            output, errors = _drained(worker.stdout), _drained(worker.stderr)
            select.select([worker.pidfd], [], [])
            code_seen = worker.poll()
            assert code_seen is not None
        finally:
            worker.end()
        return Ran(report=worker.report, output=output, errors=errors, exit_code=code_seen, facts=facts)

    return in_child(story)


def _drained(descriptor: int) -> str:
    with os.fdopen(descriptor, "rb") as stream:
        return stream.read().decode()


def forking(kernel: Kernel) -> sandbox.Spawn:
    def spawn(spec: SandboxSpec, streams: list[int]) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            # Free numbers above those that they are given below, so that none is lost on the way.
            high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 64) for descriptor in streams]
            for index, descriptor in enumerate(high):
                os.dup2(descriptor, index)
            given = marshal.loads(os.read(4, 1 << 16))
            launcher.attempt(kernel, launcher.Spec(given), 3, 5)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(70)

    return spawn


def children_of(pid: int) -> list[int]:
    """Return the children of a process, as this process numbers them."""
    return [int(child) for child in REAL.read(f"/proc/{pid}/task/{pid}/children").split()]


def is_gone(pid: int) -> bool:
    """Return whether a process has ended; a zombie has."""
    try:
        return REAL.status(pid)["State"][:1] in "ZX"
    except OSError:
        return True
