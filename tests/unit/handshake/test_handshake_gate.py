"""Attack stories told to the gate: each must be refused by its own check, under its own code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from glasshouse.attestation.claims import Claims, ContainerSource, SecretMemoryKind, WorkspaceKind
from glasshouse.attestation.measurements.measured import PARTS
from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.appraised import Blob
from glasshouse.attestation.verify import check_1_message
from glasshouse.errors import Code, GlasshouseError
from glasshouse.handshake import broker_side
from glasshouse.handshake.delegation import Use
from glasshouse.handshake.launch import issue_token
from glasshouse.handshake.messages import ReleaseMessage, release_info
from glasshouse.wire import dsse, jwt
from glasshouse.wire.policy import Assurance, Floor, Profile
from glasshouse.wire.states import State
from simulators.key_release_world import (
    FAILED,
    NOW_US,
    SECOND_US,
    UNAVAILABLE,
    World,
    answers,
    digest,
    hpke_key,
    identifier,
    report,
    signing_key,
)
from simulators.measured import measured


@pytest.fixture
def world() -> World:
    return World()


def refused(world: World, message: bytes, check: str, code: Code, **state: Any) -> CheckFailedError:
    with pytest.raises(CheckFailedError) as refusal:
        world.gate(message, **state)
    assert (refusal.value.check, refusal.value.code) == (check, code)
    return refusal.value


def test_an_honest_runtime_gets_the_key_and_nobody_else_can_open_the_answer(world: World) -> None:
    message = world.message()
    release = ReleaseMessage.parse(world.release(message))
    info = release_info(
        challenge=world.challenge.encode(),
        evidence_sha256=world.gate(message).evidence_sha256,
        ear=release.ear,
        floor_sha256=world.floor.sha256,
        policy_sha256=world.policy.sha256,
    )
    assert world.hpke.open(release.sealed_key, info=info) == world.package_key
    with pytest.raises(GlasshouseError):
        hpke_key("recorder").open(release.sealed_key, info=info)


# Check 1


def test_a_flood_is_refused_by_its_size(world: World) -> None:
    refusal = refused(world, b"[" * (32 * 1024 + 1), "1", Code.MESSAGE_TOO_LARGE)
    assert refusal.actual == "32769 bytes"


def test_a_signed_head_is_not_evidence(world: World) -> None:
    head = dsse.sign("application/vnd.glasshouse.head+json", b"{}", [world.evidence_key, world.launch_key])
    refused(world, head.encode(), "1", Code.MESSAGE_INVALID)


def test_one_signature_is_not_two(world: World) -> None:
    refused(world, world.message(keys=[world.evidence_key]), "1", Code.MESSAGE_INVALID)


def test_a_third_signature_is_not_two_either(world: World) -> None:
    keys = [world.evidence_key, world.launch_key, signing_key("someone")]
    refused(world, world.message(keys=keys), "1", Code.MESSAGE_INVALID)


def test_an_hpke_key_that_nothing_can_be_sealed_to_never_reaches_the_budget(world: World) -> None:
    zero_point = world.hpke.public[:1184] + bytes(32)
    refused(world, world.message(world.claims(hpke_public=zero_point)), "1", Code.MESSAGE_INVALID)


# Check 2


def test_a_challenge_that_was_never_given(world: World) -> None:
    refused(world, world.message(), "2", Code.NONCE_UNKNOWN, unknown=True)


def test_a_second_answer_to_a_challenge_is_a_replay_also_after_it_expired(world: World) -> None:
    refused(world, world.message(), "2", Code.NONCE_REPLAYED, used=True)
    world.now_us = world.challenge.expires_us + SECOND_US
    refused(world, world.message(), "2", Code.NONCE_REPLAYED, used=True)


def test_an_expired_challenge(world: World) -> None:
    world.now_us = world.challenge.expires_us
    refused(world, world.message(), "2", Code.NONCE_EXPIRED)


def test_evidence_is_not_appraised_under_another_challenge(world: World) -> None:
    other = replace(world.challenge, nonce=digest("another nonce"))
    with pytest.raises(CheckFailedError) as refusal:
        broker_side.appraise(
            check_1_message(world.message()),
            challenge=other,
            record=world.record,
            launch=world.launch,
            broker_public=world.broker.public,
            now_us=NOW_US,
        )
    assert refusal.value.code is Code.NONCE_UNKNOWN


# Check 3


def test_a_token_that_the_attacker_signed(world: World) -> None:
    forged = issue_token(signing_key("attacker"), world.token_claims())
    refused(world, world.message(world.claims(token=forged)), "3", Code.TOKEN_SIGNATURE)


def test_an_attestation_result_is_not_a_launch_token(world: World) -> None:
    ear = ReleaseMessage.parse(world.release(world.message())).ear
    refused(world, world.message(world.claims(token=ear)), "3", Code.TOKEN_TYPE)


def test_a_token_for_another_audience(world: World) -> None:
    claims = {**jwt.parse(world.token()).claims, "aud": "someone-else"}
    token = jwt.issue(world.broker, typ="glasshouse-launch+jwt", claims=claims)
    refused(world, world.message(world.claims(token=token)), "3", Code.TOKEN_CLAIM)


def test_an_expired_token(world: World) -> None:
    token = world.token(issued_s=NOW_US // SECOND_US - 60, expires_s=NOW_US // SECOND_US)
    refused(world, world.message(world.claims(token=token)), "3", Code.TOKEN_EXPIRED)


def test_a_launch_that_the_record_says_is_over(world: World) -> None:
    message = world.message()
    world.launch = replace(world.launch, expires_us=NOW_US)
    refused(world, message, "3", Code.TOKEN_EXPIRED)


def test_a_token_for_another_launch_key(world: World) -> None:
    claims = world.claims(token=world.token(launch_public=signing_key("thief").public))
    refused(world, world.message(claims), "3", Code.TOKEN_KEY)


@pytest.mark.parametrize(
    "changes",
    [
        {"jti": identifier("another token")},
        {"deployment": identifier("another deployment")},
        {"run_id": identifier("another run")},
        {"package_id": identifier("another package")},
        {"manifest_sha256": digest("another manifest")},
        {"floor_sha256": digest("another floor")},
        {"policy_sha256": digest("another policy")},
        {"container_id": identifier("another container")},
        {"container_source": ContainerSource.PLATFORM},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_genuine_token_of_another_launch(world: World, changes: dict[str, Any]) -> None:
    refused(world, world.message(world.claims(token=world.token(**changes))), "3", Code.TOKEN_CLAIM)


def test_claims_that_agree_with_a_foreign_token_do_not_help_it(world: World) -> None:
    """Check 3 compares the token with records; the claims beside it are the attacker's to choose."""
    foreign = {"deployment": identifier("theirs"), "run_id": identifier("their run")}
    claims = world.claims(token=world.token(**foreign), **foreign)
    refused(world, world.message(claims), "3", Code.TOKEN_CLAIM)


