"""An owner, a package, a live broker, and an attacker that plays a runtime."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from glasshouse.attestation.claims import (
    CHECKS,
    CheckResult,
    Claims,
    ContainerSource,
    HardeningReport,
    SecretMemoryKind,
    WorkspaceKind,
)
from glasshouse.attestation.measurements.measured import PARTS, Measured, References
from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.attestation.roots.appraised import Blob
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.broker.client.broker_process import BrokerProcess
from glasshouse.broker.client.owner_client import OwnerClient, Reply, request
from glasshouse.broker.http_api import LaunchRequest, LineRequest
from glasshouse.handshake.delegation import RUN_USES, Delegation, Use
from glasshouse.handshake.launch import LaunchFile
from glasshouse.handshake.messages import Challenge, TpmKeys
from glasshouse.handshake.runtime_side import (
    challenge_request,
    check_release,
    evidence_message,
    read_challenge,
    release_request,
)
from glasshouse.package.layout import check_commitment, key_commitment
from glasshouse.package.manifest import Manifest
from glasshouse.tamper.tpm_stage import StagedTpm
from glasshouse.wire.crypto import RecipientKey, SigningKey, Suite, lengths_prefixed
from glasshouse.wire.group import Group
from glasshouse.wire.policy import GROUP_EGRESS, Assurance, Floor, Profile
from glasshouse.wire.states import State

_HOUR_US = 3600 * 1_000_000


def clock_us() -> int:
    """Return microseconds since the epoch."""
    return time.time_ns() // 1000


class LiveBroker(Protocol):
    """A broker that can be reached."""

    @property
    def runtime_url(self) -> str:
        """Where runtimes reach it."""

    @property
    def broker_public(self) -> bytes:
        """Its signing key."""

    def client(self) -> OwnerClient:
        """Return the owner's client."""


class Owner:
    """An owner with one package and one broker, and everything between them signed.

    Args:
        releases: the deployment's release budget.
        profile, egress: of the floor and the policy.
        signing: the owner's key; a new one by default.
        hardware: of a policy that takes evidence of it.
        tpm: what the policy accepts, at the level `tpm`; without one the level is `software`.

    Attributes:
        manifest, package_key: the package; it has no content.
        deployment: the deployment's id.
        measurement: the reference that a runtime must measure to.
    """

    def __init__(
        self,
        broker: LiveBroker,
        *,
        releases: int = 1,
        profile: Profile = Profile.STRICT,
        egress: tuple[str, ...] = (GROUP_EGRESS,),
        signing: SigningKey | None = None,
        hardware: HardwarePolicy | None = None,
        tpm: StagedTpm | None = None,
    ) -> None:
        self.signing, sealing = signing or SigningKey.generate(), RecipientKey.generate()
        self._broker = broker
        self._client = broker.client()
        self.package_key = secrets.token_bytes(32)
        self.measurement = any_measurement()
        self._tpm = tpm
        package_id = secrets.token_hex(16)
        self.manifest = Manifest(
            package_id=package_id,
            suite=Suite.AES_256_GCM,
            chunk_bytes=1 << 20,
            workload="script",
            floor=Floor(assurance=Assurance.SOFTWARE, profile=profile, egress=egress),
            recipients=(sealing.public,),
            owner_signing=self.signing.public,
            owner_sealing=sealing.public,
            key_commitment=key_commitment(self.package_key, package_id),
            index_sha256=secrets.token_bytes(32),
            index_bytes=1024,
            assets_bytes=4096,
        )
        now_us, store = clock_us(), self._client.store_public()
        policy = DeploymentPolicy(
            assurance=Assurance.SOFTWARE if tpm is None else Assurance.TPM,
            profile=profile,
            egress=egress,
            hardware=hardware if tpm is None else tpm.accepted(),
            references=References.of(self.measurement),
            release_budget=releases,
            not_after_us=now_us + _HOUR_US,
            lease_s=600,
            max_duration_s=3600,
        )
        self.delegation = Delegation(
            broker_public=broker.broker_public,
            uses=RUN_USES if store is None else RUN_USES | {Use.STORE},
            not_before_us=now_us - _HOUR_US,
            not_after_us=now_us + _HOUR_US,
            store_public=store,
        ).sign(self.signing)
        self._client.put_delegation(self.delegation, self.signing.public)
        self.deployment = self._client.add_deployment(self.manifest.sign(self.signing), self.package_key, policy)

    def another(self, *, releases: int, tpm: StagedTpm | None = None) -> Owner:
        """Return another owner at the same broker, with a package and a budget of their own."""
        return Owner(self._broker, releases=releases, tpm=tpm)

    @property
    def tpm(self) -> StagedTpm:
        """The TPM whose maker and boot the policy accepts."""
        if self._tpm is None:
            raise ValueError("an owner whose policy names no TPM")
        return self._tpm

    def client(self) -> OwnerClient:
        """Return the client of the owner's broker."""
        return self._client

    def group(self, machines: int, *, ranks: int = 1) -> list[LaunchFile]:
        """Announce a group and mint a launch for each of its machines."""
        places = self._client.add_group(self.deployment, machines=machines, ranks=ranks)
        return [self.launch(group=place) for place in places]

    def launch(
        self,
        *,
        key: SigningKey | None = None,
        lifetime_s: int = 3600,
        group: Group | None = None,
        line: LineRequest | None = None,
    ) -> LaunchFile:
        """Mint a launch: a run, a container, a token, and a launch key unless one is given."""
        key, run_id, container_id = key or SigningKey.generate(), secrets.token_hex(16), f"c-{secrets.token_hex(8)}"
        request = LaunchRequest(
            deployment=self.deployment,
            run_id=run_id,
            container_id=container_id,
            container_source=ContainerSource.MINTED,
            launch_public=key.public,
            lifetime_s=lifetime_s,
            group=group,
            line=line,
        )
        token = self._client.add_launch(request)
        return LaunchFile(
            token=token,
            launch_seed=key.seed(),
            broker_public=self._broker.broker_public,
            broker_url=self._broker.runtime_url,
            delegation=self.delegation,
            run_id=run_id,
            container_id=container_id,
            container_source=ContainerSource.MINTED,
            profile=self.manifest.floor.profile,
        )

    def releases(self) -> int:
        """Return the broker's own release counter."""
        count = self._client.deployment(self.deployment)["releases"]
        if not isinstance(count, int):
            raise TypeError("the broker's counter is not a number")
        return count


