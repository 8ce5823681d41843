"""The worker's session, by which all that it started is found where no process namespace ends that with it.

The worker begins a session, and there its filter lets nothing leave it, whatever program it becomes: unlike a command
line, this stays. Elsewhere the session is that of the first process of its namespace, which has ended when all others
have. The record of it lies in the run's folder while the worker lives, for a search after the runtime was killed. It is
one line of ASCII: the session's number, when its first process began (clock ticks since boot), and where both hold,
the boot and the process namespace.
"""

# pathlib costs 30 ms at every start, when nothing is compiled beforehand.
# ruff: noqa: PTH115, PTH123, PTH208
from __future__ import annotations

import errno
import os
from dataclasses import dataclass

NAME = ".worker"
_BOOT, _NAMESPACE = "/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"
_UNKNOWN = "-"  # some containers show less of /proc than others


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A process, as /proc shows it."""

    # whether it still holds anything. One whose first thread has ended reads as a zombie, without a command line,
    # whatever its other threads do
    lives: bool
    session: int  # its session's number
    started: int  # when it began, in clock ticks

    @classmethod
    def parse(cls, stat: bytes) -> Process:
        """Read the content of /proc/PID/stat (proc_pid_stat(5))."""
        # The command in parentheses may hold spaces and parentheses of its own.
        fields = stat.rpartition(b") ")[2].split()
        state, threads = fields[0], int(fields[17])
        return cls(lives=state not in (b"Z", b"X") or threads > 1, session=int(fields[3]), started=int(fields[19]))

    @classmethod
    def of(cls, pid: int) -> Process:
        """Read a process; raises `OSError` where there is none, or it cannot be read."""
        with open(f"/proc/{pid}/stat", "rb") as file:
            return cls.parse(file.read())


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionRecord:
    """A session that was there once."""

    session: int  # its number, which was its first process's
    started: int  # when that process began, in clock ticks
    boot: str  # of the machine, and the namespace of processes, in which both are so
    namespace: str

    @classmethod
    def of(cls, pid: int) -> SessionRecord:
        """Name the session that a process has begun; raises `OSError` where that cannot be read."""
        return cls(session=pid, started=Process.of(pid).started, boot=_boot(), namespace=_namespace())

    def to_line(self) -> bytes:
        """Return the record as one line."""
        return f"{self.session} {self.started} {self.boot} {self.namespace}\n".encode("ascii")

    @classmethod
    def from_line(cls, line: bytes) -> SessionRecord:
        """Inverse of `to_line`; raises `ValueError` for anything else."""
        session, started, boot, namespace = line.decode("ascii").split()
        return cls(session=int(session), started=int(started), boot=boot, namespace=namespace)

    def survivors(self) -> list[int] | None:
        """Return the processes that are still in it; None where that cannot be seen from here.

        A number is free for another session once the last process of this one is gone. One that got it is recognized by
        when its first process began, while that lives; later its processes are taken for ours.
        """
        try:
            boot, namespace = _boot(), _namespace()
            # A container may have an id of its own, and the namespace of its processes is another then too.
            if self.namespace != namespace or namespace == _UNKNOWN:
                return None
            if self.boot != boot:
                return None if _UNKNOWN in (self.boot, boot) else []
            found = members(self.session)
            if not found and _is_hidden(self.session):
                return None
        except OSError:
            return None
        if found.get(self.session, self.started) != self.started:
            return []
        return sorted(pid for pid, started in found.items() if started >= self.started)


def members(session: int) -> dict[int, int]:
    """Return the processes of a session, that hold anything, each with when it began, in clock ticks.

    Raises `OSError`: the system does not list what runs, or a process that runs cannot be read.
    """
    found: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            process = Process.of(int(name))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESRCH):
                continue  # it has ended
            raise
        if process.session == session and process.lives:
            found[int(name)] = process.started
    return found


def _is_hidden(session: int) -> bool:
    """Return whether a process or group of that number is there, and /proc does not show it to this process."""
    # `hidepid` hides a process that is not dumpable from others of its user, and answers to signals as ever.
    for ask in (os.kill, os.killpg):
        try:
            ask(session, 0)
        except ProcessLookupError:
            continue
        except PermissionError:
            pass
        if not os.path.exists(f"/proc/{session}"):  # noqa: PTH110 - pathlib is slow to import
            return True
    return False


def _boot() -> str:
    try:
        with open(_BOOT) as file:
            return file.read().strip()
    except OSError:
        return _UNKNOWN


def _namespace() -> str:
    try:
        return os.readlink(_NAMESPACE)
    except OSError:
        return _UNKNOWN
