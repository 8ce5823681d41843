"""Collect a report of AMD SEV-SNP and the certificate of its key, which the host keeps.

Source: spec/hardware-evidence.md, section 7.2; include/uapi/linux/sev-guest.h; AMD, GHCB (56421).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from pathlib import Path

from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.sev_snp.sev_snp_blob import MAX_CERTIFICATE_BYTES, REPORT_BYTES, SevSnpBlob
from glasshouse.attestation.roots.sev_snp.snp_products import parts_of, product_of
from glasshouse.runtime.roots.collectors import unavailable, why_of
from glasshouse.runtime.roots.tsm_reports import TsmReports

_GUIDS = (bytes.fromhex("63da758de6644564adc5f4b93be8accd"), bytes.fromhex("a8074bc2a25a483eaae639c045a0b8a1"))
_GET_EXTENDED = 0xC0205302  # _IOWR('S', 2, 32 bytes)
_ANSWER_BYTES, _REPORT_AT = 4000, 32
_TABLE_BYTES = 64 * 1024
_KEPT = "/etc/glasshouse/vcek"
_KEY_SERVER = "https://kdsintf.amd.com/vcek/v1"
_PARTS = {"fmc": "fmcSPL", "bootloader": "blSPL", "tee": "teeSPL", "snp": "snpSPL", "microcode": "ucodeSPL"}
_NO_CERTIFICATE = "the host gives no certificate of its chip's key"


class SevSnpCollector:
    """The collecting half of the kind `sev-snp`.

    Args:
        device: of the guest's driver; its own commands are used where the kernel has no folder for reports.
        reports: that folder.
        kept: of certificates for hosts that give none, each under the name that `named_vcek` gives.
    """

    kind = "sev-snp"

    def __init__(self, device: str = "/dev/sev-guest", reports: TsmReports | None = None, kept: str = _KEPT) -> None:
        self._device = Path(device)
        self._reports = reports or TsmReports("sev_guest")
        self._kept = Path(kept)

    def look(self) -> str:
        """See `Collector`."""
        return "" if self._device.exists() else f"this is no machine on AMD SEV-SNP: no {self._device}"

    def prepare(self) -> None:
        """See `Collector`."""
        if self._reports.offered():
            self._reports.open()

    def collect(self, *, bound: Bound, credential: bytes | None) -> bytes:
        """See `Collector`."""
        del credential
        if self._reports.offered():
            report, table = self._reports.report(bound.report_data, aux=True)
        else:
            report, table = self._ask_device(bound.report_data)
        if len(report) != REPORT_BYTES:
            raise unavailable(f"the processor gave a report of {len(report)} bytes")
        is_vlek = bool(report[0x48] >> 2 & 7)
        certificate = certificate_of(table, is_vlek=is_vlek) or self._kept_certificate(report, is_vlek)
        return SevSnpBlob(certificate=certificate, report=report).encode()

    def close(self) -> None:
        """See `Collector`."""
        self._reports.close()

    def _kept_certificate(self, report: bytes, is_vlek: bool) -> bytes:
        if is_vlek:
            raise unavailable(f"{_NO_CERTIFICATE}, a VLEK, which its cloud alone has")
        name, url = named_vcek(report)
        try:
            with (self._kept / name).open("rb") as file:
                found = file.read(MAX_CERTIFICATE_BYTES + 1)
        except OSError:
            raise unavailable(f"{_NO_CERTIFICATE}: fetch {url} into {self._kept / name}") from None
        if len(found) > MAX_CERTIFICATE_BYTES:
            raise unavailable(f"{self._kept / name} is too large for a certificate")
        return found

    def _ask_device(self, report_data: bytes) -> tuple[bytes, bytes]:
        table, answer = ctypes.create_string_buffer(_TABLE_BYTES), ctypes.create_string_buffer(_ANSWER_BYTES)
        asked = report_data.ljust(96, b"\0") + struct.pack("=QI4x", ctypes.addressof(table), _TABLE_BYTES)
        request = ctypes.create_string_buffer(asked, len(asked))
        message = struct.pack("=B7xQQQ", 1, ctypes.addressof(request), ctypes.addressof(answer), 0)
        try:
            file = os.open(self._device, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(file, _GET_EXTENDED, bytearray(message))
            finally:
                os.close(file)
        except OSError as error:
            raise unavailable(f"the processor gave no report: {why_of(error)}") from None
        status, length = struct.unpack_from("<II", answer)
        if status or length != REPORT_BYTES:
            raise unavailable(f"the processor refused a report with {status:#x}")
        return answer.raw[_REPORT_AT : _REPORT_AT + length], table.raw


def certificate_of(table: bytes, *, is_vlek: bool) -> bytes:
    """Return the certificate of a report's key from the host's table; empty where it has none."""
    for at in range(0, len(table) - 23, 24):
        start, length = struct.unpack_from("<II", table, at + 16)
        if not any(table[at : at + 24]):
            break
        if table[at : at + 16] == _GUIDS[is_vlek]:
            found = table[start : start + length]
            if 0 < len(found) == length <= MAX_CERTIFICATE_BYTES:
                return found
    return b""


def named_vcek(report: bytes) -> tuple[str, str]:
    """Return the file name of the certificate of a chip's key, and where AMD publishes it.

    Chip and firmware are both in the name, so that after an update the old one is not taken for the new one's.

    Raises:
        PlatformError: where the report does not say what the certificate is of.
    """
    product, tcb, chip = product_of(report[0x188], report[0x189]), report[0x180:0x188], report[0x1A0:0x1E0]
    if not product or not any(chip):  # masked, or of version 2, which no gate takes
        raise unavailable(f"{_NO_CERTIFICATE}, and the report does not name the chip: its operator has to load it")
    chip = chip[: 8 if product == "Turin" else 64]
    parts = parts_of(product)
    versions = "&".join(f"{_PARTS[part]}={tcb[parts[part]]:02}" for part in _PARTS if part in parts)
    return f"{chip[:8].hex()}-{tcb.hex()}.der", f"{_KEY_SERVER}/{product}/{chip.hex()}?{versions}"
