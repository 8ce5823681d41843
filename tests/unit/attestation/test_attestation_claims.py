"""Claims, composite, evidence and result: what they bind, and what they refuse to say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glasshouse.attestation.claims import Claims, ContainerSource, Gpu, composite
from glasshouse.attestation.ear import Ear
from glasshouse.attestation.evidence import Evidence, EvidenceEnvelope
from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.appraised import SOFTWARE_VECTOR, Blob, EarStatus
from glasshouse.attestation.roots.kinds import KINDS
from glasshouse.attestation.roots.levels import LEVELS
from glasshouse.attestation.roots.root_table import check_12_kinds
from glasshouse.errors import Code, FormatError
from glasshouse.handshake.messages import ReleaseMessage
from glasshouse.wire.policy import Assurance, Profile
from glasshouse.wire.states import State
from simulators.key_release_world import NOW_US, World, digest, identifier, report, signing_key
from simulators.measured import measured

ROOT = Path(__file__).parents[3]
GPU = Gpu(name="NVIDIA H200", memory_bytes=150_000_000_000, driver="570.1", uuid="GPU-0")


@pytest.fixture
def world() -> World:
    return World()


def test_the_composite_binds_every_claim(world: World) -> None:
    """Whatever an attacker changes in the claims, the hardware's report over them no longer fits."""
    changes: dict[str, Any] = {
        "nonce": digest("other"),
        "issued_us": 1,
        "started_us": 1,
        "manifest_sha256": digest("other"),
        "package_id": identifier("other"),
        "deployment": identifier("other"),
        "run_id": identifier("other"),
        "container_id": "other",
        "container_source": ContainerSource.PLATFORM,
        "measurement": measured("other"),
        "environment_sha256": digest("other"),
        "hardening": report(details={}),
        "state": State.RUNNING,
        "gpus": (GPU,),
        "assurance": Assurance.TPM,
        "hpke_public": world.hpke.public[::-1],
        "evidence_public": digest("other"),
        "token": "other",
    }
    assert changes.keys() == set(Claims.__slots__)
    honest = world.claims()
    seen = {composite(replace(honest, **{name: value})) for name, value in changes.items()} | {composite(honest)}
    assert len(seen) == len(changes) + 1


def test_claims_and_evidence_survive_their_encoding(world: World) -> None:
    claims = world.claims(gpus=(GPU,), assurance=Assurance.GPU_TEE)
    assert Claims.from_json(claims.to_json()) == claims
    message = world.message(claims, hardware=[Blob.of("sev-snp", b"report")])
    signed = EvidenceEnvelope.open(message).read()
    assert signed.evidence.claims == claims
    assert Evidence.parse(signed.evidence.encode()) == signed.evidence
    assert signed.envelope.encode() == message


