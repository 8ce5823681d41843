"""Public reports of AMD SEV-SNP: files `report` (or its hexadecimal), `certificate`; `bound` is the report data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.collateral import Pack
from glasshouse.attestation.roots.sev_snp.sev_snp_blob import REPORT_BYTES, SevSnpBlob
from glasshouse.attestation.roots.sev_snp.sev_snp_evidence import appraise
from tools.hardware_cases import HardwareCase


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundReport(Bound):
    """Report data that another verifier asked for."""

    own: bytes

    @property
    def report_data(self) -> bytes:
        """That data."""
        return self.own


def appraise_public(case: HardwareCase, files: Mapping[str, bytes], pack: Pack) -> object:
    """Appraise a report; raises `CheckFailedError`."""
    report = files["report"]
    if len(report) >= 2 * REPORT_BYTES:
        report = bytes.fromhex(report.decode())
    return appraise(
        SevSnpBlob(certificate=files["certificate"], report=report).encode(),
        bound=BoundReport(composite=bytes(32), own=case.bound or bytes(64)),
        now_us=case.now_us,
        collateral=pack,
        policy=case.policy,
    )
