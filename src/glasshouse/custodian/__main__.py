"""Becomes unreadable, then forks the process that holds the keys. Executed by its path:

    python -I -S -B -X pycache_prefix=EMPTY .../glasshouse/custodian/__main__.py AGENT_PID NAME=FILE...

Exec opens a process to others of its user (ptrace, /proc/PID/mem) until it closes itself, and a descriptor of its
memory that was opened meanwhile keeps reading. So the executed process makes no key: it becomes undumpable, forks once
and ends. Its child, whose memory could be opened at no time, goes on as `hold`.

Laws: nothing of Glasshouse is imported before that; a module is the standard library's, or of a package whose file the
agent named, as measured; every failure ends the process without a word.
"""

# What is imported here is compiled at every start, while this process can be read.
# ruff: noqa: PTH100, PTH118, PTH120, PTH123, PTH208
from __future__ import annotations

import ctypes
import os
import resource
import sys
import time
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from glasshouse.wire.crypto import RecipientKey

_PR_SET_PDEATHSIG, _PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 1, 3, 4
_SIGKILL = 9
_CAP_IPC_LOCK = 14
_MCL_CURRENT, _MCL_FUTURE, _MCL_ONFAULT = 1, 2, 4
# Below this, a process whose every page is locked would run out of memory in the middle of its work.
_LEAST_LOCKABLE_BYTES = 1 << 30
_REPARENTED_S = 0.001
_FIRST_INHERITED = 5  # above those of `glasshouse.custodian`

_libc = ctypes.CDLL(None)


class _NamedFiles:
    """Finds the packages whose files were named; no site directory is on the search path."""

    def __init__(self, files: dict[str, str]) -> None:
        self._files = files

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_file_location(name, self._files[name]) if name in self._files else None


def main(make_key: Callable[[], RecipientKey] | None = None) -> NoReturn:
    """Be the custodian, with the HPKE key that `make_key` makes; None for a fresh one."""
    status = 1
    try:
        agent, *named = sys.argv[1:]
        _withdraw(int(agent))
        _close_inherited()
        executed = os.getpid()
        if os.fork() == 0:
            while os.getppid() == executed:  # the end of a parent is signalled once: let that be the agent's
                time.sleep(_REPARENTED_S)
            _withdraw(int(agent))
            _refuse_tracer_and_lock()
            _find_named(named)
            from glasshouse.custodian import CONNECTION

            os.write(CONNECTION, os.getpid().to_bytes(4, "big"))
            from glasshouse.custodian import hold

            hold.serve(make_key or hold.RecipientKey.generate)
        status = 0
    finally:
        os._exit(status)  # without unwinding: no handler, buffer or exit hook runs where keys are


def _withdraw(agent: int) -> None:
    """Close this process to readers, and let it end with the agent."""
    if _prctl(_PR_SET_DUMPABLE, 0) or _prctl(_PR_GET_DUMPABLE) or _prctl(_PR_SET_PDEATHSIG, _SIGKILL):
        raise OSError("this process cannot be closed to others")
    if os.getppid() != agent:
        raise OSError("the agent has ended")


def _close_inherited() -> None:
    """Close what the agent was itself started with; also above a limit that was lowered after it was opened."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor >= _FIRST_INHERITED:
            try:
                os.close(descriptor)
            except OSError:
                continue  # the one that listed them


def _refuse_tracer_and_lock() -> None:
    """A tracer of the executed process may have followed the fork; a page that is not locked may reach a disk."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        status = dict(line.split(":", 1) for line in file)
    if int(status["TracerPid"]):
        raise OSError("this process is traced")
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = soft == resource.RLIM_INFINITY or int(status["CapEff"], 16) >> _CAP_IPC_LOCK & 1
    if unlimited or soft >= _LEAST_LOCKABLE_BYTES:
        # Where this fails, `memory-locked` and `no-swap` fail of the agent, whose limits these are.
        _libc.mlockall(_MCL_CURRENT | _MCL_FUTURE | _MCL_ONFAULT)


def _find_named(named: Sequence[str]) -> None:
    """Let this package, and those that the agent named, be found by their files."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    files = dict(one.split("=", 1) for one in named)
    sys.meta_path.insert(0, _NamedFiles({**files, "glasshouse": os.path.join(package, "__init__.py")}))


def _prctl(option: int, value: int = 0) -> int:
    return int(_libc.prctl(option, *(ctypes.c_ulong(word) for word in (value, 0, 0, 0))))


if __name__ == "__main__":
    main()
