"""Appraise a report of SEV-SNP: whose chip, which firmware, how the machine was launched, and what for.

Source: spec/hardware-evidence.md, section 7.2, in the order of its checks.
"""

from __future__ import annotations

from collections.abc import Sequence

from cryptography.exceptions import InvalidSignature

from glasshouse.attestation.roots.appraised import Appraised
from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.collateral import Pack
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.attestation.roots.sev_snp.amd_keys import PINNED, Product
from glasshouse.attestation.roots.sev_snp.amd_list import check_revocation
from glasshouse.attestation.roots.sev_snp.sev_snp_blob import SevSnpBlob
from glasshouse.attestation.roots.sev_snp.sev_snp_policy import SevSnpPolicy
from glasshouse.attestation.roots.sev_snp.snp_checks import (
    check_chip,
    check_firmware,
    check_guest,
    check_references,
    refused,
)
from glasshouse.attestation.roots.sev_snp.snp_report import SnpReport
from glasshouse.attestation.roots.sev_snp.vek_certificate import VekCertificate
from glasshouse.errors import Code, FormatError
from glasshouse.wire.canonical import Json

VECTOR = {"hardware": 2, "instance-identity": 2, "runtime-opaque": 2}


def appraise(blob: bytes, *, bound: Bound, now_us: int, collateral: Pack, policy: HardwarePolicy) -> Appraised:
    """Appraise the blob of kind `sev-snp`; see `root_table.Appraise`."""
    if policy.sev_snp is None:
        raise refused(Code.CHAIN_MISSING, "the policy names no sev-snp")
    try:
        evidence = SevSnpBlob.parse(blob)
    except FormatError as error:
        raise refused(Code.HARDWARE_MALFORMED, f"the evidence of SEV-SNP: {error.message}") from None
    return appraise_report(
        evidence.report,
        evidence.certificate,
        report_data=bound.report_data,
        now_us=now_us,
        collateral=collateral,
        policy=policy.sev_snp,
    )


def appraise_report(
    data: bytes,
    certificate: bytes,
    *,
    report_data: bytes,
    unbound: Code = Code.HARDWARE_BINDING,
    now_us: int,
    collateral: Pack,
    policy: SevSnpPolicy,
    roots: Sequence[Product] = PINNED,
) -> Appraised:
    """Appraise a report and the certificate of its key.

    Args:
        report_data: what the report has to carry, 64 bytes.
        unbound: the code where it carries anything else.

    Raises:
        CheckFailedError: of the checks of 7.2 from the second on.
    """
    try:
        report = SnpReport.parse(data)
    except FormatError as error:
        raise refused(Code.SNP_REPORT, error.message) from None
    vek, ends_us = _check_certificate(certificate, report, policy, now_us, roots)
    product = vek.root
    try:
        report.check_signature(vek.key)
    except InvalidSignature:
        raise refused(Code.HARDWARE_SIGNATURE, "a report that its key did not sign") from None
    check_chip(report, vek, product.name, policy)
    check_guest(report, policy)
    check_firmware(report, vek, product.name, policy)
    check_references(report, policy)
    if report.report_data != report_data:
        raise refused(unbound, "a report made for other data", report_data, report.report_data)
    list_ends_us = check_revocation(collateral, product, serials=(vek.issuer.serial, vek.serial), now_us=now_us)
    claims: dict[str, Json] = {
        "chip": report.chip[:8].hex(),
        "firmware": ".".join(map(str, report.committed)),
        "guest_svn": report.guest_svn,
        "key": f"VLEK of {vek.csp}" if vek.is_vlek else "VCEK",
        "measurement": report.measurement.hex(),
        "product": product.name,
        "tcb": dict(vek.tcb),
        "vmpl": report.vmpl,
    }
    return Appraised(vector=VECTOR, not_after_us=min(ends_us, list_ends_us), claims=claims)


def _check_certificate(
    data: bytes, report: SnpReport, policy: SevSnpPolicy, now_us: int, roots: Sequence[Product]
) -> tuple[VekCertificate, int]:
    """Check that the certificate counts for this report's key; return it, and when one of its path ends."""
    try:
        vek = VekCertificate.parse(data, roots)
    except FormatError as error:
        raise refused(Code.HARDWARE_CERTIFICATE, error.message) from None
    if vek.is_vlek != report.is_vlek:
        raise refused(Code.HARDWARE_CERTIFICATE, "a certificate of another key than the one that the report names")
    ends_us = min(vek.ends_us, 1_000_000 * vek.issuer.ends_s, 1_000_000 * vek.root.ark.ends_s)
    if not vek.starts_us <= now_us < ends_us:
        times = f"from {vek.starts_us} to {ends_us} µs"
        raise refused(Code.HARDWARE_CERTIFICATE, "a certificate of another time", times, f"{now_us} µs")
    if vek.is_vlek and vek.csp not in policy.csps:
        raise refused(Code.HARDWARE_CERTIFICATE, "a key of a cloud that is not listed", policy.csps, vek.csp)
    return vek, ends_us
