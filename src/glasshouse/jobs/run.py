"""The story of a run, before it trains: everything that needs the owner's private keys.

What comes after (`supervise`) needs none of them: a detached supervisor is a fresh process that never saw one.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from glasshouse.attestation.claims import ContainerSource
from glasshouse.attestation.measurement import measure_runtime
from glasshouse.attestation.policy import MAX_LEASE_S, DeploymentPolicy
from glasshouse.errors import Code, UsageError
from glasshouse.handshake.delegation import Delegation, Use
from glasshouse.handshake.launch import LaunchFile
from glasshouse.jobs.embedded import Embedded, Serving
from glasshouse.jobs.home import Home
from glasshouse.jobs.identity import Identity
from glasshouse.jobs.jobfile import Deployment, check_reachable
from glasshouse.jobs.keystore import KeyStore
from glasshouse.jobs.packages import PackageRecord
from glasshouse.jobs.processes import ProcessName
from glasshouse.jobs.rundir import Phase, RunFolder, RunRecord
from glasshouse.package.manifest import Manifest
from glasshouse.package.read import Package
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.signing import SigningKey

__all__ = ["Prepared", "prepare", "public_part"]

TOKEN_LIFETIME_S = 900
# Clocks differ; a delegation that begins now would begin too late for a runtime whose clock is behind.
_SKEW_US = 120_000_000
_MARGIN_S = 2 * 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A run that can be placed.

    Attributes:
        folder: its folder.
        record: what it is.
        launch: the launch file; secret.
    """

    folder: RunFolder
    record: RunRecord
    launch: bytes

    def __repr__(self) -> str:
        return f"Prepared({self.folder.run_id})"


def public_part(path: Path, *, owner_signing: bytes | None = None) -> tuple[Manifest, bytes]:
    """Return a package's checked public manifest and its envelope.

    Raises:
        UsageError: `file-missing`.
        PackageError, FormatError: as `Package.open`.
    """
    try:
        with path.open("rb") as stream:
            package = Package.open(stream, owner_signing=owner_signing)
            return package.manifest, package.envelope
    except OSError as error:
        raise UsageError(Code.FILE_MISSING, f"cannot read the package {path}: {error.strerror}") from None


def prepare(
    package: Path,
    *,
    home: Home,
    identity: Identity,
    folder: RunFolder,
    broker: Embedded,
    say: Callable[[str], None] = lambda _step: None,
) -> Prepared:
    """Delegate, deploy and mint a launch for a sealed package.

    Args:
        package: the sealed package.
        home: the state home.
        identity: the package's owner.
        folder: the new run's folder.
        broker: started if need be; belongs to the caller, who gives it back.
        say: called with each step for people.

    Raises:
        UsageError: `policy-impossible`, `file-missing` or `identity`.
        PackageError, FormatError: a package that is not this owner's, or not whole.
        PeerError: the broker cannot be reached.
    """
    manifest, envelope = public_part(package, owner_signing=identity.signing.public)
    check_reachable(manifest.floor)
    known = PackageRecord.load(home, manifest.package_id, workload=manifest.workload)
    if known.revoked:
        raise UsageError(Code.PACKAGE_REVOKED, f"package {manifest.package_id} is revoked: seal the job again")
    package_key = KeyStore(home.keys).get(
        manifest.package_id, manifest_sha256=manifest.sha256, sealing=identity.sealing
    )
    record = folder.save(_record(folder, manifest, known, package))
    say("broker")
    serving = broker.ensure()
    say("reference")
    policy = _policy(manifest, known.deployment)
    say("delegate")
    delegation = Delegation(
        broker_public=serving.public,
        uses=frozenset(Use),
        not_before_us=_now_us() - _SKEW_US,
        not_after_us=max(
            _now_us() + (policy.max_duration_s + policy.lease_s + known.deployment.valid_s + _MARGIN_S) * 1_000_000,
            _needed_by_others_us(home),
        ),
    ).sign(identity.signing)
    client = serving.client()
    client.put_delegation(delegation, identity.signing.public)
    say("deploy")
    deployment = client.add_deployment(envelope, package_key, policy)
    launch = _mint(serving, manifest, deployment, record.run_id, delegation)
    record = folder.save(replace(record, deployment=deployment, broker=serving.owner_socket))
    return Prepared(folder=folder, record=record, launch=launch)


def _needed_by_others_us(home: Home) -> int:
    """Return until when runs that go on need the broker: a new delegation takes the old one's place for all of them."""
    until_us = 0
    for folder in RunFolder.all(home):
        with contextlib.suppress(UsageError):  # a damaged record is no run that goes on
            record = folder.load()
            if record.phase is not Phase.ENDED:
                until_us = max(
                    until_us, record.created_us + (record.max_duration_s + MAX_LEASE_S + _MARGIN_S) * 1_000_000
                )
    return until_us


def _record(folder: RunFolder, manifest: Manifest, known: PackageRecord, package: Path) -> RunRecord:
    return RunRecord(
        run_id=folder.run_id,
        name=known.name,
        workload=manifest.workload,
        package=package.absolute(),
        package_id=manifest.package_id,
        manifest_sha256=manifest.sha256.hex(),
        assurance=manifest.floor.assurance.value,
        profile=manifest.floor.profile.value,
        created_us=_now_us(),
        max_duration_s=known.deployment.max_duration_s,
        supervisor=ProcessName.of(),
    )


def _policy(manifest: Manifest, deployment: Deployment) -> DeploymentPolicy:
    """Return the deployment's policy: the floor, and this installation as the only one that may open the package."""
    return DeploymentPolicy(
        assurance=manifest.floor.assurance,
        profile=manifest.floor.profile,
        egress=manifest.floor.egress,
        reference_measurements=(measure_runtime().sha256,),
        release_budget=deployment.releases,
        not_after_us=_now_us() + deployment.valid_s * 1_000_000,
        lease_s=deployment.lease_s,
        max_duration_s=deployment.max_duration_s,
    )


def _mint(serving: Serving, manifest: Manifest, deployment: str, run_id: str, delegation: Envelope) -> bytes:
    """Mint container and launch key, get the token for them, and return the launch file."""
    launch_key, container = SigningKey.generate(), f"local-{secrets.token_hex(8)}"
    token = serving.client().add_launch(
        deployment=deployment,
        run_id=run_id,
        container_id=container,
        container_source=ContainerSource.MINTED.value,
        launch_public=launch_key.public,
        lifetime_s=TOKEN_LIFETIME_S,
    )
    return LaunchFile(
        token=token,
        launch_seed=launch_key.seed(),
        broker_public=serving.public,
        broker_url=serving.runtime_url,
        delegation=delegation,
        run_id=run_id,
        container_id=container,
        container_source=ContainerSource.MINTED,
        profile=manifest.floor.profile,
    ).encode()


def _now_us() -> int:
    return time.time_ns() // 1000
