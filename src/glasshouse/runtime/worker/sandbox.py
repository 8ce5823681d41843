"""The worker's sandbox, seen from the agent: what it shall be, how it is started, what came of it.

`start` spawns the launcher, which becomes the worker; its first frame on the link is the `sandbox` frame,
which `Worker.confirm` reads. Laws: the worker's init (`worker_init`) is this process's child, the worker is the init's
and has its own process group; `end` leaves nothing of them: no process, no named workspace.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import TypeAlias

from glasshouse.attestation.claims import CheckResult
from glasshouse.errors import Code, FormatError, PlatformError
from glasshouse.runtime.confine import read_only_package, shown_search
from glasshouse.runtime.confine.shown_search import Look
from glasshouse.runtime.kernel import PR_SET_CHILD_SUBREAPER, REAL, Kernel
from glasshouse.runtime.loop import refuse_descriptors
from glasshouse.runtime.spawn import spawn
from glasshouse.runtime.watchdog.session_record import members
from glasshouse.runtime.worker import STATUS_BYTES, named_directory
from glasshouse.runtime.worker.controls import Controls
from glasshouse.runtime.worker.named_directory import NamedDirectory
from glasshouse.runtime.worker.sandbox_spec import SandboxReport, SandboxSpec
from glasshouse.runtime.worker.shown_paths import minimal_environment
from glasshouse.wire.canonical import Json

_LAUNCHER = "from glasshouse.runtime.worker.launcher import main; main()"
_ISOLATED = ("-I", "-B", "-X")
_REAP_S = 0.002
_PID_BYTES = 4
_LAUNCH_S = 10.0
_EXIT_S = 60.0
_MAX_SPEC_BYTES = 60_000  # less than a pipe holds, so that writing it cannot block


Spawn: TypeAlias = Callable[[SandboxSpec, list[int]], int]


class Worker:
    """The launcher that is becoming the worker, and then the worker."""

    def __init__(
        self, *, kernel: Kernel, launcher: int, answer: socket.socket, link: socket.socket, stdout: int, stderr: int,
        private: NamedDirectory, controls: Controls, look: Look, source: int | None = None,
    ) -> None:  # fmt: skip
        self.link = link  # the agent's end of the control socket; what takes it over closes it
        self.stdout, self.stderr = stdout, stderr  # read ends, blocking; closed by the log that takes them over
        # What is known from `confirm` on.
        self.pid: int | None = None
        self.init_pid: int | None = None  # of the process above it, which ends after it
        self.pidfd = -1  # readable once both have ended
        self.report: SandboxReport | None = None
        self.exit_code: int | None = None
        self.package = -1  # descriptor of the sealed package for the worker, where it is handed one
        self.on_disk = False  # whether its workspace lies on a disk
        self._source = source
        self._kernel, self._private, self._controls = kernel, private, controls
        self._launcher, self._answer, self._look = launcher, answer, look

    def confirm(self, message: Json) -> None:
        """Take the `sandbox` frame, the first that comes over the link, and set `report`.

        It is corrected by what the agent itself saw: a target that was reached fails `egress-closed` whatever the
        launcher reports, and a search that cannot be ended leaves it open.

        Raises:
            FormatError: not the frame, or a second one.
            PlatformError: `platform-unsupported`: the worker was gone before it began, or the package can be handed to
                it neither read-only nor sealed.
        """
        if self.report is not None:
            raise FormatError(Code.SCHEMA, "a second sandbox frame")
        report = SandboxReport.from_json(message)
        self._learn_pids()
        if self.init_pid is None or self.pid is None or self.poll() is not None:
            raise PlatformError(Code.PLATFORM, "the worker was gone before it began")
        self.pidfd = os.pidfd_open(self.init_pid)
        if self._source is not None:
            self.package = self._take_package(self._source)
        observed, notes = dict(report.observed), list(report.notes)
        touched, unproven = self._controls.touched(), self._controls.unproven
        notes += [f"reached-{name}" for name in touched] + [f"unproven-{name}" for name in unproven]
        if not self._look.end():
            notes.append(shown_search.IN_PART)  # what is traced may answer anything
            if observed.get("egress-closed") is CheckResult.PASSED:
                observed["egress-closed"] = CheckResult.UNAVAILABLE
        if touched:
            observed["egress-closed"] = CheckResult.FAILED
        self._controls.close()
        self.report = SandboxReport(
            observed=observed, workspace=report.workspace, base=report.base, notes=tuple(sorted(set(notes)))
        )
        if "named-workspace" not in notes:
            self._private.remove()
        else:
            self.on_disk = not named_directory.room(self._private.path)[0]

    @property
    def named_path(self) -> str:
        """The directory that stands in where no private root can be; removed by `end`."""
        return self._private.path

    @property
    def own_process_namespace(self) -> bool:
        """Whether the end of the worker is the end of everything it started."""
        return self.report is not None and "no-pid-namespace" not in self.report.notes

    def poll(self) -> int | None:
        """Return the worker's exit code (negative: its signal) once it and its init have ended, else None."""
        if self.exit_code is None and self.init_pid is not None:
            try:
                pid, status = os.waitpid(self.init_pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = self.init_pid, 0x7F00
            if pid:
                self.exit_code = self._final_code(status)
        return self.exit_code

    def lives(self) -> bool:
        """Return whether its init is there or, without a process namespace, anything of the worker's session."""
        if self.poll() is None:
            return self.init_pid is not None
        return self.pid is not None and not self.own_process_namespace and bool(members(self.pid))

    def _is_traced(self) -> bool:
        for pid in filter(None, (self.init_pid, self.pid)):
            with contextlib.suppress(OSError):
                if self._kernel.status(pid).get("TracerPid", "0") != "0":
                    return True
        return False

    def beat(self) -> None:
        """Send its init a sign of life; after the first, a minute without one ends the worker."""
        with contextlib.suppress(OSError):  # it has ended, or has many to take
            self._answer.send(b"\1", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def kill(self) -> None:
        """Send SIGKILL to the worker and to all that it started; nothing happens when it has ended."""
        if self.init_pid is not None and self.exit_code is None:
            self._kill_group()
            os.kill(self.init_pid, signal.SIGKILL)  # our child and not waited for: the number is still its own

    def _kill_group(self) -> None:
        """Where no namespace ends what the worker started: its filter keeps that in its group."""
        if self.pid is not None and not self.own_process_namespace:
            # It has not made its group yet, and so has no children.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _final_code(self, init_status: int) -> int:
        """Return how the worker ended, from what the init wrote last; an init without that was ended by another."""
        with contextlib.suppress(OSError):
            # Before it there may be a package that was never taken.
            while data := self._receive():
                if len(data) == STATUS_BYTES:
                    return os.waitstatus_to_exitcode(int.from_bytes(data, "big"))
        self._kill_group()
        return os.waitstatus_to_exitcode(init_status) or -signal.SIGKILL

    def _receive(self) -> bytes:
        while True:
            # Raised once, and before what was sent: the init ended with a beat that it had not read.
            with contextlib.suppress(ConnectionResetError):
                return self._answer.recv(STATUS_BYTES, socket.MSG_DONTWAIT)

    def end(self, *, patience_s: float = 2.0) -> int:
        """Kill, wait, and remove what has a name; returns the exit code. May be called twice.

        The kernel takes seconds to free gigabytes. A tracer that never waits keeps a killed process from being reaped;
        that one holds no memory any more, and after `patience_s` is left to the kernel. The link and the pipes stay
        open: what the worker had written can still be read.
        """
        deadline, last = time.monotonic() + patience_s, time.monotonic() + _EXIT_S
        self._learn_pids(patience_s)
        self.kill()
        # Where what lives cannot be seen (no descriptor left), its workspace is removed all the same.
        with contextlib.suppress(OSError):
            while self.lives() and time.monotonic() < (deadline if self._is_traced() else last):
                time.sleep(_REAP_S)
        self._look.end(patience_s=patience_s)
        self._controls.close()
        self._private.remove()
        self._answer.close()
        if self.package >= 0:
            os.close(self.package)
            self.package = -1
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        return -signal.SIGKILL if self.exit_code is None else self.exit_code

    def _learn_pids(self, patience_s: float = _LAUNCH_S) -> None:
        """Wait for the launcher, which is gone within milliseconds, and read what it sent; kill it if it is not."""
        if not self._launcher:
            return
        deadline = time.monotonic() + patience_s
        while not os.waitpid(self._launcher, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                os.kill(self._launcher, signal.SIGKILL)
                deadline += patience_s
            time.sleep(_REAP_S)
        self._launcher = 0
        with contextlib.suppress(BlockingIOError):  # it was ended before it had a child
            if answer := self._answer.recv(_PID_BYTES, socket.MSG_DONTWAIT):
                self.init_pid = int.from_bytes(answer, "big")
                # The oldest child of an init is the worker, beside which there may be orphans of its.
                with contextlib.suppress(OSError):
                    children = self._kernel.read(f"/proc/{self.init_pid}/task/{self.init_pid}/children").split()
                    self.pid = int(children[0]) if children else None

    def _take_package(self, source: int) -> int:
        """Take the view of the package that the launcher made, and read back that it is one."""
        try:
            found = socket.recv_fds(self._answer, 1, 1, socket.MSG_DONTWAIT)[1]
        except OSError:
            found = []
        size = os.fstat(source).st_size
        for descriptor in found:
            if read_only_package.kind(self._kernel, descriptor) is not None and os.fstat(descriptor).st_size == size:
                return descriptor
            os.close(descriptor)
        raise PlatformError(Code.PLATFORM, "the package cannot be handed to the worker without a way to a disk")


def start(spec: SandboxSpec, *, look: Look | None = None, kernel: Kernel = REAL, spawn: Spawn | None = None) -> Worker:
    """Spawn the launcher; the first frame on the link comes when it is becoming the worker.

    Args:
        look: the search beneath `spec.read_paths`; ended with the worker, or here. By default one begins here.
        spawn: starts the launcher with the given streams as its descriptors 0, 1, 2 and so on, and returns its
            pid; by default a new interpreter.

    Raises:
        PlatformError: `platform-unsupported`: this machine starts no process, or something listens where it would see.
    """
    try:
        look = look or Look.start(spec.read_paths)
    except OSError as error:
        raise PlatformError(Code.PLATFORM, f"no process can be started: {error}") from error
    try:
        return _start(spec, look, kernel, spawn or _spawn)
    except BaseException:
        look.end()
        raise
    finally:
        look.hand_on()


def _start(spec: SandboxSpec, look: Look, kernel: Kernel, spawn: Spawn) -> Worker:
    if look.paths != spec.read_paths:
        raise ValueError("a look beneath other paths than are shown")
    if shown_search.bound_beneath(kernel, spec.read_paths):
        raise PlatformError(
            Code.PLATFORM,
            "another process of this machine listens at a socket beneath a folder that the worker is shown",
            hint="nothing may listen beneath the interpreter's folder or a Python package; see: ss -xl",
        )
    named_directory.sweep()
    private = named_directory.make(least_bytes=spec.least_bytes, disk=spec.disk)
    controls = Controls(private.path)
    ours, theirs = socket.socketpair()
    answer, theirs_answer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Not pipes: of a pipe one end is locked against the other for as long as a `splice` waits, and its reader, as
    # whatever closes it, then waits where no signal reaches it, not even the last.
    out, err = _stream(), _stream()
    given, nothing = os.pipe(), os.pipe()
    try:
        kernel.prctl(PR_SET_CHILD_SUBREAPER, 1)
        data = marshal.dumps(_specification(spec, private.path, controls))
        if len(data) > _MAX_SPEC_BYTES:
            raise ValueError("a sandbox with too many paths")
        os.write(given[1], data)
        # Its standard input is an empty pipe: the machine's /dev/null would keep a mode and times that it sets.
        streams = [nothing[0], out[1], err[1], theirs.fileno(), given[0], theirs_answer.fileno(), look.reader]
        launcher = spawn(spec, streams if spec.package is None else [*streams, spec.package])
    except (OSError, ValueError) as error:
        controls.close()
        private.remove()
        ours.close()
        answer.close()
        for descriptor in (out[0], err[0]):
            os.close(descriptor)
        raise PlatformError(Code.PLATFORM, f"the worker cannot be started: {error}") from error
    finally:
        theirs.close()
        theirs_answer.close()
        for descriptor in (out[1], err[1], *given, *nothing):
            os.close(descriptor)
    return Worker(
        kernel=kernel, launcher=launcher, answer=answer, link=ours, stdout=out[0], stderr=err[0],
        private=private, controls=controls, look=look, source=spec.package,
    )  # fmt: skip


def _stream() -> tuple[int, int]:
    """Return two ends of a stream, of which the first is to read from."""
    ours, theirs = socket.socketpair()
    refuse_descriptors(ours)
    theirs.shutdown(socket.SHUT_RD)
    return ours.detach(), theirs.detach()


def _specification(spec: SandboxSpec, private: str, controls: Controls) -> dict[str, object]:
    return {
        "agent_pid": os.getpid(),
        "argv": list(spec.argv),
        "devices": list(spec.device_paths),
        "environment": {**minimal_environment(spec.python), **spec.environment},
        "loopback": spec.loopback,
        "named_workspace": private,
        "package": spec.package is not None,
        "process_files": spec.process_files,
        "python": spec.python,
        "read": list(spec.read_paths),
        "targets": controls.targets,
        "workspace_bytes": spec.workspace_bytes,
    }


def _spawn(spec: SandboxSpec, streams: list[int]) -> int:
    """Start the launcher with `streams` as its descriptors 0, 1, 2 and so on."""
    return spawn(
        [spec.python, *_ISOLATED, f"pycache_prefix={spec.pycache_prefix}", "-c", _LAUNCHER, "3", "4", "5"],
        minimal_environment(spec.python),
        streams,
        defaults=[signal.SIGINT, signal.SIGPIPE, signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP],
    )
