"""The head of an owner's audit log, signed by the gate: who keeps one notices when the log is another later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from glasshouse.wire import dsse
from glasshouse.wire.record import Sha256, octets

AUDIT_HEAD_TYPE = "application/vnd.glasshouse.audit-head+json"


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditHead(dsse.Signed, name="audit head", max_bytes=2048, payload_type=AUDIT_HEAD_TYPE):
    """Where an owner's audit log ends, signed by the gate."""

    owner: Annotated[bytes, octets(32)]  # whose log it is, their public signing key
    records: int  # how many it has
    sha256: Sha256  # the hash of the last one, or 32 zero bytes
    time_us: int  # when the gate signed this
