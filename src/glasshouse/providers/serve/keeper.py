"""Stays with one runtime on its machine, connected or not: ``python -m glasshouse.providers.serve.keeper``.

Arguments: the run's folder, then the runtime's command. Standard input is the runtime's, and what comes there goes to
it unread. One line of JSON on standard output reports whether it was started; the launch file is sent only then.

Where the folder's order names a gate, it carries the runtime's calls to that, with or without an owner's connection,
and starts what sends there what the run leaves (`providers.serve.storing`).

Laws: it leaves `keeper.json` before the runtime can have its launch file, and `ended` after its end; it ends with the
runtime and no sooner; where it cannot do so, no runtime is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from glasshouse.providers.serve.keepers import ENDED, KEEPER, LOG, boot, listening, relay_of, started_ticks

# The runtime sees these of the environment and no others.
_PASSED = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "TZ")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def main(arguments: list[str]) -> int:
    """Start a runtime, wait for its end and say how it ended; return 0 unless it could not be started."""
    folder, command = Path(arguments[0]), arguments[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # ignored here, and as it was in what this executes
    runtime: subprocess.Popen[bytes] | None = None
    listener: socket.socket | None = None
    try:
        relay = relay_of(folder)
        listener = None if relay is None else listening(Path(relay["socket"]))
        log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        runtime = subprocess.Popen(
            command, stdin=0, stdout=log, stderr=log, cwd="/", env=_environment(), start_new_session=True, umask=0o077
        )
        ours = {"boot": boot(), "pid": os.getpid(), "runtime": runtime.pid, "started": started_ticks(os.getpid())}
        began = started_ticks(runtime.pid) or 0  # it may have ended already
        _leave(folder / KEEPER, json.dumps(ours | {"runtime_started": began}))
    except OSError as error:
        if runtime is not None:
            runtime.kill()
            runtime.wait()
        _say({"error": error.strerror})
        return 1
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    _say({"pid": runtime.pid})
    os.dup2(null, 1)
    if listener is not None and relay is not None:
        _carry(listener, relay)
        if relay.get("store"):
            _store(folder)
    ended = runtime.wait()
    if listener is not None:
        with contextlib.suppress(OSError):
            Path(listener.getsockname()).unlink()
    _leave(folder / ENDED, str(ended))
    return 0


def _carry(listener: socket.socket, relay: dict[str, Any]) -> None:
    """Carry calls from now on, on threads of their own; TLS is loaded where it is needed."""
    from glasshouse.providers.protocol.line import GateLine, Relay

    Relay(listener, GateLine(url=relay["url"], certificate=relay["certificate"]))


def _store(folder: Path) -> None:
    """Have what the run leaves sent to its gate, by a process that may outlast this one; a run does not wait for it."""
    with contextlib.suppress(OSError):
        command = [sys.executable, "-I", "-B", "-m", "glasshouse.providers.serve.storing", str(folder)]
        subprocess.Popen(command, stdin=0, stdout=1, stderr=1, cwd="/", start_new_session=True, umask=0o077)


def _environment() -> dict[str, str]:
    passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
    return {"LANG": "C.UTF-8", "PATH": _PATH} | passed


def _leave(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.part")
    partial.write_text(text)
    partial.rename(path)


def _say(line: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # who asked is gone: then no launch file comes, and the runtime ends by itself
        os.write(1, json.dumps(line).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
