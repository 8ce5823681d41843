"""The embedded broker: one process per state home, shared by the runs of all projects, gone when the last has ended.

Laws: `broker/lock` is held while a broker is started or stopped, so two runs never start two; a run writes its record
before it asks for a broker, and marks it ended before it gives the broker back, so a broker is never stopped under a
run, and ends by itself when the last supervisor was killed. A broker that died is started again on the same data.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from glasshouse.broker.client.owner_client import OwnerClient
from glasshouse.broker.http_api import verify_chain
from glasshouse.errors import Code, FormatError, GlasshouseError, PeerError, UsageError
from glasshouse.jobs.owner.home import Home, locked, private_folder, read_state, socket_folder, write_state
from glasshouse.jobs.owner.processes import ProcessName, spawn
from glasshouse.jobs.owner.rundir import FilePath, RunFolder
from glasshouse.wire.canonical import Json, b64decode
from glasshouse.wire.record import Member, Record, octets, text

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving(Record, name="broker record"):
    """A broker that serves this home."""

    process: ProcessName
    runtime_url: Annotated[str, text(4096)]  # what runtimes call
    owner_socket: FilePath
    public: Annotated[bytes, octets(32), Member("broker_public")]  # its signing key
    embedded: bool  # whether it ends with the last run

    def client(self) -> OwnerClient:
        """Return a client of its owner."""
        return OwnerClient(self.owner_socket)


class Embedded:
    """The broker of one state home."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._record = home.broker / "serving.json"
        self._log = home.broker / "broker.log"
        self._lock = home.broker / "lock"
        # A child that is not waited for becomes a zombie, which some systems show as a living process.
        self._children: set[int] = set()

    @property
    def serving(self) -> Serving | None:
        """The broker that the record names, if its process lives."""
        try:
            found = Serving.from_json(Serving.known(read_state(self._record, what="broker record")))
        except (FormatError, UsageError):  # missing or damaged
            return None
        return found if self._lives(found) else None

    def ensure(self) -> Serving:
        """Return the broker once it answers, started if need be; raises `PeerError`: `broker-unreachable`."""
        with self.kept() as serving:
            return serving

    @contextlib.contextmanager
    def kept(self) -> Iterator[Serving]:
        """Return it as `ensure` does to who asks without a run: it is not stopped until the block ends."""
        private_folder(self._home.broker)
        with locked(self._lock, file=True):
            yield self._answering() or self._start()

    def give_back(self) -> bool:
        """Stop the broker if it is embedded and no run needs it; return whether it was stopped."""
        with locked(self._lock, file=True):
            serving = self.serving
            if serving is None or not serving.embedded or self.needed():
                return False
            self._stop(serving)
            return True

    @contextlib.contextmanager
    def announced(self, serving: Serving) -> Iterator[None]:
        """Record a broker that was started by other means until the block ends; raises `UsageError` beside another."""
        private_folder(self._home.broker)
        with locked(self._lock, file=True):
            self._refuse_second()
            write_state(self._record, serving.to_json())
        try:
            yield
        finally:
            with locked(self._lock, file=True):
                self._record.unlink(missing_ok=True)

    @contextlib.contextmanager
    def held_off(self) -> Iterator[None]:
        """Let no broker start until the block ends; raises `UsageError` when one serves, or a run needs it."""
        private_folder(self._home.broker)
        with locked(self._lock, file=True):
            self._refuse_second()
            if self.needed():
                why = f"a run still needs the broker of {self._home.path}"
                raise UsageError(Code.USAGE, why, hint="see: glasshouse status")
            yield

    def _refuse_second(self) -> None:
        if self.serving is not None:
            raise UsageError(Code.USAGE, f"a broker already serves {self._home.path}")

    def retire(self) -> bool:
        """Take the lock for good, as the broker's own process before it ends; return False if a run needs a broker.

        No other is started before that process is gone; a broker that is being started or stopped stays.
        """
        try:
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            return True  # the home is gone
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            needed = self.needed()
        except OSError:
            needed = True
        if needed:
            os.close(descriptor)
            return False
        serving = self.serving
        if serving is not None and serving.process == ProcessName.of():
            self._record.unlink(missing_ok=True)
        return True  # the lock stays held

    def needed(self) -> bool:
        """Return whether any run still needs the broker."""
        for folder in RunFolder.everywhere(self._home):
            with contextlib.suppress(UsageError):  # a damaged record belongs to no run that could still need it
                if folder.active():
                    return True
        return False

    def _answering(self) -> Serving | None:
        serving = self.serving
        if serving is None:
            return None
        try:
            client = serving.client()
            client.wait_ready(5.0)
            if client.broker_public() == serving.public:
                return serving
            reason = "answers with another key than it started with"
        except GlasshouseError as error:
            reason = f"does not answer ({error.message})"
        if not serving.embedded:
            raise PeerError(Code.BROKER_UNREACHABLE, f"the broker on {serving.owner_socket} {reason}")
        self._stop(serving)
        return None

    def _start(self) -> Serving:
        sockets = socket_folder(self._home)
        owner_socket = sockets / "owner.sock"
        child = spawn(
            "glasshouse.jobs.gates.embedded_broker",
            *(str(self._home.path), "--data", str(self._home.broker / "data"), "--store", str(self._home.store)),
            *("--runtime-bind", f"unix:{sockets / 'runtime.sock'}", "--owner-socket", str(owner_socket)),
            log=self._log,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        try:
            line = _ready_line(child)
            serving = Serving(
                process=ProcessName.of(child.pid),
                runtime_url=str(line["runtime_url"]),
                owner_socket=owner_socket,
                public=b64decode(str(line["broker_public"])),
                embedded=True,
            )
        except (KeyError, ValueError, GlasshouseError):
            child.kill()
            child.wait()
            hint = f"its log is {self._log}"
            raise PeerError(Code.BROKER_UNREACHABLE, "the embedded broker did not start", hint=hint) from None
        write_state(self._record, serving.to_json())
        self._children.add(child.pid)
        child.returncode = 0  # it may outlive this object and this process: `_reap` waits for it
        return serving

    def _stop(self, serving: Serving) -> None:
        serving.process.send(signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while self._lives(serving) and time.monotonic() < deadline:
            time.sleep(0.02)
        if self._lives(serving):
            serving.process.send(signal.SIGKILL)
        self._record.unlink(missing_ok=True)
        if serving.owner_socket.parent != self._home.broker:
            with contextlib.suppress(OSError):
                serving.owner_socket.parent.rmdir()

    def _lives(self, serving: Serving) -> bool:
        self._reap()
        return serving.process.alive

    def _reap(self) -> None:
        for pid in list(self._children):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    continue
            self._children.discard(pid)


def _ready_line(child: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Return the line that the broker prints when it is ready; raises ValueError."""
    assert child.stdout is not None  # noqa: S101 - asked for in `_start`
    deadline, read = time.monotonic() + START_TIMEOUT_S, b""
    with child.stdout as out:
        while b"\n" not in read:
            ready, _, _ = select.select([out], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(out.fileno(), 65536) if ready else b""
            if not data or len(read) > 65536:
                raise ValueError("no line of the broker")
            read += data
    line = json.loads(read.partition(b"\n")[0])
    if not isinstance(line, dict):
        raise ValueError("another line of the broker")
    return line


def audit_own(home: Home) -> list[Json]:
    """Return the verified audit log of this home's own broker, started if need be; raises as `audit_gate`."""
    broker, records = Embedded(home), list[Json]()
    try:
        with broker.kept() as serving:
            client = serving.client()
            while page := client.audit(len(records)):
                records += page
    finally:
        broker.give_back()
    verify_chain(records)
    return records
