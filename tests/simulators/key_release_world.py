"""A whole key release in memory, with fixed keys, ids and times, for tests and for the vectors' generator.

Everything is derived from names, so that two runs make the same bytes; only HPKE ciphertexts are random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from glasshouse.attestation.claims import (
    CHECKS,
    CheckResult,
    Claims,
    ContainerSource,
    HardeningReport,
    SecretMemoryKind,
    WorkspaceKind,
    composite,
)
from glasshouse.attestation.evidence import EVIDENCE_TYPE, Evidence
from glasshouse.attestation.measurements.measured import References
from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.attestation.roots.appraised import Blob
from glasshouse.attestation.verify import check_1_envelope, check_1_payload, check_4_signatures
from glasshouse.handshake.broker_side import (
    Appraisal,
    appraise,
    build_release,
    check_2_known,
    check_2_unused,
    check_13_budget,
)
from glasshouse.handshake.delegation import RUN_USES, Delegation
from glasshouse.handshake.launch import LaunchFile, TokenClaims, issue_token
from glasshouse.handshake.messages import Challenge
from glasshouse.handshake.records import DeploymentRecord, LaunchRecord
from glasshouse.wire import dsse
from glasshouse.wire.crypto import HPKE_PRIVATE_BYTES, RecipientKey, SigningKey, lengths_prefixed, sha256
from glasshouse.wire.group import Group
from glasshouse.wire.policy import Assurance, Floor, Profile
from glasshouse.wire.states import State
from simulators.measured import measured

NOW_US = 1_790_000_000_000_000
SECOND_US = 1_000_000
PASSED, FAILED, UNAVAILABLE = CheckResult.PASSED, CheckResult.FAILED, CheckResult.UNAVAILABLE


def signing_key(name: str) -> SigningKey:
    return SigningKey(sha256(b"glasshouse test key: " + name.encode()))


def hpke_key(name: str) -> RecipientKey:
    info = lengths_prefixed(b"glasshouse test hpke key")
    hkdf = HKDF(algorithm=SHA256(), length=HPKE_PRIVATE_BYTES, salt=None, info=info)
    return RecipientKey(hkdf.derive(sha256(name.encode())))


def identifier(name: str) -> str:
    return sha256(b"glasshouse test id: " + name.encode())[:16].hex()


def digest(name: str) -> bytes:
    return sha256(b"glasshouse test digest: " + name.encode())


def report(**changes: Any) -> HardeningReport:
    """A consistent report of the profile `standard`, on a kernel with everything."""
    whole = HardeningReport(
        profile=Profile.STANDARD,
        anti_debug=True,
        agent=dict.fromkeys(CHECKS["agent"], PASSED),
        worker=dict.fromkeys(CHECKS["worker"], PASSED),
        workspace=WorkspaceKind.TMPFS_NOSWAP,
        secret_memory=SecretMemoryKind.MEMFD_SECRET,
        details={"landlock-abi": 7},
    )
    return replace(whole, **changes)


def answers(process: str, **changed: CheckResult) -> dict[str, CheckResult]:
    """All checks of a process passed, but for those named (with `_` for `-`)."""
    found = dict.fromkeys(CHECKS["agent" if process == "agent" else "worker"], PASSED)
    found.update({name.replace("_", "-"): result for name, result in changed.items()})
    return found


class World:
    """One owner, one broker, one deployment, one launch and one runtime; every part may be replaced."""

    def __init__(self) -> None:
        self.owner, self.broker = signing_key("owner"), signing_key("broker")
        self.launch_key, self.evidence_key = signing_key("launch"), signing_key("evidence")
        self.hpke = hpke_key("runtime")
        self.package_key = digest("package key")
        self.now_us = NOW_US
        self.floor = Floor(assurance=Assurance.SOFTWARE, profile=Profile.STANDARD)
        self.policy = DeploymentPolicy(
            assurance=Assurance.SOFTWARE,
            profile=Profile.STANDARD,
            egress=(),
            references=References.of(measured("runtime")),
            release_budget=1,
            not_after_us=NOW_US + 86_400 * SECOND_US,
            lease_s=600,
            max_duration_s=7200,
        )
        self.launch = LaunchRecord(
            jti=identifier("token"),
            deployment=identifier("deployment"),
            run_id=identifier("run"),
            container_id=identifier("container"),
            container_source=ContainerSource.MINTED,
            launch_public=self.launch_key.public,
            expires_us=NOW_US + 3600 * SECOND_US,
        )
        self.challenge = Challenge(
            nonce=digest("nonce"),
            deployment=identifier("deployment"),
            issued_us=NOW_US - SECOND_US,
            expires_us=NOW_US + 119 * SECOND_US,
        )

    @classmethod
    def in_group(cls, *, machine: int = 1, machines: int = 3, ranks: int = 2) -> World:
        """A world whose launch is one machine of a group."""
        world = cls()
        group = Group(id=digest("group"), machines=machines, machine=machine, ranks=ranks)
        world.launch = replace(world.launch, group=group)
        world.policy = replace(world.policy, release_budget=machines)
        return world

    @cached_property
    def record(self) -> DeploymentRecord:
        return DeploymentRecord(
            deployment=identifier("deployment"),
            package_id=identifier("package"),
            manifest_sha256=digest("manifest"),
            key_commitment=digest("commitment"),
            floor=self.floor,
            policy=self.policy,
            revoked=False,
            delegation=Delegation.from_envelope(self.delegation, self.owner.public),
        )

    @cached_property
    def delegation(self) -> dsse.Envelope:
        return self._delegation().sign(self.owner)

    def delegate(self, **changes: Any) -> None:
        """Let the owner replace their delegation, after whatever has happened already."""
        changed = replace(self._delegation(), **changes)
        self.delegation, self.record = changed.sign(self.owner), replace(self.record, delegation=changed)

    def _delegation(self) -> Delegation:
        return Delegation(
            broker_public=self.broker.public,
            uses=RUN_USES,
            not_before_us=NOW_US - 3600 * SECOND_US,
            not_after_us=NOW_US + 86_400 * SECOND_US,
        )

    def token_claims(self, **changes: Any) -> TokenClaims:
        claims = TokenClaims(
            jti=self.launch.jti,
            deployment=self.record.deployment,
            run_id=self.launch.run_id,
            package_id=self.record.package_id,
            manifest_sha256=self.record.manifest_sha256,
            floor_sha256=self.record.floor.sha256,
            policy_sha256=self.record.policy.sha256,
            container_id=self.launch.container_id,
            container_source=self.launch.container_source,
            launch_public=self.launch_key.public,
            issued_s=NOW_US // SECOND_US - 60,
            expires_s=self.launch.expires_us // SECOND_US,
            group=self.launch.group,
        )
        return replace(claims, **changes)

    def token(self, **changes: Any) -> str:
        return issue_token(self.broker, self.token_claims(**changes))

    def launch_file(self, **changes: Any) -> LaunchFile:
        launch = LaunchFile(
            token=self.token(),
            launch_seed=self.launch_key.seed(),
            broker_public=self.broker.public,
            broker_url="http://127.0.0.1:8443",
            delegation=self.delegation,
            run_id=self.launch.run_id,
            container_id=self.launch.container_id,
            container_source=self.launch.container_source,
            profile=Profile.STANDARD,
        )
        return replace(launch, **changes)

    def claims(self, **changes: Any) -> Claims:
        claims = Claims(
            nonce=self.challenge.nonce,
            issued_us=NOW_US,
            started_us=NOW_US - 2 * SECOND_US,
            manifest_sha256=self.record.manifest_sha256,
            package_id=self.record.package_id,
            deployment=self.record.deployment,
            run_id=self.launch.run_id,
            container_id=self.launch.container_id,
            container_source=self.launch.container_source,
            measurement=measured("runtime"),
            environment_sha256=digest("environment"),
            hardening=report(),
            state=State.MEASURED,
            gpus=(),
            assurance=Assurance.SOFTWARE,
            hpke_public=self.hpke.public,
            evidence_public=self.evidence_key.public,
            token=changes.pop("token", None) or self.token(),
        )
        return replace(claims, **changes)

    def message(
        self,
        claims: Claims | None = None,
        *,
        hardware: Sequence[Blob] = (),
        composite_digest: bytes | None = None,
        keys: Sequence[SigningKey] | None = None,
        payload_type: str = EVIDENCE_TYPE,
    ) -> bytes:
        """An evidence message, signed by whoever the story says: the attacker re-signs what they change."""
        claims = claims or self.claims()
        evidence = Evidence(claims=claims, composite=composite_digest or composite(claims), hardware=tuple(hardware))
        return dsse.sign(payload_type, evidence.encode(), keys or [self.evidence_key, self.launch_key]).encode()

    def gate(
        self, message: bytes, *, used: bool = False, unknown: bool = False, released_to: int = 0, known: bool = False
    ) -> Appraisal:
        """All thirteen checks, in order, as a broker runs them."""
        opened = check_1_envelope(message)
        stored: Challenge | None = None if unknown or opened.nonce != self.challenge.nonce else self.challenge
        challenge = check_2_known(stored)
        check_4_signatures(
            opened.envelope, evidence_public=opened.evidence_public, launch_public=self.launch.launch_public
        )
        signed = check_1_payload(opened)
        check_2_unused(challenge, used=used, now_us=self.now_us)
        appraisal = appraise(
            signed,
            challenge=challenge,
            record=self.record,
            launch=self.launch,
            broker_public=self.broker.public,
            now_us=self.now_us,
        )
        check_13_budget(released_to=released_to, known=known, policy=self.record.policy)
        return appraisal

    def release(self, message: bytes) -> bytes:
        return build_release(
            self.gate(message),
            package_key=self.package_key,
            broker_key=self.broker,
            challenge=self.challenge,
            record=self.record,
            now_us=self.now_us,
        )
