"""Appraises the evidence of kind `tdx`: a quote, its report, and the state of its platform.

Laws: the library that compares versions is given nothing that is unsigned; RTMR3, which a runtime may extend, decides
nothing here. Source: spec/hardware-evidence.md, section 7.3.
"""

from __future__ import annotations

from collections.abc import Iterable

import dcap_qvl
from cryptography.hazmat.primitives.serialization import Encoding

from glasshouse.attestation.roots.appraised import CHAINED_VECTOR, Appraised
from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.collateral import Pack
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy, MaxAges
from glasshouse.attestation.roots.refusing import check_listed, refusal, refused, require
from glasshouse.attestation.roots.tdx.tdx_policy import TdxTerms
from glasshouse.attestation.roots.tdx.tdx_quote import TdReport, TdxBlob, TdxQuote
from glasshouse.attestation.roots.tdx.tdx_signatures import Judge
from glasshouse.errors import Code

INTEL_ROOT_SHA256 = bytes.fromhex("44a0196b2b99f889b8e149e95b807a350e7424964399e885a7cbb8ccfab674d3")
"""Of `Intel SGX Root CA`, DER; spec/hardware-evidence.md, section 5: roots are pinned here and nowhere else."""

_SEPT_VE_DISABLE = 1 << 28
_ALLOWED = _SEPT_VE_DISABLE | 1 << 30 | 1 << 31 | 1 << 63  # protection keys, key locker, performance counters
_XFAM_SET, _XFAM_DEFINED = 0x3, 0x6DBE7  # x87 and SSE; all that Intel defined


def appraise(blob: bytes, *, bound: Bound, now_us: int, collateral: Pack, policy: HardwarePolicy) -> Appraised:
    """Appraise a blob; raises `CheckFailedError`, in the order of the specification's table."""
    return appraise_blob(
        blob, bound.report_data, now_us=now_us, collateral=collateral, policy=policy, root_sha256=INTEL_ROOT_SHA256
    )


def appraise_blob(
    blob: bytes, report_data: bytes, *, now_us: int, collateral: Pack, policy: HardwarePolicy, root_sha256: bytes
) -> Appraised:
    """Appraise a blob that has to be bound to this report data and lead to this root; raises `CheckFailedError`."""
    terms = policy.tdx
    assert terms is not None  # noqa: S101 - the caller's rule: the policy names the kind
    with refused(Code.HARDWARE_MALFORMED, "the blob tdx"):
        quote = TdxBlob.parse(blob).quote
    judge = Judge(collateral, root_sha256=root_sha256, now_us=now_us)
    report, found = appraise_quote(quote, judge, terms=terms, ages=policy.collateral, config_ids=terms.config_ids)
    check_binding(report, report_data)
    return found


