"""Public answers of dstack's agent to GetQuote, or blobs made of them, with Intel's lists of that time."""

from __future__ import annotations

from collections.abc import Mapping

from glasshouse.attestation.roots.appraised import Appraised
from glasshouse.attestation.roots.collateral import Pack
from glasshouse.attestation.roots.dstack import dstack_evidence
from glasshouse.attestation.roots.tdx.tdx_evidence import INTEL_ROOT_SHA256
from glasshouse.runtime.roots.dstack import blob_of
from tools.hardware_cases import HardwareCase
from tools.hardware_kinds.tdx_case import pack_of


def appraise_public(case: HardwareCase, files: Mapping[str, bytes], pack: Pack) -> Appraised:
    """Appraise the blob that the collector makes of the answer; the case is bound to the quote's report data."""
    del pack
    return dstack_evidence.appraise_blob(
        files["blob"] if "blob" in files else blob_of(files["evidence"]),
        case.bound or bytes(64),
        now_us=case.now_us,
        collateral=pack_of(files["collateral"]),
        policy=case.policy,
        root_sha256=INTEL_ROOT_SHA256,
    )
