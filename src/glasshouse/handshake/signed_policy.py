"""A deployment's policy as its owner signed it for one gate: who edits that gate's database cannot change it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from glasshouse.attestation.policy import MAX_POLICY_BYTES, DeploymentPolicy
from glasshouse.wire import dsse
from glasshouse.wire.record import Sha256, octets

SIGNED_POLICY_TYPE = "application/vnd.glasshouse.deployment+json"
MAX_SIGNED_POLICY_BYTES = 2 * MAX_POLICY_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class SignedPolicy(
    dsse.Signed, name="signed policy", max_bytes=MAX_SIGNED_POLICY_BYTES, payload_type=SIGNED_POLICY_TYPE
):
    """A policy, of which package, at which gate; signed by the owner."""

    broker_public: Annotated[bytes, octets(32)]  # the gate's signing key
    manifest_sha256: Sha256  # of the package
    policy: DeploymentPolicy  # what a release demands
