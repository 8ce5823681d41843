"""What every case is made of, and the attestation result that several need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glasshouse.attestation.ear import Ear, Submodule
from glasshouse.attestation.evidence import EvidenceEnvelope
from glasshouse.attestation.roots.appraised import SOFTWARE_VECTOR
from glasshouse.handshake.broker_side import EAR_GRACE_S
from glasshouse.wire.policy import Assurance, Profile
from simulators.key_release_world import (
    NOW_US,
    SECOND_US,
    World,
)

Case = tuple[str, dict[str, Any]]
HEAD_TYPE = "application/vnd.glasshouse.head+json"


def case(
    name: str,
    description: str,
    given: Mapping[str, Any],
    *,
    code: str | None = None,
    check: str | None = None,
    **expect: Any,
) -> Case:
    kind = name.partition("-")[0]
    if kind == "gate":
        # A message that is none, names no challenge, is not signed as it must be or comes second uses nothing up.
        expect["consumes"] = check not in {"1", "4"} and code not in {"nonce-unknown", "nonce-replayed"}
    document = {
        "description": description,
        "expect": {"check": check, "code": code, **expect},
        "input": dict(given),
        "kind": kind,
    }
    return f"{name}.json", document


def sample(world: World) -> Ear:
    issued_s = NOW_US // SECOND_US

    return Ear(
        issued_s=issued_s,
        expires_s=issued_s + world.policy.max_duration_s + world.policy.lease_s + EAR_GRACE_S,
        nonce=world.challenge.nonce,
        evidence_public=world.evidence_key.public,
        deployment=world.record.deployment,
        run_id=world.launch.run_id,
        manifest_sha256=world.record.manifest_sha256,
        floor_sha256=world.floor.sha256,
        policy_sha256=world.policy.sha256,
        evidence_sha256=EvidenceEnvelope.open(world.message()).read().sha256,
        assurance=Assurance.SOFTWARE,
        profile=Profile.STANDARD,
        submodules=Submodule.all_of({"runtime": SOFTWARE_VECTOR}, world.policy.sha256),
        lease_s=world.policy.lease_s,
        max_duration_s=world.policy.max_duration_s,
        build="vectors",
    )


def sample_ear(world: World) -> str:
    return sample(world).issue(world.broker)
