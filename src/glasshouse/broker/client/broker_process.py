"""A broker as a child process, for a caller that needs one for a while."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from glasshouse.broker.client.owner_client import OwnerClient
from glasshouse.broker.http_api import BrokerReady
from glasshouse.errors import Code, PeerError

_START_S = 30.0
_STOP_S = 10.0


class BrokerProcess:
    """A running broker; leaving the block stops it, and so does the end of this process.

    Args:
        directory: data directory and owner's socket go below it; mode 0700.
        options: of the program; they take the place of these.
        program: what the interpreter runs.

    Raises:
        PeerError: `broker-unreachable` when it does not start; the reason is on standard error.
    """

    def __init__(
        self,
        directory: Path,
        *options: str,
        program: Sequence[str] = ("-m", "glasshouse.broker.serving"),
    ) -> None:
        # Isolated: nothing in the working directory or in PYTHON* variables can stand in for our code.
        command = [sys.executable, "-I", *program, "--stop-at-eof", "--data", str(directory / "data")]
        command += ["--owner-socket", str(directory / "sockets" / "owner"), *options]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            self._listens = self._ready()
        except BaseException:
            self.kill()
            raise
        self.runtime_url, self.broker_public = self._listens.runtime_url, self._listens.broker_public
        self.store_public = self._listens.store_public  # None where it keeps no checkpoints

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def client(self) -> OwnerClient:
        """Return the owner's client of this broker."""
        return OwnerClient(self._listens.owner_socket)

    def stop(self) -> int:
        """Signal it to finish, wait until it has, and return its exit status."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            return self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            self._close()

    def kill(self) -> None:
        """End it at once, as a crash or a lost machine would."""
        self._process.kill()
        self._process.wait()
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def _ready(self) -> BrokerReady:
        timer = threading.Timer(_START_S, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline() if self._process.stdout else b""
        finally:
            timer.cancel()
            timer.join()
        if not line.endswith(b"\n"):
            raise PeerError(Code.BROKER_UNREACHABLE, "the broker did not start")
        return BrokerReady.parse(line.removesuffix(b"\n"))

    def _close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
