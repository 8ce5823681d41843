"""Appraise a report of SEV-SNP: whose chip, which firmware, how the machine was launched, and what for.

Source: spec/hardware-evidence.md, section 7.2, in the order of its checks.
"""

from __future__ import annotations

from collections.abc import Sequence

from glasshouse.attestation.refusal import utc
from glasshouse.attestation.roots.appraised import Appraised
from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.collateral import Pack
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.attestation.roots.refusing import refusal, refused, require
from glasshouse.attestation.roots.sev_snp.amd_certificates import VekCertificate, check_revocation
from glasshouse.attestation.roots.sev_snp.amd_keys import PINNED, Product
from glasshouse.attestation.roots.sev_snp.sev_snp_blob import SevSnpBlob
from glasshouse.attestation.roots.sev_snp.sev_snp_policy import GUEST_BITS, SevSnpPolicy, version_of
from glasshouse.attestation.roots.sev_snp.snp_products import parts_of, product_of
from glasshouse.attestation.roots.sev_snp.snp_report import SnpReport
from glasshouse.errors import Code

_DEBUG, _SMT, _ALIAS_CHECKED = 1 << 19, 1 << 16, 1 << 5
_DENIED = {1 << 18: "a migration agent", 1 << 21: "memory behind CXL"}
VECTOR = {"hardware": 2, "instance-identity": 2, "runtime-opaque": 2}


def appraise(blob: bytes, *, bound: Bound, now_us: int, collateral: Pack, policy: HardwarePolicy) -> Appraised:
    """Appraise the blob of kind `sev-snp`; see `root_table.Appraise`."""
    if policy.sev_snp is None:
        raise refusal(Code.CHAIN_MISSING, "the policy names no sev-snp")
    with refused(Code.HARDWARE_MALFORMED, "the evidence of SEV-SNP"):
        evidence = SevSnpBlob.parse(blob)
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
    with refused(Code.SNP_REPORT, "the report"):
        report = SnpReport.parse(data)
    with refused(Code.HARDWARE_CERTIFICATE, "a certificate"):
        vek = VekCertificate.parse(certificate, roots)
        require(vek.is_vlek == report.is_vlek, "of another key than the one that the report names")
    if not vek.starts_us <= now_us < vek.ends_us:
        times = f"from {utc(vek.starts_us)} to {utc(vek.ends_us)}"
        what = "a certificate that is not of this time by the verifier's clock"
        raise refusal(Code.HARDWARE_CERTIFICATE, what, times, utc(now_us))
    if vek.is_vlek and vek.csp not in policy.csps:
        raise refusal(Code.HARDWARE_CERTIFICATE, "a key of a cloud that is not listed", policy.csps, vek.csp)
    with refused(Code.HARDWARE_SIGNATURE, "a report that its key did not sign"):
        report.check_signature(vek.key)
    _check_chip(report, vek, policy)
    _check_guest(report, policy)
    _check_firmware(report, vek, policy)
    _check_references(report, policy)
    if report.report_data != report_data:
        raise refusal(unbound, "a report made for other data", report_data, report.report_data)
    list_ends_us = check_revocation(collateral, vek.root, serials=(vek.issuer.serial, vek.serial), now_us=now_us)
    claims = {
        "chip": report.chip[:8].hex(),
        "firmware": ".".join(map(str, report.committed)),
        "guest_svn": report.guest_svn,
        "key": f"VLEK of {vek.csp}" if vek.is_vlek else "VCEK",
        "measurement": report.measurement.hex(),
        "product": vek.root.name,
        "tcb": dict(vek.tcb),
        "vmpl": report.vmpl,
    }
    return Appraised(vector=VECTOR, not_after_us=min(vek.ends_us, list_ends_us), claims=claims)


