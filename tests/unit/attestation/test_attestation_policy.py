"""A deployment policy: never empty, never looser than what the owner signed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from glasshouse.attestation.measurements.measured import PARTS, References
from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.errors import Code, FormatError, GlasshouseError, RefusedError
from glasshouse.handshake.records import DeploymentRecord
from glasshouse.wire.policy import Assurance, Floor, Profile
from simulators.key_release_world import World, digest, identifier
from simulators.measured import measured


@pytest.fixture
def policy() -> DeploymentPolicy:
    return World().policy


@pytest.mark.parametrize(
    "changes",
    [
        {"release_budget": 0},
        {"release_budget": -1},
        {"release_budget": 1001},
        {"profile": Profile.OFF},
        {"lease_s": 0},
        {"lease_s": 86_401},
        {"max_duration_s": 0},
        {"clock_skew_us": 600_000_001},
        {"clock_skew_us": -1},
        {"not_after_us": 0},
    ],
    ids=str,
)
def test_a_policy_that_would_accept_too_much_does_not_exist(policy: DeploymentPolicy, changes: dict[str, Any]) -> None:
    with pytest.raises(FormatError) as refusal:
        replace(policy, **changes)
    assert refusal.value.code is Code.POLICY_IMPOSSIBLE


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("digests", "code"),
    [
        ((), Code.POLICY_IMPOSSIBLE),
        (tuple(sorted(digest(str(number)) for number in range(33))), Code.POLICY_IMPOSSIBLE),
        ((digest("b"), digest("a")) * 2, Code.SCHEMA),
        ((bytes(31),), Code.SCHEMA),
        ((digest("a"), digest("a")), Code.SCHEMA),
    ],
    ids=["none", "too many", "order", "size", "twice"],
)
def test_each_part_needs_references_of_its_own(
    policy: DeploymentPolicy, part: str, digests: tuple[bytes, ...], code: Code
) -> None:
    with pytest.raises(FormatError, match=part) as refusal:
        replace(policy.references, **{part: digests})
    assert refusal.value.code is code
    value = policy.references.to_json()
    del value[part]
    with pytest.raises(FormatError):
        References.from_json(value)


def test_a_part_is_judged_by_its_own_list(policy: DeploymentPolicy) -> None:
    """What is recorded of one part says nothing of another; parts that were recorded apart may come together."""
    ours, theirs = measured("ours"), measured("theirs")
    references = References.of(ours, theirs, theirs)
    assert References.from_json(references.to_json()) == references
    assert references.unknown(replace(ours, interpreter=theirs.interpreter)) is None
    for part in PARTS:
        assert references.unknown(replace(ours, **{part: digest("patched")})) == part
        other = next(one for one in PARTS if one != part)
        assert references.unknown(replace(ours, **{part: getattr(ours, other)})) == part
    with pytest.raises(FormatError):
        References.of()


@pytest.mark.parametrize(
    ("floor", "loosened"),
    [
        (Floor(assurance=Assurance.TPM, profile=Profile.STANDARD), "assurance"),
        (Floor(assurance=Assurance.SOFTWARE, profile=Profile.STRICT), "profile"),
        (Floor(assurance=Assurance.SOFTWARE, profile=Profile.STANDARD, egress=("a.example:1",)), "egress"),
    ],
    ids=["assurance", "profile", "egress"],
)
def test_a_policy_that_loosens_the_floor_is_refused_by_policy_and_by_record(
    policy: DeploymentPolicy, floor: Floor, loosened: str
) -> None:
    loose = replace(policy, egress=("a.example:1", "b.example:2"))
    with pytest.raises(RefusedError, match=loosened) as refusal:
        loose.tightens(floor)
    assert refusal.value.code is Code.POLICY_LOOSENED
    with pytest.raises(RefusedError):
        DeploymentRecord(
            deployment=identifier("deployment"),
            package_id=identifier("package"),
            manifest_sha256=digest("manifest"),
            key_commitment=digest("commitment"),
            floor=floor,
            policy=loose,
            revoked=False,
            delegation=None,
        )


def test_a_policy_may_tighten_everything(policy: DeploymentPolicy) -> None:
    floor = Floor(assurance=Assurance.SOFTWARE, profile=Profile.STANDARD, egress=("a.example:1", "b.example:2"))
    tight = replace(policy, assurance=Assurance.GPU_TEE, profile=Profile.STRICT, egress=("b.example:2",))
    tight.tightens(floor)


def test_the_digest_follows_the_content(policy: DeploymentPolicy) -> None:
    assert DeploymentPolicy.parse(policy.encode()) == policy
    changes: list[dict[str, Any]] = [{"release_budget": 2}, {"lease_s": 1}, {"clock_skew_us": 0}, {"not_after_us": 9}]
    digests = {policy.sha256} | {replace(policy, **change).sha256 for change in changes}
    assert len(digests) == 5


@pytest.mark.parametrize("name", list(World().policy.to_json()))
def test_nothing_in_a_policy_has_a_default_on_the_wire(policy: DeploymentPolicy, name: str) -> None:
    value = {key: part for key, part in policy.to_json().items() if key != name}
    with pytest.raises(GlasshouseError):
        DeploymentPolicy.from_json(value)
