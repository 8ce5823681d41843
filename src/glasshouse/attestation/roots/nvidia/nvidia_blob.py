"""The blob of the kind `nvidia`: a report of each GPU and switch, and their certificates in one table.

Source: spec/hardware-evidence.md, section 7.5.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from glasshouse.attestation.roots.kinds import MAX_BLOB_BYTES
from glasshouse.attestation.roots.nvidia.nvidia_policy import MAX_GPUS, MAX_SWITCHES
from glasshouse.errors import Code, FormatError
from glasshouse.wire.record import Record, integer, items, octets

MAX_CERTIFICATES = 256
CHAIN_LENGTH = 5  # of a device: its report's key, itself, its provisioner, its family, the root


class GpuMode(StrEnum):
    """What protects the GPUs' memory and links, as the driver says it, and each GPU's report."""

    OFF = "off"
    SPT = "spt"  # each GPU by itself
    MPT = "mpt"  # with encrypted links between them
    PPCIE = "ppcie"  # with switches between them that are locked and give evidence


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceReport(Record, name="nvidia.report"):
    """One GPU or switch."""

    # Places in the table: the certificate of the report's key, then each one's issuer.
    chain: Annotated[tuple[int, ...], items(CHAIN_LENGTH, integer(0, MAX_CERTIFICATES - 1), min_items=CHAIN_LENGTH)]
    report: Annotated[bytes, octets(max_length=8192)]  # SPDM GET_MEASUREMENTS, request and response


@dataclass(frozen=True, kw_only=True, slots=True)
class NvidiaBlob(Record, name="nvidia", max_bytes=MAX_BLOB_BYTES, max_elements=4096):
    """The blob.

    Law: one evidence has one form: each certificate is in the table once, where it is first used.
    """

    certificates: Annotated[tuple[bytes, ...], items(MAX_CERTIFICATES, octets(max_length=4096))]  # DER
    devtools: bool  # of the driver
    gpus: Annotated[tuple[DeviceReport, ...], items(MAX_GPUS, min_items=1)]
    mode: GpuMode  # of the driver
    switches: Annotated[tuple[DeviceReport, ...], items(MAX_SWITCHES)]

    def __post_init__(self) -> None:
        used = dict.fromkeys(place for device in (*self.gpus, *self.switches) for place in device.chain)
        if list(used) != list(range(len(self.certificates))) or len(set(self.certificates)) < len(self.certificates):
            raise FormatError(Code.SCHEMA, "nvidia.certificates is not in the order of its first uses, each once")

    @classmethod
    def of(
        cls,
        *,
        devtools: bool,
        mode: GpuMode,
        gpus: Iterable[tuple[bytes, Iterable[bytes]]],
        switches: Iterable[tuple[bytes, Iterable[bytes]]] = (),
    ) -> NvidiaBlob:
        """Make the blob.

        Args:
            gpus, switches: of each its report, and its certificates, the report's key first.

        Raises:
            FormatError: `schema-invalid` where two certificates of a chain are the same.
        """
        table: dict[bytes, int] = {}

        def listed(devices: Iterable[tuple[bytes, Iterable[bytes]]]) -> tuple[DeviceReport, ...]:
            return tuple(
                DeviceReport(report=report, chain=tuple(table.setdefault(one, len(table)) for one in chain))
                for report, chain in devices
            )

        reports = listed(gpus), listed(switches)
        return cls(certificates=tuple(table), devtools=devtools, gpus=reports[0], mode=mode, switches=reports[1])
