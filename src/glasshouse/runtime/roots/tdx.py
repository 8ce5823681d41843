"""Collects the evidence of kind `tdx`: a quote, by the kernel's report folder."""

from __future__ import annotations

from pathlib import Path

from glasshouse.attestation.roots.binding import Bound
from glasshouse.runtime.roots.tsm_reports import TSM_FOLDER, TsmReports
from glasshouse.wire.canonical import b64encode, encode

_REPORTS = {4: 48 + 584, 5: 54 + 648}  # where the length of what follows stands, by the quote's version
_TYPE_10 = b"\x02\x00"


def without_padding(quote: bytes) -> bytes:
    """Return a quote without the zeros that fill its buffer, which its own length leaves out."""
    at = _REPORTS.get(int.from_bytes(quote[:2], "little"), len(quote))
    if quote[:2] == b"\x05\x00" and quote[48:50] == _TYPE_10:
        at -= 64
    end = at + 4 + int.from_bytes(quote[at : at + 4], "little")
    return quote if quote[end:].strip(b"\x00") else quote[:end]


class TdxCollector:
    """Asks Linux for a quote.

    Args:
        folder: of configfs-tsm.
        device: what a guest of TDX has.
    """

    kind = "tdx"

    def __init__(self, folder: Path = TSM_FOLDER, device: Path = Path("/dev/tdx_guest")) -> None:
        self._device, self._reports = device, TsmReports("tdx_guest", folder)

    def look(self) -> str:
        """Say what is missing."""
        if not self._device.exists():
            return "this machine is no guest of Intel TDX"
        return "" if self._reports.offered() else "the kernel has no folder for reports (configfs-tsm, from 6.7)"

    def prepare(self) -> None:
        """Make the run's entry; raises `PlatformError`."""
        self._reports.open()

    def collect(self, *, bound: Bound, credential: bytes | None) -> bytes:
        """Return the blob; raises `PlatformError`."""
        del credential
        quote, _ = self._reports.report(bound.report_data)
        return encode({"quote": b64encode(without_padding(quote))})

    def close(self) -> None:
        """Remove the entry."""
        self._reports.close()
