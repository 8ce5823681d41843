"""This machine as a place whose runtimes find dstack's agent, and a gate that trusts that machine's maker.

The product pins Intel's root. Here it is replaced in each process that a story starts, by a program of the tests' own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from glasshouse.attestation.roots.tdx import tdx_evidence
from glasshouse.jobs.gates import embedded
from glasshouse.providers.place.local import LocalPlace, LocalPlaced
from glasshouse.runtime.roots.dstack import DstackCollector
from tools.machine_with_tpm import ProgramRun

__all__ = ["MachineWithDstack", "trusting"]

_AGENT = """
import sys
from glasshouse.runtime.roots.dstack import DstackCollector
DstackCollector.__init__.__defaults__ = {defaults!r}
from glasshouse.runtime.__main__ import main
sys.exit(main(sys.argv[1:], sys.stdin.buffer))
"""

_GATE = """
import sys
from glasshouse.attestation.roots.tdx import tdx_evidence
tdx_evidence.INTEL_ROOT_SHA256 = {root!r}
from glasshouse.jobs.gates.embedded_broker import main
sys.exit(main(sys.argv[1:]))
"""


class MachineWithDstack(LocalPlace):
    """Places runtimes that ask the agent at this socket."""

    def __init__(self, socket: Path) -> None:
        self.defaults = ((str(socket),),)

    def run(self, folder: Path, *, max_bytes: int | None = None, relayed: bool = False) -> LocalPlaced:
        placed = super().run(folder)
        placed._run = ProgramRun(folder, _AGENT.format(defaults=self.defaults))
        return placed


@contextmanager
def trusting(root_sha256: bytes, machine: MachineWithDstack) -> Iterator[None]:
    """Let this process, and the gates that it starts, trust a root in the place of Intel's, and find the machine."""

    def spawn(module: str, *arguments: str, log: Path, **streams: Any) -> subprocess.Popen[bytes]:
        assert module == "glasshouse.jobs.gates.embedded_broker"
        with log.open("ab") as errors:
            command = [sys.executable, "-I", "-c", _GATE.format(root=root_sha256), *arguments]
            return subprocess.Popen(command, stderr=errors, cwd="/", start_new_session=True, umask=0o077, **streams)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "spawn", spawn)
        patch.setattr(tdx_evidence, "INTEL_ROOT_SHA256", root_sha256)
        patch.setattr(DstackCollector.__init__, "__defaults__", machine.defaults)  # looked at before a run
        yield
