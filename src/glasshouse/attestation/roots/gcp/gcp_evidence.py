"""Appraise a token of Google's Confidential Space: whose word it is, that it is of this run, and what it says.

Law: it is the operator's word about the operator's machine, and never `affirming`.
Source: spec/hardware-evidence.md, section 7.6, in the order of its checks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from glasshouse.attestation.refusal import utc
from glasshouse.attestation.roots.appraised import Appraised
from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.collateral import Pack
from glasshouse.attestation.roots.gcp.gcp_policy import GcpPolicy
from glasshouse.attestation.roots.gcp.gcp_token import read_token
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.attestation.roots.kinds import GCP_AUDIENCE, KINDS
from glasshouse.attestation.roots.refusing import refusal
from glasshouse.errors import Code

# Of "Confidential Space Root CA", from 2024-01-19 to 2034-01-16; Google publishes its SHA-1,
# B9:51:20:74:2C:24:E3:AA:34:04:2E:1C:3B:A3:AA:D2:8B:21:23:21.
GOOGLE_ROOT_SHA256 = bytes.fromhex("148b293821bb0c6a317f413c8ba475814091cb22d49b9e3c94198db8e8f86c39")
VECTOR = {"hardware": 32}  # AR4SI's warning: what stands behind it is known to be weaker than it may look
_ISSUER = "https://confidentialcomputing.googleapis.com"
_LEEWAY_S = 60  # by which Google's clock may go ahead of the gate's; none for the token's end
_VERSION = re.compile(r"[0-9]{6}")


def appraise(blob: bytes, *, bound: Bound, now_us: int, collateral: Pack, policy: HardwarePolicy) -> Appraised:
    """Appraise the blob of kind `gcp`, a token; see `root_table.Appraise`."""
    del collateral  # the token has all that it needs
    if policy.gcp is None:
        raise refusal(Code.CHAIN_MISSING, "the policy names no gcp")
    said, end_us = read_token(blob, root_sha256=GOOGLE_ROOT_SHA256, now_us=now_us)
    return appraise_claims(said, end_us, audience=GCP_AUDIENCE, nonce=bound.gcp_nonce, now_us=now_us, terms=policy.gcp)


def appraise_claims(
    said: Mapping[str, Any], end_us: int, *, audience: str, nonce: str, now_us: int, terms: GcpPolicy
) -> Appraised:
    """Appraise what a token says whose signature holds; raises `CheckFailedError`, from the fifth check of 7.6 on."""
    _check_of_now(said, audience, now_us)
    _check(Code.HARDWARE_DEBUG, said, "dbgstat", ["disabled-since-boot"])
    _check(Code.REFERENCE_VALUE, said, "secboot", [True])
    _check(Code.REFERENCE_VALUE, said, "swname", ["CONFIDENTIAL_SPACE"])
    _check(Code.REFERENCE_VALUE, said, "hwmodel", terms.hwmodels)
    container = "submods.container"
    listed = [f"sha256:{one.hex()}" for one in terms.image_digests]
    _check(Code.REFERENCE_VALUE, said, f"{container}.image_digest", listed)
    _check(Code.REFERENCE_VALUE, said, f"{container}.restart_policy", ["Never"])
    for changed in ("cmd_override", "env_override"):  # what the operator gave beside the image
        _check(Code.REFERENCE_VALUE, said, f"{container}.{changed}", [None, [], {}])
    for name, accepted in (("project_id", terms.projects), ("zone", terms.zones)):
        if accepted:
            _check(Code.REFERENCE_VALUE, said, f"submods.gce.{name}", accepted)
    _check_version(said, terms)
    _check(Code.HARDWARE_BINDING, said, "eat_nonce", [nonce, [nonce]])
    shown = ("hwmodel", "submods.container.image_digest", "submods.gce.project_id", "submods.gce.zone", "swversion")
    claims = {name.rpartition(".")[2]: _shown(_at(said, name)) for name in shown}
    not_after_us = min(end_us, said["exp"] * 1_000_000)
    return Appraised(vector=VECTOR, not_after_us=not_after_us, claims={**claims, "word": KINDS["gcp"].word})


def _check_of_now(said: Mapping[str, Any], audience: str, now_us: int) -> None:
    """Google made it for us, and it holds now."""
    _check(Code.GCP_TOKEN, said, "iss", [_ISSUER])
    _check(Code.GCP_TOKEN, said, "aud", [audience])
    times: list[Any] = [said.get(name) for name in ("iat", "nbf", "exp")]
    now_s = now_us // 1_000_000
    if not all(type(one) is int and 0 < one < 2**33 for one in times):
        raise refusal(Code.GCP_TOKEN, "a token without its times", "", _shown(times))
    begin_s, end_s = max(times[:2]), times[2]
    if begin_s > now_s + _LEEWAY_S or now_s >= end_s:
        what = "a token that is not of this time: it holds for an hour, and the clocks of Google and gate have to agree"
        raise refusal(Code.GCP_TOKEN, what, utc(now_us), f"from {utc(begin_s * 1_000_000)} to {utc(end_s * 1_000_000)}")


def _check_version(said: Mapping[str, Any], terms: GcpPolicy) -> None:
    """The machine's image is one that Google supports, and new enough; so is Intel's firmware, where it is Intel's."""
    supported, versions = _at(said, "submods.confidential_space.support_attributes"), said.get("swversion")
    if not isinstance(supported, list) or "STABLE" not in supported:
        raise refusal(Code.HARDWARE_TCB, "an image that Google does not support", "STABLE", _shown(supported))
    found = versions[0] if isinstance(versions, list) and len(versions) == 1 else None
    if not isinstance(found, str) or not _VERSION.fullmatch(found) or int(found) < terms.least_swversion:
        least = f"{terms.least_swversion:06} or later"
        raise refusal(Code.HARDWARE_TCB, "an older image of the machine", least, _shown(versions))
    if said["hwmodel"] == "GCP_INTEL_TDX":
        _check(Code.HARDWARE_TCB, said, "tdx.gcp_attester_tcb_status", ["UpToDate"])


def _check(code: Code, said: Mapping[str, Any], name: str, accepted: Collection[object]) -> None:
    found = _at(said, name)
    # By type too: for Python 1 is True, and what is left out is no empty text.
    if not any(type(found) is type(one) and found == one for one in accepted):
        what = f"a token whose {name} is not what the policy takes"
        raise refusal(code, what, ", ".join(map(_shown, accepted))[:512], _shown(found))


def _at(said: Any, name: str) -> Any:
    """Return the member at a path with dots; None where there is none."""
    for step in name.split("."):
        said = said.get(step) if isinstance(said, dict) else None
    return said


def _shown(value: object) -> str:
    return (value if isinstance(value, str) and value.isascii() else json.dumps(value))[:128]
