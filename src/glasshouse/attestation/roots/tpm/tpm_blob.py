"""What a TPM's evidence is made of, as it travels.

Source: spec/hardware-evidence.md, section 7.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from glasshouse.attestation.roots.kinds import MAX_BLOB_BYTES
from glasshouse.attestation.roots.tpm.tpm_policy import QUOTED_PCRS
from glasshouse.wire.record import LEFT_OUT, Record, digest, items, octets

MAX_LOG_BYTES = 128 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class TpmBlob(Record, name="tpm", max_bytes=MAX_BLOB_BYTES):
    """The blob; `parse` checks no signature."""

    activation: Annotated[bytes | None, octets(32), LEFT_OUT] = None  # left out where the policy lists the key
    ak: Annotated[bytes, octets(max_length=1024)]  # TPMT_PUBLIC
    ek: Annotated[bytes, octets(max_length=4096), LEFT_OUT] = b""  # certificates, DER; left out where there is none
    log: Annotated[bytes, octets(max_length=MAX_LOG_BYTES), LEFT_OUT] = b""  # the firmware's
    pcrs: Annotated[tuple[bytes, ...], items(len(QUOTED_PCRS), digest(), min_items=len(QUOTED_PCRS))]
    quote: Annotated[bytes, octets(max_length=1024)]  # TPMS_ATTEST
    signature: Annotated[bytes, octets(max_length=1024)]  # TPMT_SIGNATURE
