"""What the evidence of a confidential VM of Azure is made of, as it travels.

Source: spec/hardware-evidence.md, section 7.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from glasshouse.attestation.roots.kinds import MAX_BLOB_BYTES
from glasshouse.attestation.roots.sev_snp.sev_snp_blob import MAX_CERTIFICATE_BYTES, REPORT_BYTES
from glasshouse.wire.record import Record, digest, items, octets

MAX_RUNTIME_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class AzureBlob(Record, name="azure", max_bytes=MAX_BLOB_BYTES):
    """The blob; `parse` checks no signature."""

    certificate: Annotated[bytes, octets(max_length=MAX_CERTIFICATE_BYTES)]  # of the VCEK, DER
    pcrs: Annotated[tuple[bytes, ...], items(24, digest())]
    quote: Annotated[bytes, octets(max_length=1024)]  # TPMS_ATTEST
    report: Annotated[bytes, octets(REPORT_BYTES)]
    runtime: Annotated[bytes, octets(max_length=MAX_RUNTIME_BYTES)]  # what the report is about, JSON of Microsoft's
    signature: Annotated[bytes, octets(max_length=1024)]  # TPMT_SIGNATURE