def _check_chip(report: SnpReport, vek: VekCertificate, policy: SevSnpPolicy) -> None:
    """The product is one and the policy's (`snp-product`), the chip that of the certificate (`snp-chip`)."""
    product, (family, model) = vek.root.name, report.processor
    if product_of(family, model) != product or vek.product.split("-")[0] != product:
        shown = f"family {family:#x}, model {model:#x}, {vek.product}"
        other = "another product than its key" if product_of(family, model) else "a family that is not known here"
        raise refusal(Code.SNP_PRODUCT, f"a processor of {other}", product, shown)
    if product not in policy.tcb:
        raise refusal(Code.SNP_PRODUCT, "a product that the policy does not list", [*policy.tcb], product)
    if not vek.is_vlek and (not any(report.chip) or report.chip != vek.chip.ljust(64, b"\0")):
        raise refusal(Code.SNP_CHIP, "a chip that is masked, or not its key's", vek.chip, report.chip)
    if policy.chips and report.chip not in policy.chips:
        raise refusal(Code.SNP_CHIP, "a chip that the policy does not list", policy.chips, report.chip)


def _check_guest(report: SnpReport, policy: SevSnpPolicy) -> None:
    """What the guest was launched to allow (`hardware-debug`, `snp-policy`), and who asked (`snp-vmpl`)."""
    bits = report.guest_policy
    if bits & _DEBUG:
        raise refusal(Code.HARDWARE_DEBUG, "a guest whose memory its host may read to debug it")
    for bit, what in (_DENIED if policy.smt else {**_DENIED, _SMT: "other threads on its cores"}).items():
        if bits & bit:
            raise refusal(Code.SNP_POLICY, f"a guest that was launched to allow {what}")
    for name in policy.requires:
        if not bits >> GUEST_BITS[name] & 1:
            raise refusal(Code.SNP_POLICY, f"a guest that was not launched to demand {name}")
    abi = (bits >> 8 & 0xFF, bits & 0xFF)
    if abi < version_of(policy.least_abi):
        raise refusal(Code.SNP_POLICY, "a guest that was launched to need less", policy.least_abi, abi)
    if report.vmpl != policy.vmpl:
        raise refusal(Code.SNP_VMPL, "a report that another privilege level asked for", policy.vmpl, report.vmpl)


def _check_firmware(report: SnpReport, vek: VekCertificate, policy: SevSnpPolicy) -> None:
    """Firmware and microcode are those of the certificate, and nowhere below the floor.

    Raises:
        CheckFailedError: `snp-report`, `hardware-certificate` or `hardware-tcb`.
    """
    product = vek.root.name
    layout = parts_of(product)
    for name, raw in report.tcbs.items():
        if any(raw[at] for at in range(8) if at not in layout.values()):
            raise refusal(Code.SNP_REPORT, f"reserved bytes of the {name} TCB that are not zero", "", raw)
        if name == "reported" and vek.tcb != {part: raw[at] for part, at in layout.items()}:
            raise refusal(Code.HARDWARE_CERTIFICATE, "a certificate of other firmware", vek.tcb, raw)
        for part, at in layout.items():
            least: int = getattr(policy.tcb[product], part)
            if raw[at] < least:
                raise refusal(Code.HARDWARE_TCB, f"{part} of the {name} TCB is below the policy's", least, raw[at])
    for what, least_of, actual in (
        ("firmware", version_of(policy.least_firmware), report.committed),
        ("a guest", (policy.least_guest_svn,), (report.guest_svn,)),
    ):
        if actual < least_of:
            raise refusal(Code.HARDWARE_TCB, f"{what} below the policy's", least_of, actual)
    if not report.platform & _ALIAS_CHECKED:
        raise refusal(Code.HARDWARE_TCB, "a machine whose memory was not searched for aliases (AMD-SB-3015)")
    if policy.mitigations & ~report.mitigations:
        raise refusal(Code.HARDWARE_TCB, "mitigations that did not hold", policy.mitigations, report.mitigations)


def _check_references(report: SnpReport, policy: SevSnpPolicy) -> None:
    """What was launched is what the policy lists; raises `CheckFailedError`, `reference-value-unknown`."""
    for name, accepted, actual in (
        ("MEASUREMENT", policy.measurements, report.measurement),
        ("HOST_DATA", policy.host_data, report.host_data),
        ("ID_KEY_DIGEST", policy.id_keys, report.id_key),
        ("AUTHOR_KEY_DIGEST", policy.author_keys, report.author_key if report.has_author_key else b""),
    ):
        if accepted and actual not in accepted:
            raise refusal(Code.REFERENCE_VALUE, f"a {name} that the policy does not list", accepted, actual)
