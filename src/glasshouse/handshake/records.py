"""What the owner recorded at the broker: the deployment and the launch that evidence is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from glasshouse.attestation.claims import ContainerSource
from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.handshake.delegation import Delegation
from glasshouse.wire.group import Group
from glasshouse.wire.policy import Floor


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentRecord:
    """What the owner recorded of a deployment.

    Law: a record whose policy loosens its floor does not exist.

    Attributes:
        deployment: its id.
        package_id, manifest_sha256, key_commitment: the package.
        floor: the floor that the owner signed into the manifest.
        policy: what this deployment demands.
        revoked: whether the package's key may no longer be released.
        delegation: what the package's owner lets this broker do now; None when there is no delegation.
    """

    deployment: str
    package_id: str
    manifest_sha256: bytes
    key_commitment: bytes
    floor: Floor
    policy: DeploymentPolicy
    revoked: bool
    delegation: Delegation | None

    def __post_init__(self) -> None:
        self.policy.tightens(self.floor)

    @property
    def floor_sha256(self) -> bytes:
        """The floor's digest, as in token and EAR."""
        return _digest(self.floor)

    @property
    def policy_sha256(self) -> bytes:
        """The policy's digest, as in token and EAR."""
        return _digest(self.policy)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRecord:
    """What the owner recorded of one launch.

    Attributes:
        jti: the token's id.
        deployment, run_id: what was launched.
        container_id, container_source: where.
        launch_public: the launch key.
        expires_us: the end of the token's validity.
        created_us: when it was recorded; nothing of it is dated before.
        group: its place among the machines of one group; None for an ordinary run.
    """

    jti: str
    deployment: str
    run_id: str
    container_id: str
    container_source: ContainerSource
    launch_public: bytes
    expires_us: int
    created_us: int = 0
    group: Group | None = None


@lru_cache(maxsize=128)
def _digest(part: Floor | DeploymentPolicy) -> bytes:
    # Of equal values, and so of equal canonical bytes: a gate asks for the same few a dozen times a release.
    return part.sha256