def test_a_deployment_that_has_expired(world: World) -> None:
    world.policy = replace(world.policy, not_after_us=NOW_US)
    refused(world, world.message(), "3", Code.DEPLOYMENT_EXPIRED)


def test_a_revoked_package(world: World) -> None:
    message = world.message()
    world.record = replace(world.record, revoked=True)
    refused(world, message, "3", Code.PACKAGE_REVOKED)


@pytest.mark.parametrize(
    "changes",
    [
        {"uses": frozenset({Use.COUNTERSIGN})},
        {"not_after_us": NOW_US},
        {"not_before_us": NOW_US + 1},
        {"broker_public": signing_key("other").public},
    ],
    ids=["narrowed", "over", "early", "other-broker"],
)
def test_a_delegation_that_does_not_cover_a_release_now(world: World, changes: dict[str, Any]) -> None:
    message = world.message()
    world.delegate(**changes)
    refused(world, message, "3", Code.CHAIN_DELEGATION)


def test_an_owner_who_never_delegated(world: World) -> None:
    message = world.message()
    world.record = replace(world.record, delegation=None)
    refused(world, message, "3", Code.CHAIN_DELEGATION)


def test_a_delegation_for_nothing_but_releases_is_enough_to_release(world: World) -> None:
    world.delegate(uses=frozenset({Use.RELEASE}))
    assert world.gate(world.message()).claims.run_id == world.launch.run_id


