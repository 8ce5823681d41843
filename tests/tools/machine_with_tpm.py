"""This machine as a place whose runtimes have a software TPM, which it does not have itself."""

from __future__ import annotations

from pathlib import Path

from glasshouse.providers.place.local import LocalPlace, LocalPlaced
from glasshouse.providers.protocol.order import Order
from glasshouse.providers.serve.runs import Run
from glasshouse.runtime.roots.tpm import TpmCollector
from tools.software_tpm import SoftwareTpm

__all__ = ["MachineWithTpm", "ProgramRun"]

_PROGRAM = """
import sys
from glasshouse.runtime.roots.tpm import TpmCollector
TpmCollector.__init__.__defaults__ = {defaults!r}
from glasshouse.runtime.__main__ import main
sys.exit(main(sys.argv[1:], sys.stdin.buffer))
"""


class MachineWithTpm(LocalPlace):
    """Places runtimes that take the TPM's socket for the device."""

    def __init__(self, tpm: SoftwareTpm) -> None:
        self.defaults = (tpm.path, tpm.log)
        assert len(TpmCollector.__init__.__defaults__ or ()) == len(self.defaults)

    def run(self, folder: Path, *, max_bytes: int | None = None, relayed: bool = False) -> LocalPlaced:
        placed = super().run(folder)
        placed._run = ProgramRun(folder, _PROGRAM.format(defaults=self.defaults))
        return placed


class ProgramRun(Run):
    """A run whose agent is started by a program of the tests' own."""

    def __init__(self, folder: Path, program: str) -> None:
        super().__init__(folder)
        self._program = program

    def _command(self, order: Order, package: Path) -> list[str]:
        words = super()._command(order, package)
        at = words.index("-m")
        return [*words[:at], "-c", self._program, *words[at + 2 :]]
