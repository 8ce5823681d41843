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
    """

    deployment: str  # its id
    # The package.
    package_id: str
    manifest_sha256: bytes
    key_commitment: bytes
    floor: Floor  # the floor that the owner signed into the manifest
    policy: DeploymentPolicy  # what this deployment demands
    revoked: bool  # whether the package's key may no longer be released
    delegation: Delegation | None  # what the package's owner lets this broker do now; None when there is no delegation

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
    """What the owner recorded of one launch."""

    jti: str  # the token's id
    # What was launched.
    deployment: str
    run_id: str
    # Where.
    container_id: str
    container_source: ContainerSource
    launch_public: bytes  # the launch key
    expires_us: int  # the end of the token's validity
    created_us: int = 0  # when it was recorded; nothing of it is dated before
    group: Group | None = None  # its place among the machines of one group; None for an ordinary run


@lru_cache(maxsize=128)
def _digest(part: Floor | DeploymentPolicy) -> bytes:
    # Of equal values, and so of equal canonical bytes: a gate asks for the same few a dozen times a release.
    return part.sha256
