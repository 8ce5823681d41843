"""Reports of a processor by way of Linux: a folder of configfs-tsm, which takes report data and gives the report.

Source: Documentation/ABI/testing/configfs-tsm-report of the kernel, from 6.7.
"""

from __future__ import annotations

import os
from pathlib import Path

from glasshouse.runtime.roots.collectors import unavailable, why_of

TSM_FOLDER = Path("/sys/kernel/config/tsm/report")
_MAX_BYTES = 256 * 1024


class TsmReports:
    """An entry of the folder, made by `open` and removed by `close`.

    Args:
        provider: what the kernel calls the processor's driver.
        entry: the entry's name; two runs of one machine have two.
    """

    def __init__(self, provider: str, folder: Path = TSM_FOLDER, entry: str = "") -> None:
        self._provider, self._folder = provider, folder
        self._entry = folder / (entry or f"glasshouse-{os.getpid()}")

    def offered(self) -> bool:
        """Whether this kernel has the folder; which processor is behind it shows in an entry alone."""
        return self._folder.is_dir()

    def open(self) -> None:
        """Make the entry; raises `PlatformError`."""
        try:
            self._entry.mkdir(exist_ok=True)  # one that a killed run left is as good
            provider = (self._entry / "provider").read_text(errors="replace").strip()
            floor = self._entry / "privlevel_floor"
            if floor.exists():  # beneath a supervisor a machine may ask for its own level alone
                (self._entry / "privlevel").write_text(floor.read_text())
        except OSError as error:
            raise unavailable(f"the kernel's report folder cannot be used: {why_of(error)}") from None
        if provider != self._provider:
            self.close()
            raise unavailable(f"the kernel's reports are not of {self._provider}")

    def report(self, report_data: bytes, *, aux: bool = False) -> tuple[bytes, bytes]:
        """Return the report for this data, and what stands beside it: certificates.

        Args:
            report_data: 64 bytes.
            aux: whether the second is wanted; empty else, and where the host gives none.

        Raises:
            PlatformError: `hardware-unavailable`, also where another process used the entry meanwhile.
        """
        try:
            before = self._generation()
            # Each file is opened anew: the kernel writes at the close of one, and fills another at its first read.
            with (self._entry / "inblob").open("wb", buffering=0) as file:
                file.write(report_data)
            found = self._read("outblob"), self._read("auxblob") if aux else b""
            after = self._generation()
        except OSError as error:
            raise unavailable(f"the processor gave no report: {why_of(error)}") from None
        except ValueError:
            raise unavailable("the processor gave no report: the kernel counts none") from None
        if after != before + 1:
            raise unavailable("another process used this run's entry for reports")
        return found

    def close(self) -> None:
        """Remove the entry; may be called twice."""
        try:
            self._entry.rmdir()
        except OSError:
            return  # what another removed, or a kernel that goes down

    def _read(self, name: str) -> bytes:
        with (self._entry / name).open("rb", buffering=0) as file:
            parts = []
            while part := file.read(_MAX_BYTES):
                parts.append(part)
                if sum(map(len, parts)) > _MAX_BYTES:
                    raise unavailable(f"the kernel's {name} is too large")
            return b"".join(parts)

    def _generation(self) -> int:
        return int((self._entry / "generation").read_text())
