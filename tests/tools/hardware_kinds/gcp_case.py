"""Public tokens of Google's; `bound` is audience and nonce, as those who published it asked for them."""

from __future__ import annotations

from collections.abc import Mapping

from glasshouse.attestation.roots.appraised import Appraised
from glasshouse.attestation.roots.collateral import Pack
from glasshouse.attestation.roots.gcp.gcp_evidence import GOOGLE_ROOT_SHA256, appraise_claims
from glasshouse.attestation.roots.gcp.gcp_token import read_token
from tools.hardware_cases import HardwareCase


def appraise_public(case: HardwareCase, files: Mapping[str, bytes], pack: Pack) -> Appraised:
    """Appraise a token; raises `CheckFailedError`."""
    del pack
    assert case.policy.gcp is not None
    audience, _, nonce = (case.bound or b" ").decode().partition(" ")
    said, end_us = read_token(files["evidence"], root_sha256=GOOGLE_ROOT_SHA256, now_us=case.now_us)
    return appraise_claims(said, end_us, audience=audience, nonce=nonce, now_us=case.now_us, terms=case.policy.gcp)