# Check 4


@pytest.mark.parametrize("state", [{}, {"used": True}])
def test_a_stranger_is_answered_the_same_however_the_challenge_stands(world: World, state: dict[str, Any]) -> None:
    strangers = [signing_key("stranger"), signing_key("other")]
    message = world.message(world.claims(token="a.b.c", evidence_public=strangers[0].public), keys=strangers)
    now = refused(world, message, "4", Code.EVIDENCE_SIGNATURE, **state)
    world.now_us = world.challenge.expires_us
    late = refused(world, message, "4", Code.EVIDENCE_SIGNATURE, **state)
    assert (now.message, now.expected, now.actual) == (late.message, late.expected, late.actual)


def test_evidence_of_a_thief_who_has_the_token_but_not_the_launch_key(world: World) -> None:
    refused(world, world.message(keys=[world.evidence_key, signing_key("thief")]), "4", Code.EVIDENCE_SIGNATURE)


def test_evidence_under_another_evidence_key_than_claimed(world: World) -> None:
    refused(world, world.message(keys=[signing_key("other"), world.launch_key]), "4", Code.EVIDENCE_SIGNATURE)


def test_one_key_cannot_play_both_roles(world: World) -> None:
    """Two signatures of which one is a stranger's, or one signature counted twice: neither."""
    claims = world.claims(evidence_public=world.launch_key.public)
    signers = [world.launch_key, signing_key("stranger")]
    refusal = refused(world, world.message(claims, keys=signers), "4", Code.EVIDENCE_SIGNATURE)
    assert refusal.message == "check 4: an evidence key that is the launch key"
    assert refusal.expected == f"{world.launch_key.key_id}, {world.launch_key.key_id}"
    assert refusal.actual == ", ".join(sorted(key.key_id for key in signers))


def test_claims_changed_after_signing(world: World) -> None:
    honest = dsse.Envelope.parse(world.message(), max_bytes=2**20)
    changed = dsse.Envelope.parse(world.message(world.claims(measurement=measured("mine"))), max_bytes=2**20)
    spliced = replace(honest, payload=changed.payload)
    refused(world, spliced.encode(), "4", Code.EVIDENCE_SIGNATURE)


def test_a_refusal_does_not_repeat_what_the_attacker_wrote(world: World) -> None:
    envelope = dsse.Envelope.parse(world.message(), max_bytes=2**20)
    names = [("<script>", envelope.signatures[0][1]), ("\x1b[2J", envelope.signatures[1][1])]
    forged = replace(envelope, signatures=tuple(sorted(names)))
    refusal = refused(world, forged.encode(), "4", Code.EVIDENCE_SIGNATURE)
    assert refusal.actual == "not a key id, not a key id"


# Checks 5 to 8


@pytest.mark.parametrize("moved_s", [-3600, -62, 61, 3600])
def test_evidence_of_another_time(world: World, moved_s: int) -> None:
    claims = world.claims(issued_us=NOW_US + moved_s * SECOND_US)
    refused(world, world.message(claims), "5", Code.EVIDENCE_STALE)


@pytest.mark.parametrize("moved_s", [-61, 60])
def test_a_clock_that_is_off_by_less_than_the_skew_is_borne_with(world: World, moved_s: int) -> None:
    claims = world.claims(issued_us=NOW_US + moved_s * SECOND_US)
    assert world.gate(world.message(claims)).claims == claims


@pytest.mark.parametrize(
    "changes", [{"manifest_sha256": digest("another")}, {"package_id": identifier("another")}], ids=["hash", "id"]
)
def test_evidence_for_another_package(world: World, changes: dict[str, Any]) -> None:
    refused(world, world.message(world.claims(**changes)), "6", Code.MANIFEST_MISMATCH)


