"""This machine as a place whose runtimes find an agent's socket, and a gate that trusts that machine's maker.

The product pins makers' roots. Here one is replaced in each process that a story starts, by a program of the tests.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from glasshouse.jobs.gates import embedded
from glasshouse.providers.place.local import LocalPlace, LocalPlaced
from tools.machine_with_tpm import ProgramRun

__all__ = ["MachineWithSocket", "trusting"]

_AGENT = """
import sys
from {module} import {name}
{name}.__init__.__defaults__ = {defaults!r}
from glasshouse.runtime.__main__ import main
sys.exit(main(sys.argv[1:], sys.stdin.buffer))
"""

_GATE = """
import sys
import {module}
{module}.{name} = {root!r}
from glasshouse.jobs.gates.embedded_broker import main
sys.exit(main(sys.argv[1:]))
"""


class MachineWithSocket(LocalPlace):
    """Places runtimes whose collector is made with other defaults.

    Args:
        collector: of the kind, whose defaults are paths of sockets.
    """

    def __init__(self, collector: type[Any], *defaults: object) -> None:
        self.collector, self.defaults = collector, defaults

    def run(self, folder: Path, *, max_bytes: int | None = None, relayed: bool = False) -> LocalPlaced:
        placed = super().run(folder)
        kind = self.collector
        agent = _AGENT.format(module=kind.__module__, name=kind.__name__, defaults=self.defaults)
        placed._run = ProgramRun(folder, agent)
        return placed


@contextmanager
def trusting(pinning: Any, name: str, root_sha256: bytes, machine: MachineWithSocket) -> Iterator[None]:
    """Let this process, and the gates that it starts, trust a root in the place of a maker's, and find the machine.

    Args:
        pinning, name: the module, and its name for the digest of the maker's root.
    """
    gate = _GATE.format(module=pinning.__name__, name=name, root=root_sha256)

    def spawn(module: str, *arguments: str, log: Path, **streams: Any) -> subprocess.Popen[bytes]:
        assert module == "glasshouse.jobs.gates.embedded_broker"
        with log.open("ab") as errors:
            command = [sys.executable, "-I", "-c", gate, *arguments]
            return subprocess.Popen(command, stderr=errors, cwd="/", start_new_session=True, umask=0o077, **streams)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "spawn", spawn)
        patch.setattr(pinning, name, root_sha256)
        patch.setattr(machine.collector.__init__, "__defaults__", machine.defaults)  # looked at before a run
        yield
