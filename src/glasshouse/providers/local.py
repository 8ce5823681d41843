"""Places a runtime on this machine: a process of its own, in a session of its own."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys

from glasshouse.errors import Code, PlatformError
from glasshouse.providers.base import Request

__all__ = ["LocalPlacement", "LocalProvider"]

# The runtime sees these of the owner's environment and no others.
_PASSED = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "TZ")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class LocalPlacement:
    """A runtime on this machine."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        # Readable when the process has ended: waiting costs nothing while it trains.
        self._pidfd = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, timeout_s: float) -> int | None:
        if self._pidfd is None:
            try:
                return self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return None
        select.select([self._pidfd], [], [], timeout_s)
        code = self._process.poll()
        if code is not None:
            os.close(self._pidfd)
            self._pidfd = None
        return code

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._process.kill()


class LocalProvider:
    """This machine, as it is."""

    name = "local"
    # Nothing here names containers for us: the id is ours, and the evidence says so.
    container_source = "minted"

    def addresses(self, machines: int) -> tuple[str, ...]:
        """Return free ports of the loopback; raises `PlatformError`.

        Nobody holds them until the runtimes listen there. One that is taken meanwhile ends the run, and loses nothing:
        who listens there instead knows none of the group's secrets.
        """
        with contextlib.ExitStack() as held:
            sockets = [held.enter_context(socket.socket()) for _ in range(machines)]
            try:
                for one in sockets:
                    one.bind(("127.0.0.1", 0))
            except OSError as error:
                raise PlatformError(Code.PLATFORM, f"no free port on the loopback: {error.strerror}") from None
            return tuple(f"127.0.0.1:{one.getsockname()[1]}" for one in sockets)

    def place(self, request: Request) -> LocalPlacement:
        """Start a runtime here; raises `PlatformError`."""
        if not sys.platform.startswith("linux"):
            raise PlatformError(Code.PLATFORM, "a runtime needs Linux; seal here and run on a Linux machine")
        command = [
            sys.executable,
            *("-I", "-B", "-X", f"pycache_prefix={request.scratch}", "-m", "glasshouse.runtime"),
            *("--package", str(request.package), "--out", str(request.out), "--max-seconds", str(request.max_seconds)),
            *(() if request.ranks is None else ("--ranks", str(request.ranks))),
            *(("--peers", ",".join(request.peers)) if request.peers else ()),
        ]
        try:
            log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    env=_environment(),
                    start_new_session=True,  # a Ctrl-C in the terminal reaches us, and we pass it on
                    umask=0o077,
                )
            finally:
                os.close(log)
        except OSError as error:
            raise PlatformError(Code.PLATFORM, f"the runtime cannot be started: {error.strerror}") from None
        assert process.stdin is not None  # noqa: S101 - asked for above
        # A runtime that ended at once says why in its log and by its exit code.
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(request.launch)
        return LocalPlacement(process)


def _environment() -> dict[str, str]:
    passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
    return {"LANG": "C.UTF-8", "PATH": _PATH} | passed