@pytest.mark.parametrize(
    "changes",
    [
        {"container_id": identifier("elsewhere")},
        {"container_source": ContainerSource.PLATFORM},
        {"run_id": identifier("another run")},
        {"deployment": identifier("another deployment")},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_evidence_from_another_container(world: World, changes: dict[str, Any]) -> None:
    refused(world, world.message(world.claims(**changes)), "7", Code.CONTAINER_MISMATCH)


def test_a_runtime_that_the_owner_never_recorded(world: World) -> None:
    refusal = refused(
        world, world.message(world.claims(measurement=measured("patched"))), "8", Code.MEASUREMENT_UNKNOWN
    )
    assert refusal.actual == f"cryptography {measured('patched').cryptography.hex()}"


@pytest.mark.parametrize("part", PARTS)
def test_one_part_that_the_owner_never_recorded(world: World, part: str) -> None:
    changed = replace(measured("runtime"), **{part: digest("patched")})
    refusal = refused(world, world.message(world.claims(measurement=changed)), "8", Code.MEASUREMENT_UNKNOWN)
    assert refusal.actual == f"{part} {digest('patched').hex()}"
    assert refusal.expected == f"{part} {measured('runtime').parts()[part].hex()}"
    assert part in refusal.message


def test_evidence_without_parts_is_refused_although_its_digest_is_recorded(world: World) -> None:
    """As an earlier version made it: receipts of it are read, and nothing is released to it."""
    whole = world.claims(measurement=measured("runtime").sha256)
    assert Claims.from_json(whole.to_json()) == whole
    refusal = refused(world, world.message(whole), "8", Code.MEASUREMENT_UNKNOWN)
    assert not refusal.expected + refusal.actual


# Checks 9 to 12


def test_a_composite_of_other_claims(world: World) -> None:
    refused(world, world.message(composite_digest=digest("other")), "9", Code.COMPOSITE_MISMATCH)


@pytest.mark.parametrize("state", [state for state in State if state is not State.MEASURED])
def test_every_other_state_is_refused(world: World, state: State) -> None:
    refused(world, world.message(world.claims(state=state)), "10", Code.STATE_MISMATCH)


def test_anti_debug_disabled_downgraded_and_inconsistent_are_three_codes(world: World) -> None:
    disabled = report(anti_debug=False, worker=answers("worker", watched=FAILED))
    refused(world, world.message(world.claims(hardening=disabled)), "11a", Code.ANTI_DEBUG_DISABLED)
    downgraded = report(profile=Profile.OFF)
    refused(world, world.message(world.claims(hardening=downgraded)), "11b", Code.ANTI_DEBUG_DOWNGRADED)
    inconsistent = report(worker=answers("worker", not_traced=FAILED))
    refused(world, world.message(world.claims(hardening=inconsistent)), "11c", Code.ANTI_DEBUG_INCONSISTENT)


def test_standard_is_a_downgrade_where_the_policy_says_strict(world: World) -> None:
    world.policy = replace(world.policy, profile=Profile.STRICT)
    refused(world, world.message(), "11b", Code.ANTI_DEBUG_DOWNGRADED)


@pytest.mark.parametrize(
    "changes",
    [
        {"worker": answers("worker", egress_closed=UNAVAILABLE)},
        {"agent": answers("agent", seccomp_filter=FAILED)},
        {"profile": Profile.STRICT, "worker": answers("worker", landlock=UNAVAILABLE)},
        {"workspace": WorkspaceKind.DIRECTORY},
        {"secret_memory": SecretMemoryKind.LOCKED},
    ],
    ids=["egress", "seccomp", "strict-without-landlock", "workspace-on-disk", "keys-in-plain-memory"],
)
def test_a_claim_that_its_own_observations_deny(world: World, changes: dict[str, Any]) -> None:
    message = world.message(world.claims(hardening=report(**changes)))
    refused(world, message, "11c", Code.ANTI_DEBUG_INCONSISTENT)


def test_software_where_the_policy_wants_a_tee(world: World) -> None:
    world.floor = Floor(assurance=Assurance.CPU_TEE, profile=Profile.STANDARD)
    world.policy = replace(world.policy, assurance=Assurance.CPU_TEE)
    refused(world, world.message(), "12", Code.ASSURANCE_TOO_LOW)


@pytest.mark.parametrize("level", [Assurance.TPM, Assurance.CPU_TEE, Assurance.GPU_TEE])
def test_a_level_with_nothing_behind_it(world: World, level: Assurance) -> None:
    refused(world, world.message(world.claims(assurance=level)), "12", Code.HARDWARE_MISSING)


def test_hardware_evidence_beside_software_is_confusion(world: World) -> None:
    message = world.message(hardware=[Blob.of("tpm", b"quote")])
    refused(world, message, "12", Code.HARDWARE_UNEXPECTED)


# Check 13


def test_the_budget_counts_keys_and_not_answers(world: World) -> None:
    refused(world, world.message(), "13", Code.RELEASE_BUDGET, released_to=1)
    world.gate(world.message(), released_to=1, known=True)  # the same runtime, which lost its answer


# The order


def test_the_first_check_that_fails_decides(world: World) -> None:
    """Wrong in everything at once; then mended one check after the other, in the order of the specification."""
    world.floor = Floor(assurance=Assurance.SOFTWARE, profile=Profile.STANDARD)
    thief = signing_key("thief")
    wrong: dict[str, Any] = {
        "token": world.token(jti=identifier("another token")),
        "issued_us": 0,
        "manifest_sha256": digest("another"),
        "container_id": "elsewhere",
        "measurement": measured("patched"),
        "state": State.RUNNING,
        "hardening": report(anti_debug=False, profile=Profile.OFF),
        "assurance": Assurance.GPU_TEE,
    }
    keys, forged = [world.evidence_key, thief], digest("composite")

    def tell(check: str, code: Code) -> None:
        message = world.message(world.claims(**wrong), composite_digest=forged, keys=keys)
        refused(world, message, check, code, released_to=1)

    tell("4", Code.EVIDENCE_SIGNATURE)
    keys = [world.evidence_key, world.launch_key]
    tell("3", Code.TOKEN_CLAIM)
    del wrong["token"]
    for name, check, code in (
        ("issued_us", "5", Code.EVIDENCE_STALE),
        ("manifest_sha256", "6", Code.MANIFEST_MISMATCH),
        ("container_id", "7", Code.CONTAINER_MISMATCH),
        ("measurement", "8", Code.MEASUREMENT_UNKNOWN),
    ):
        tell(check, code)
        del wrong[name]
    tell("9", Code.COMPOSITE_MISMATCH)
    forged = None
    tell("10", Code.STATE_MISMATCH)
    del wrong["state"]
    tell("11a", Code.ANTI_DEBUG_DISABLED)
    wrong["hardening"] = report(profile=Profile.OFF, workspace=WorkspaceKind.DIRECTORY)
    tell("11b", Code.ANTI_DEBUG_DOWNGRADED)
    wrong["hardening"] = report(workspace=WorkspaceKind.DIRECTORY)
    tell("11c", Code.ANTI_DEBUG_INCONSISTENT)
    del wrong["hardening"]
    tell("12", Code.HARDWARE_MISSING)
    del wrong["assurance"]
    tell("13", Code.RELEASE_BUDGET)


def test_no_refusal_carries_a_secret(world: World) -> None:
    secrets = (world.package_key, world.launch_key.seed(), world.evidence_key.seed(), world.hpke.private())
    stories = [
        world.message(world.claims(token=world.token(jti=identifier("x")))),
        world.message(keys=[world.evidence_key, signing_key("thief")]),
        world.message(world.claims(measurement=measured("patched"))),
        world.message(world.claims(state=State.RUNNING)),
    ]
    for message in stories:
        with pytest.raises(CheckFailedError) as refusal:
            world.gate(message)
        said = " ".join((str(refusal.value), refusal.value.expected, refusal.value.actual))
        assert world.token() not in said
        assert not any(secret.hex() in said for secret in secrets)
