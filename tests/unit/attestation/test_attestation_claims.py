"""Claims, composite, evidence and result: what they bind, and what they refuse to say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glasshouse.attestation.claims import Claims, ContainerSource, Gpu, composite
from glasshouse.attestation.ear import RUNTIME, Ear, Submodule
from glasshouse.attestation.evidence import Evidence, EvidenceEnvelope
from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.appraised import CHAINED_VECTOR, SOFTWARE_VECTOR, Blob, EarStatus
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
CHAINED, GENUINE = dict(CHAINED_VECTOR), {"hardware": 2, "instance-identity": 2}
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
    assert ear.submodules.keys() == {RUNTIME}
    assert ear.submodules[RUNTIME].vector.keys() == {"configuration", "executables"}
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
    ("level", "kinds"),
    [
        (Assurance.SOFTWARE, {"runtime": CHAINED}),
        (Assurance.SOFTWARE, {"runtime": {**SOFTWARE_VECTOR, "hardware": 2}}),
        (Assurance.SOFTWARE, {"runtime": {"instance-identity": 2}}),
        (Assurance.SOFTWARE, {}),
        (Assurance.SOFTWARE, {"runtime": SOFTWARE_VECTOR, "tpm": GENUINE}),
        (Assurance.TPM, {"runtime": SOFTWARE_VECTOR, "tpm": GENUINE}),
        (Assurance.TPM, {"runtime": CHAINED}),
        (Assurance.TPM, {"tpm": GENUINE}),
        (Assurance.TPM, {"runtime": CHAINED, "sev-snp": GENUINE}),
        (Assurance.CPU_TEE, {"runtime": CHAINED, "tpm": GENUINE}),
        (Assurance.CPU_TEE, {"runtime": CHAINED, "sev-snp": GENUINE, "tdx": GENUINE}),
        (Assurance.GPU_TEE, {"runtime": CHAINED, "sev-snp": GENUINE}),
        (Assurance.GPU_TEE, {"runtime": CHAINED, "nvidia": GENUINE}),
        (Assurance.TPM, {"runtime": CHAINED, "tpm": {"hardware": 99}}),
        (Assurance.TPM, {"runtime": CHAINED, "tpm": {"hardware": 0}}),
    ],
)
def test_a_result_that_says_more_than_its_kinds_cannot_even_be_made(
    world: World, level: Assurance, kinds: dict[str, dict[str, int]]
) -> None:
    ear = ear_of(world)
    with pytest.raises(FormatError):
        replace(ear, assurance=level, submodules=Submodule.all_of(kinds, ear.policy_sha256))


@pytest.mark.parametrize("vector", [{}, {"charm": 2}])
def test_a_vector_is_of_ar4si(world: World, vector: dict[str, int]) -> None:
    with pytest.raises(FormatError):
        Submodule.all_of({RUNTIME: vector}, bytes(32))


@pytest.mark.parametrize(
    ("kinds", "status"),
    [
        ({"sev-snp": GENUINE, "nvidia": GENUINE}, EarStatus.AFFIRMING),
        ({"sev-snp": GENUINE, "nvidia": {"hardware": 32}}, EarStatus.WARNING),
        ({"sev-snp": {"hardware": 2, "instance-identity": 32}, "nvidia": GENUINE}, EarStatus.WARNING),
    ],
)
def test_a_result_is_no_better_than_its_worst_kind(
    world: World, kinds: dict[str, dict[str, int]], status: EarStatus
) -> None:
    ear = ear_of(world)
    submodules = Submodule.all_of({RUNTIME: CHAINED, **kinds}, ear.policy_sha256)
    found = replace(ear, assurance=Assurance.GPU_TEE, submodules=submodules, collateral_sha256=digest("pack"))
    parties = {"broker_public": world.broker.public, "evidence_public": world.evidence_key.public}
    assert found.status is status
    assert Ear.parse_token(found.issue(world.broker), **parties, now_us=NOW_US) == found
    for better in EarStatus:
        if better is not status:
            with pytest.raises(FormatError):
                Ear.from_json({**found.to_json(), "ear_status": better})


def test_what_is_somebodys_word_is_never_affirmed(world: World) -> None:
    ear = ear_of(world)
    submodules = Submodule.all_of({RUNTIME: CHAINED, "gcp": GENUINE}, ear.policy_sha256)
    with pytest.raises(FormatError, match="somebody's word"):
        replace(ear, assurance=Assurance.TPM, submodules=submodules)


def test_no_other_kind_is_activated(world: World) -> None:
    ear = ear_of(world)
    submodules = Submodule.all_of({RUNTIME: CHAINED, "gcp": {"hardware": 32}}, ear.policy_sha256)
    assert replace(ear, assurance=Assurance.TPM, submodules=submodules).status is EarStatus.WARNING
    with pytest.raises(FormatError):
        replace(ear, assurance=Assurance.TPM, submodules=submodules, tpm_activated=True)
    with pytest.raises(FormatError):
        replace(ear, collateral_sha256=digest("pack"))


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
def test_the_status_is_the_worst_tier_of_the_vector(value: int, status: EarStatus) -> None:
    """The tiers of AR4SI, at their borders."""
    assert Submodule.all_of({"tpm": {"hardware": value}}, bytes(32))["tpm"].status is status


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