@pytest.mark.parametrize("changes", [{"name": "H200\x1b[2J"}, {"driver": "5\n7"}, {"uuid": "ä"}, {"memory_bytes": "1"}])
def test_a_gpu_cannot_write_on_the_owners_terminal(changes: dict[str, str]) -> None:
    with pytest.raises(FormatError):
        Gpu.from_json({**GPU.to_json(), **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"nonce": b"short"},
        {"manifest_sha256": b""},
        {"evidence_public": bytes(33)},
        {"hpke_public": bytes(1215)},
        {"container_id": "a b"},
        {"container_id": ""},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_claims_of_the_wrong_size_do_not_exist(world: World, changes: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        world.claims(**changes)


@pytest.mark.parametrize(
    ("level", "kinds", "code"),
    [
        (Assurance.SOFTWARE, (), None),
        (Assurance.SOFTWARE, ("tpm",), Code.HARDWARE_UNEXPECTED),
        (Assurance.TPM, (), Code.HARDWARE_MISSING),
        (Assurance.TPM, ("tpm",), None),
        (Assurance.TPM, ("tpm", "tpm"), Code.HARDWARE_UNEXPECTED),
        (Assurance.TPM, ("gcp", "tpm"), Code.HARDWARE_UNEXPECTED),
        (Assurance.TPM, ("sev-snp",), Code.HARDWARE_MISSING),
        (Assurance.CPU_TEE, ("tpm",), Code.HARDWARE_MISSING),
        (Assurance.CPU_TEE, ("sev-snp",), None),
        (Assurance.CPU_TEE, ("sev-snp", "tpm"), Code.HARDWARE_UNEXPECTED),
        (Assurance.CPU_TEE, ("nvidia", "sev-snp"), Code.HARDWARE_UNEXPECTED),
        (Assurance.GPU_TEE, ("sev-snp",), Code.HARDWARE_MISSING),
        (Assurance.GPU_TEE, ("nvidia",), Code.HARDWARE_MISSING),
        (Assurance.GPU_TEE, ("nvidia", "tdx"), None),
        (Assurance.GPU_TEE, ("nvidia", "nvidia", "tdx"), Code.HARDWARE_UNEXPECTED),
    ],
)
def test_a_level_is_completed_by_just_what_it_wants(
    world: World, level: Assurance, kinds: tuple[str, ...], code: Code | None
) -> None:
    blobs = tuple(Blob.of(kind, b"blob") for kind in kinds)
    claimed = Evidence(claims=world.claims(assurance=level), composite=bytes(32), hardware=blobs)
    found: Code | None = None
    try:
        check_12_kinds(claimed)
    except CheckFailedError as refusal:
        found = refusal.code
    assert found is code


def test_the_table_has_every_level_once_and_every_kind_completes_one() -> None:
    assert list(LEVELS) == list(Assurance)
    assert set().union(*(level.one_of | level.beside for level in LEVELS.values())) == set(KINDS)


@pytest.mark.parametrize("page", ["README.md", "docs/security/threat-model.md"])
def test_the_pages_have_a_row_for_every_level(page: str) -> None:
    rows = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("| `")]
    for level in Assurance:
        assert any(f"`{level}`" in row.split("|")[1] for row in rows)


def ear_of(world: World) -> Ear:
    text = ReleaseMessage.parse(world.release(world.message())).ear
    return Ear.parse_token(
        text, broker_public=world.broker.public, evidence_public=world.evidence_key.public, now_us=NOW_US
    )


def test_a_software_result_warns_and_claims_nothing_about_hardware(world: World) -> None:
    ear = ear_of(world)
    assert ear.status is EarStatus.WARNING
    assert ear.vector.keys() == {"configuration", "executables"}
    assert ear.expires_s - ear.issued_s == world.policy.max_duration_s + world.policy.lease_s + 3600
    assert (
        Ear.parse_token(
            ear.issue(world.broker),
            broker_public=world.broker.public,
            evidence_public=world.evidence_key.public,
            now_us=NOW_US,
        )
        == ear
    )


@pytest.mark.parametrize(
    ("vector", "status"),
    [
        ({"executables": 2}, EarStatus.AFFIRMING),
        ({"configuration": 32, "executables": 32, "hardware": 2}, EarStatus.WARNING),
        ({"instance-identity": 2}, EarStatus.AFFIRMING),
        ({}, EarStatus.NONE),
        ({"charm": 2}, EarStatus.AFFIRMING),
        (dict(SOFTWARE_VECTOR), EarStatus.AFFIRMING),
        (dict(SOFTWARE_VECTOR), EarStatus.NONE),
    ],
)
def test_a_software_result_that_says_more_cannot_even_be_made(
    world: World, vector: dict[str, int], status: EarStatus
) -> None:
    with pytest.raises(FormatError):
        replace(ear_of(world), vector=vector, status=status)


@pytest.mark.parametrize(
    ("value", "status"),
    [
        (2, EarStatus.AFFIRMING),
        (31, EarStatus.AFFIRMING),
        (-2, EarStatus.AFFIRMING),
        (-32, EarStatus.AFFIRMING),
        (32, EarStatus.WARNING),
        (95, EarStatus.WARNING),
        (-33, EarStatus.WARNING),
        (-96, EarStatus.WARNING),
        (96, EarStatus.CONTRAINDICATED),
        (-97, EarStatus.CONTRAINDICATED),
        (0, EarStatus.NONE),
        (1, EarStatus.NONE),
        (-1, EarStatus.NONE),
    ],
)
def test_the_status_is_the_worst_tier_of_the_vector(world: World, value: int, status: EarStatus) -> None:
    """The tiers of AR4SI, at their borders, as a hardware root will use them."""
    one = replace(ear_of(world), assurance=Assurance.TPM, vector={"hardware": value}, status=status)
    assert one.status is status
    wrong = EarStatus.WARNING if status is not EarStatus.WARNING else EarStatus.AFFIRMING
    with pytest.raises(FormatError):
        replace(one, status=wrong)


def test_a_result_for_another_key_is_no_result(world: World) -> None:
    text = ear_of(world).issue(world.broker)
    with pytest.raises(FormatError) as refusal:
        Ear.parse_token(
            text, broker_public=world.broker.public, evidence_public=signing_key("other").public, now_us=NOW_US
        )
    assert refusal.value.code is Code.TOKEN_CLAIM


def test_levels_know_their_order() -> None:
    assert [level.at_least(Assurance.CPU_TEE) for level in Assurance] == [False, False, True, True]
    assert [profile.at_least(Profile.STANDARD) for profile in Profile] == [False, True, True]
