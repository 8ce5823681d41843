"""The owner's side of the broker benchmark: packages, deployments with exact budgets, launches; before the clock."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

from glasshouse.attestation.claims import ContainerSource
from glasshouse.attestation.policy import MAX_RELEASES, DeploymentPolicy
from glasshouse.broker.process import BrokerProcess
from glasshouse.handshake.delegation import Delegation, Use
from glasshouse.handshake.launch import LaunchFile
from glasshouse.package.layout import key_commitment
from glasshouse.package.manifest import Manifest
from glasshouse.wire.aead import Suite
from glasshouse.wire.fields import b64encode
from glasshouse.wire.hpke import RecipientKey
from glasshouse.wire.policy import Assurance, Floor, Profile
from glasshouse.wire.signing import SigningKey

__all__ = ["MEASUREMENT", "Owner", "Work"]

MEASUREMENT = bytes(range(32))
"""What every runtime of the benchmark measures to; to measure really would cost the clients, not the broker."""

_HOUR_US = 3600 * 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one runtime process is handed before the clock starts, ready for JSON.

    Attributes:
        manifest: the owner-signed manifest, base64url.
        launches: launch files, base64url; each is good for one release.
    """

    manifest: str
    launches: list[str]


class Owner:
    """An owner who has many packages and one broker.

    Args:
        broker: a running one.

    Attributes:
        budgets: the release budget of every deployment made so far, by its id.
    """

    def __init__(self, broker: BrokerProcess) -> None:
        self._broker = broker
        self._client = broker.client()
        self._key, self._sealing = SigningKey.generate(), RecipientKey.generate().public
        now_us = time.time_ns() // 1000
        self._delegation = Delegation(
            broker_public=broker.broker_public,
            uses=frozenset(Use),
            not_before_us=now_us - _HOUR_US,
            not_after_us=now_us + 24 * _HOUR_US,
        ).sign(self._key)
        self._client.put_delegation(self._delegation, self._key.public)
        self.budgets: dict[str, int] = {}

    def work(self, launches: int) -> list[Work]:
        """Return packages with as many launches, and deployments whose budgets are exactly these."""
        parts = [min(MAX_RELEASES, launches - at) for at in range(0, launches, MAX_RELEASES)]
        return [self._package(budget=part, launches=[part])[0] for part in parts]

    def contested(self, *, budget: int, processes: int, launches: int) -> list[Work]:
        """Return work for several processes over one deployment, which has less to give than they ask for."""
        return self._package(budget=budget, launches=[launches] * processes)

    def _package(self, *, budget: int, launches: list[int]) -> list[Work]:
        package_key, package_id = secrets.token_bytes(32), secrets.token_hex(16)
        floor = Floor(assurance=Assurance.SOFTWARE, profile=Profile.STANDARD)
        manifest = Manifest(
            package_id=package_id,
            suite=Suite.AES_256_GCM,
            chunk_bytes=1 << 20,
            workload="script",
            floor=floor,
            recipients=(self._sealing,),
            owner_signing=self._key.public,
            owner_sealing=self._sealing,
            key_commitment=key_commitment(package_key, package_id),
            index_sha256=secrets.token_bytes(32),
            index_bytes=1024,
            assets_bytes=4096,
        ).sign(self._key)
        policy = DeploymentPolicy(
            assurance=floor.assurance,
            profile=floor.profile,
            egress=(),
            reference_measurements=(MEASUREMENT,),
            release_budget=budget,
            not_after_us=time.time_ns() // 1000 + 12 * _HOUR_US,
            lease_s=600,
            max_duration_s=3600,
        )
        deployment = self._client.add_deployment(manifest, package_key, policy)
        self.budgets[deployment] = budget
        return [
            Work(manifest=b64encode(manifest), launches=[self._launch(deployment) for _ in range(count)])
            for count in launches
        ]

    def _launch(self, deployment: str) -> str:
        key, run_id, container_id = SigningKey.generate(), secrets.token_hex(16), f"c-{secrets.token_hex(8)}"
        token = self._client.add_launch(
            deployment=deployment,
            run_id=run_id,
            container_id=container_id,
            container_source=ContainerSource.MINTED.value,
            launch_public=key.public,
            lifetime_s=6 * 3600,
        )
        launch = LaunchFile(
            token=token,
            launch_seed=key.seed(),
            broker_public=self._broker.broker_public,
            broker_url=self._broker.runtime_url,
            delegation=self._delegation,
            run_id=run_id,
            container_id=container_id,
            container_source=ContainerSource.MINTED,
            profile=Profile.STANDARD,
        )
        return b64encode(launch.encode())
