"""What the evidence of SEV-SNP is made of, as it travels.

Source: spec/hardware-evidence.md, section 7.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from glasshouse.attestation.roots.kinds import MAX_BLOB_BYTES
from glasshouse.wire.record import Record, octets

REPORT_BYTES = 1184
MAX_CERTIFICATE_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class SevSnpBlob(Record, name="sev-snp", max_bytes=MAX_BLOB_BYTES):
    """The blob; `parse` checks no signature."""

    certificate: Annotated[bytes, octets(max_length=MAX_CERTIFICATE_BYTES)]  # of the VCEK or VLEK, DER
    report: Annotated[bytes, octets(REPORT_BYTES)]
