"""Appraise a TPM's evidence: whose TPM, which key, and what it quotes.

Source: spec/hardware-evidence.md, section 7.1, in the order of its checks.
"""

from __future__ import annotations

import hmac

from glasshouse.attestation.refusal import check_same
from glasshouse.attestation.roots.appraised import Appraised
from glasshouse.attestation.roots.binding import Bound, activation_mac
from glasshouse.attestation.roots.collateral import Pack
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.attestation.roots.refusing import refusal, refused
from glasshouse.attestation.roots.tpm.endorsement import check_endorsement, endorsed_sha256
from glasshouse.attestation.roots.tpm.tpm_blob import TpmBlob
from glasshouse.attestation.roots.tpm.tpm_quote import appraise_quote, attesting_key, check_ak
from glasshouse.errors import Code
from glasshouse.wire.canonical import Json
from glasshouse.wire.crypto import sha256

VECTOR = {"hardware": 2, "instance-identity": 2}
_FOREVER_US = 2**53 - 1


def appraise(blob: bytes, *, bound: Bound, now_us: int, collateral: Pack, policy: HardwarePolicy) -> Appraised:
    """Appraise the blob of kind `tpm`; see `root_table.Appraise`."""
    del collateral  # what a TPM's maker revokes is in no list that is common to them
    accepted = policy.tpm
    if accepted is None:
        raise refusal(Code.CHAIN_MISSING, "the policy names no tpm")
    with refused(Code.HARDWARE_MALFORMED, "the evidence of the TPM"):
        evidence = TpmBlob.parse(blob)
    name = check_ak(evidence.ak)
    _check_named("attestation", Code.TPM_KEY, evidence.ak, bound.ak, bound)
    claims: dict[str, Json] = {"ak": name.hex()}
    not_after_us = _FOREVER_US
    if name.hex() not in accepted.aks:
        not_after_us = check_endorsement(evidence.ek, policy=accepted, now_us=now_us)
        _check_activation(evidence.activation, bound)
        claims["ek_sha256"] = endorsed_sha256(evidence.ek).hex()
    _check_named("endorsement", Code.TPM_ENDORSEMENT, evidence.ek, bound.ek, bound)
    quoted = appraise_quote(
        evidence.quote,
        evidence.signature,
        key=attesting_key(evidence.ak),
        values=evidence.pcrs,
        log=evidence.log,
        accepted=accepted.pcrs,
        extra_data=bound.composite,
    )
    return Appraised(vector=VECTOR, not_after_us=not_after_us, claims=claims | quoted)


def _check_named(what: str, code: Code, given: bytes, named: bytes | None, bound: Bound) -> None:
    """The key is that of the challenge request, which a later verifier does not have."""
    if not bound.is_repeated:
        expected = "none" if named is None else sha256(named).hex()
        check_same("12", code, f"another {what} key", expected, sha256(given).hex())


def _check_activation(activation: bytes | None, bound: Bound) -> None:
    """The TPM opened the challenge's credential for this composite; not repeated, for its secret is gone."""
    if activation is None or (bound.secret is None and not bound.is_repeated):
        raise refusal(Code.TPM_ACTIVATION, "evidence of a TPM's key without its activation")
    if bound.secret is not None and not hmac.compare_digest(activation, activation_mac(bound.secret, bound.composite)):
        raise refusal(Code.TPM_ACTIVATION, "an activation of another challenge, key or run")
