"""Is a report of SEV-SNP acceptable: its chip, its guest policy, its firmware, and what was launched.

Source: spec/hardware-evidence.md, section 7.2.
"""

from __future__ import annotations

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.sev_snp.sev_snp_policy import GUEST_BITS, SevSnpPolicy, version_of
from glasshouse.attestation.roots.sev_snp.snp_report import SnpReport
from glasshouse.attestation.roots.sev_snp.vek_certificate import VekCertificate
from glasshouse.errors import Code

_DEBUG, _SMT, _ALIAS_CHECKED = 1 << 19, 1 << 16, 1 << 5
_DENIED = {1 << 18: "a migration agent", 1 << 21: "memory behind CXL"}
_TCB = {"bootloader": 0, "tee": 1, "snp": 6, "microcode": 7}
_LATER_TCB = {"fmc": 0, "bootloader": 1, "tee": 2, "snp": 3, "microcode": 7}
# Pages of CPUID that AMD gave to each product: family, and models.
_PRODUCTS = (
    ("Milan", 0x19, 0x00, 0x0F),
    ("Genoa", 0x19, 0x10, 0x1F),
    ("Genoa", 0x19, 0xA0, 0xAF),
    ("Turin", 0x1A, 0x00, 0x11),
)


def refused(code: Code, message: str, expected: object = "", actual: object = "") -> CheckFailedError:
    """Return the refusal of a check of a report's."""
    return CheckFailedError("12", code, message, expected=_shown(expected), actual=_shown(actual))


def check_chip(report: SnpReport, vek: VekCertificate, product: str, policy: SevSnpPolicy) -> None:
    """The product is one and the policy's (`snp-product`), the chip that of the certificate (`snp-chip`)."""
    family, model = report.processor
    known = [name for name, of, low, high in _PRODUCTS if family == of and low <= model <= high]
    if known != [product] or vek.product.split("-")[0] != product:
        shown = f"family {family:#x}, model {model:#x}, {vek.product}"
        raise refused(Code.SNP_PRODUCT, "a processor of another product than its key", product, shown)
    if product not in policy.tcb:
        raise refused(Code.SNP_PRODUCT, "a product that the policy does not list", [*policy.tcb], product)
    if not vek.is_vlek and (not any(report.chip) or report.chip != vek.chip.ljust(64, b"\0")):
        raise refused(Code.SNP_CHIP, "a chip that is masked, or not its key's", vek.chip, report.chip)
    if policy.chips and report.chip not in policy.chips:
        raise refused(Code.SNP_CHIP, "a chip that the policy does not list", policy.chips, report.chip)


def check_guest(report: SnpReport, policy: SevSnpPolicy) -> None:
    """What the guest was launched to allow (`hardware-debug`, `snp-policy`), and who asked (`snp-vmpl`)."""
    bits = report.guest_policy
    if bits & _DEBUG:
        raise refused(Code.HARDWARE_DEBUG, "a guest whose memory its host may read to debug it")
    for bit, what in (_DENIED if policy.smt else {**_DENIED, _SMT: "other threads on its cores"}).items():
        if bits & bit:
            raise refused(Code.SNP_POLICY, f"a guest that was launched to allow {what}")
    for name in policy.requires:
        if not bits >> GUEST_BITS[name] & 1:
            raise refused(Code.SNP_POLICY, f"a guest that was not launched to demand {name}")
    abi = (bits >> 8 & 0xFF, bits & 0xFF)
    if abi < version_of(policy.least_abi):
        raise refused(Code.SNP_POLICY, "a guest that was launched to need less", policy.least_abi, abi)
    if report.vmpl != policy.vmpl:
        raise refused(Code.SNP_VMPL, "a report that another privilege level asked for", policy.vmpl, report.vmpl)


def check_firmware(report: SnpReport, vek: VekCertificate, product: str, policy: SevSnpPolicy) -> None:
    """Firmware and microcode are those of the certificate, and nowhere below the floor.

    Raises:
        CheckFailedError: `snp-report`, `hardware-certificate` or `hardware-tcb`.
    """
    layout = _LATER_TCB if product == "Turin" else _TCB
    for name, raw in report.tcbs.items():
        if any(raw[at] for at in range(8) if at not in layout.values()):
            raise refused(Code.SNP_REPORT, f"reserved bytes of the {name} TCB that are not zero", "", raw)
        if name == "reported" and vek.tcb != {part: raw[at] for part, at in layout.items()}:
            raise refused(Code.HARDWARE_CERTIFICATE, "a certificate of other firmware", vek.tcb, raw)
        for part, at in layout.items():
            least: int = getattr(policy.tcb[product], part)
            if raw[at] < least:
                raise refused(Code.HARDWARE_TCB, f"{part} of the {name} TCB is below the policy's", least, raw[at])
    for what, least_of, actual in (
        ("firmware", version_of(policy.least_firmware), report.committed),
        ("a guest", (policy.least_guest_svn,), (report.guest_svn,)),
    ):
        if actual < least_of:
            raise refused(Code.HARDWARE_TCB, f"{what} below the policy's", least_of, actual)
    if not report.platform & _ALIAS_CHECKED:
        raise refused(Code.HARDWARE_TCB, "a machine whose memory was not searched for aliases (AMD-SB-3015)")
    if policy.mitigations & ~report.mitigations:
        raise refused(Code.HARDWARE_TCB, "mitigations that did not hold", policy.mitigations, report.mitigations)


def check_references(report: SnpReport, policy: SevSnpPolicy) -> None:
    """What was launched is what the policy lists; raises `CheckFailedError`, `reference-value-unknown`."""
    for name, accepted, actual in (
        ("MEASUREMENT", policy.measurements, report.measurement),
        ("HOST_DATA", policy.host_data, report.host_data),
        ("ID_KEY_DIGEST", policy.id_keys, report.id_key),
        ("AUTHOR_KEY_DIGEST", policy.author_keys, report.author_key if report.has_author_key else b""),
    ):
        if accepted and actual not in accepted:
            raise refused(Code.REFERENCE_VALUE, f"a {name} that the policy does not list", accepted, actual)


def _shown(value: object) -> str:
    if isinstance(value, tuple | list):
        return ("." if all(isinstance(one, int) for one in value) else ", ").join(map(_shown, value))
    return value.hex() if isinstance(value, bytes) else str(value)