def appraise_quote(
    raw: bytes, judge: Judge, *, terms: TdxTerms, ages: MaxAges, config_ids: tuple[bytes, ...]
) -> tuple[TdReport, Appraised]:
    """Appraise all of a quote but what it is bound to; raises `CheckFailedError`."""
    with refused(Code.HARDWARE_MALFORMED, "the quote"):
        quote = TdxQuote.parse(raw)
    judge.check_quote(quote, crl_age_s=ages.crl)
    with refused(Code.HARDWARE_CERTIFICATE, "the processor's certificate"):
        named = dcap_qvl.parse_pck_extension_from_pem(quote.pem)
        fmspc, pce = named.fmspc.hex().upper(), named.pce_id.hex().upper()
    check_listed("fmspc", fmspc, terms.fmspcs)
    tcb = judge.signed_list(f"intel/tcb/{fmspc}", "tcbInfo", age_s=ages.tcb, fmspc=fmspc, id="TDX", pceId=pce)
    enclave = judge.signed_list("intel/qe-identity", "enclaveIdentity", age_s=ages.tcb, id="TD_QE")
    evaluation = min(tcb.evaluation, enclave.evaluation)
    if evaluation < terms.tcb_evaluation:
        what = "Intel's lists in the collateral pack are of an older evaluation: `glasshouse collateral fetch`"
        raise refusal(Code.COLLATERAL_EXPIRED, what, f"at least {terms.tcb_evaluation}", evaluation)
    _check_report(quote, terms, config_ids)
    item = judge.pack.named  # of the first, the issuers are in the quote
    lists = dcap_qvl.QuoteCollateralV3(
        enclave.pem, item("intel/root-crl"), item(judge.pck_list), *tcb[:3], *enclave[:3]
    )
    root = quote.chain[2].public_bytes(Encoding.DER)
    with refused(Code.HARDWARE_TCB, "the platform"):
        verified = dcap_qvl.verify_with_root_ca(raw, lists, root, judge.now_us // 10**6)
        for what, found, excepted in (
            ("status", [verified.status], {"UpToDate", *terms.statuses}),
            ("advisories", verified.advisory_ids, set(terms.advisories)),
        ):
            require(excepted.issuperset(found), f"{what} {', '.join(found)}, which the policy does not except")
    _check_image(quote.report, terms)
    is_current = verified.status == "UpToDate" and not verified.advisory_ids
    return quote.report, Appraised(
        vector={**CHAINED_VECTOR, "hardware": 2 if is_current else 32, "instance-identity": 2, "runtime-opaque": 2},
        not_after_us=judge.until_us,
        claims={
            "advisories": sorted(verified.advisory_ids),
            "fmspc": fmspc,
            "tcb_evaluation": evaluation,
            "tcb_status": verified.status,
        },
    )


def check_binding(report: TdReport, report_data: bytes) -> None:
    """The quote is of this run; raises `CheckFailedError`, `hardware-binding`."""
    if report.report_data != report_data:
        what = "a quote about another run, challenge or key, or without the GPUs' evidence"
        raise refusal(Code.HARDWARE_BINDING, what, report_data, report.report_data)


def _check_report(quote: TdxQuote, terms: TdxTerms, config_ids: Iterable[bytes]) -> None:
    report = quote.report
    attributes, xfam = (int.from_bytes(bits, "little") for bits in (report.attributes, report.xfam))
    if attributes & 0xFF:
        raise refusal(Code.HARDWARE_DEBUG, "this machine's host may debug it", 0, attributes & 0xFF)
    if attributes & _SEPT_VE_DISABLE == 0 or attributes & ~_ALLOWED:
        check_listed("attributes", report.attributes.hex(), (_SEPT_VE_DISABLE.to_bytes(8, "little").hex(),))
    if terms.xfam or xfam & _XFAM_SET != _XFAM_SET or xfam & ~_XFAM_DEFINED:
        check_listed("xfam", report.xfam.hex(), map(bytes.hex, terms.xfam))
    for name, found, accepted in (
        ("mrsignerseam", report.mrsignerseam, (bytes(48),)),
        ("seam attributes", report.seam_attributes, (bytes(8),)),
        ("mrservicetd", quote.service_td, (bytes(48),)),
        ("mrconfigid", report.mrconfigid, config_ids),
        ("mrowner", report.mrowner, (terms.owner,)),
        ("mrownerconfig", report.mrownerconfig, (terms.owner_config,)),
    ):
        check_listed(name, found.hex(), map(bytes.hex, accepted))


def _check_image(report: TdReport, terms: TdxTerms) -> None:
    """One image has all registers: those of two would be a system that its owner never saw."""
    images = terms.images
    for name in ("mrtd", "rtmr1", "rtmr2"):
        check_listed(name, getattr(report, name).hex(), (getattr(image, name).hex() for image in images))
        images = tuple(image for image in images if getattr(image, name) == getattr(report, name))
    check_listed("rtmr0", report.rtmr0.hex(), (value.hex() for image in images for value in image.rtmr0))