@dataclass(frozen=True, kw_only=True, slots=True)
class Actor:
    """Plays a runtime: the launch file it was handed, and keys of its own."""

    owner: Owner  # whose package it wants to open
    launch: LaunchFile
    hpke: RecipientKey  # the keys it made
    evidence: SigningKey
    url: str  # where it sends to; the launch file's broker unless another is between

    @classmethod
    def enter(cls, owner: Owner, launch: LaunchFile | None = None, *, url: str = "") -> Actor:
        """Return a runtime with fresh keys."""
        launch = launch or owner.launch()
        return cls(
            owner=owner,
            launch=launch,
            hpke=RecipientKey.generate(),
            evidence=SigningKey.generate(),
            url=url or launch.broker_url,
        )

    def challenge(self, tpm: TpmKeys | None = None) -> Challenge:
        """Ask the broker for a challenge."""
        content = self.post("/v1/challenge", challenge_request(self.launch, tpm)).content()
        return read_challenge(content, self.launch, now_us=clock_us())

    def claims(self, challenge: Challenge) -> Claims:
        """Return claims that every check accepts."""
        now_us = clock_us()
        return Claims(
            nonce=challenge.nonce,
            issued_us=now_us,
            started_us=now_us - 1_000_000,
            manifest_sha256=self.owner.manifest.sha256,
            package_id=self.owner.manifest.package_id,
            deployment=self.owner.deployment,
            run_id=self.launch.run_id,
            container_id=self.launch.container_id,
            container_source=self.launch.container_source,
            measurement=self.owner.measurement,
            environment_sha256=bytes(32),
            hardening=hardened(self.launch.profile),
            state=State.MEASURED,
            gpus=(),
            assurance=Assurance.SOFTWARE,
            hpke_public=self.hpke.public,
            evidence_public=self.evidence.public,
            token=self.launch.token,
        )

    def sign(self, claims: Claims, hardware: Sequence[Blob] = ()) -> bytes:
        """Return evidence for `claims`, with a true composite and both signatures."""
        return evidence_message(claims, hardware, evidence_key=self.evidence, launch_key=self.launch.key())

    def send(self, evidence: bytes) -> Reply:
        """Send evidence to the broker."""
        return self.post("/v1/evidence", evidence)

    def ask(self, challenge: Challenge, evidence: bytes) -> Reply:
        """Ask for the release to a machine of a group whose evidence was accepted."""
        return self.post("/v1/release", release_request(challenge, evidence, evidence_key=self.evidence))

    def open(self, content: bytes, challenge: Challenge, evidence: bytes) -> bytes:
        """Return the package key in this runtime's release; raises `PeerError`, `FormatError`, `PackageError`."""
        manifest = self.owner.manifest
        release = check_release(
            content,
            self.launch,
            challenge,
            evidence=evidence,
            evidence_public=self.evidence.public,
            manifest_sha256=manifest.sha256,
            floor=manifest.floor,
            now_us=clock_us(),
        )
        line = release.ear.line
        info = release.info if line is None else release.info + lengths_prefixed(line.encode())
        package_key = self.hpke.open(release.sealed_key, info=info)
        check_commitment(package_key, manifest.package_id, manifest.key_commitment)
        return package_key

    def post(self, path: str, body: bytes) -> Reply:
        """Send any message to the broker's runtime listener."""
        return request(self.url, "POST", path, body)


def any_measurement() -> Measured:
    """Return a measurement of files that are nowhere."""
    return Measured(**{part: secrets.token_bytes(32) for part in PARTS})


def hardened(profile: Profile) -> HardeningReport:
    """Return a report in which every check passed, claiming `profile`."""
    return HardeningReport(
        profile=profile,
        anti_debug=True,
        agent=dict.fromkeys(CHECKS["agent"], CheckResult.PASSED),
        worker=dict.fromkeys(CHECKS["worker"], CheckResult.PASSED),
        workspace=WorkspaceKind.TMPFS_NOSWAP,
        secret_memory=SecretMemoryKind.MEMFD_SECRET,
    )


@contextmanager
def stage() -> Iterator[Owner]:
    """Start a broker in a directory of its own, and take both away afterwards."""
    with TemporaryDirectory(prefix="glasshouse-tamper-") as directory:
        store = str(Path(directory, "store"))
        with BrokerProcess(Path(directory), "--store", store) as broker:
            yield Owner(broker)
