"""What a run's broker is given before the run is placed: the owner's delegation, and the launch of each machine."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

from glasshouse.attestation.claims import ContainerSource
from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.broker.client.owner_client import OwnerClient
from glasshouse.broker.http_api import LaunchRequest, LineRequest
from glasshouse.errors import Code, FormatError, PeerError, UsageError
from glasshouse.handshake.delegation import RUN_USES, Delegation, Use
from glasshouse.handshake.launch import LaunchFile, TokenClaims, parse_token_at_issue
from glasshouse.jobs.define.hardware_file import kinds_wanted
from glasshouse.jobs.define.run_terms import RunTerms
from glasshouse.jobs.gates.embedded import Serving
from glasshouse.jobs.gates.known_gates import GateBroker
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.owner.rundir import RunFolder, RunRecord
from glasshouse.package.manifest import Manifest
from glasshouse.providers.place.local import LocalPlace
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.group import Group
from glasshouse.wire.lines.line_start import LineStart

# Clocks differ; a delegation that begins now would begin too late for a runtime whose clock is behind.
_SKEW_US = 120_000_000
_DELEGATION_TRIES = 5
TOKEN_LIFETIME_S = 900


@dataclass(frozen=True, kw_only=True, slots=True)
class LaterLeg:
    """What a leg after the first goes on from."""

    before: RunRecord  # of the leg before it, on machine 0
    terms: RunTerms  # of the line
    line: LineRequest  # which leg, and from where

    @property
    def deployment(self) -> str:
        """The line's deployment."""
        assert self.before.deployment is not None  # noqa: S101 - it was launched
        return self.before.deployment


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A run that can be placed."""

    folder: RunFolder
    record: RunRecord
    launch: bytes  # the launch file; secret
    # Folders and launch files of the other machines of its group, in order.
    others: tuple[tuple[RunFolder, bytes], ...] = ()

    def __repr__(self) -> str:
        return f"Prepared({self.folder.run_id})"


def delegate(
    client: OwnerClient, identity: Identity, broker: bytes, *, store: bytes | None, not_after_us: int
) -> Envelope:
    """Delegate to a broker and return what was signed; one that has a newer delegation is given a newer still.

    Args:
        store: the key of its store, if it has one. It is named for a run without a line too: this delegation takes the
            place of that of runs that have one.

    A delegation there of a time that has not come raises `UsageError`.
    """
    serial_us = now_us()
    for _ in range(_DELEGATION_TRIES):
        signed = Delegation(
            broker_public=broker,
            uses=RUN_USES if store is None else RUN_USES | {Use.STORE},
            not_before_us=now_us() - _SKEW_US,
            not_after_us=not_after_us,
            serial_us=serial_us,
            store_public=store,
        ).sign(identity.signing)
        kept_us = client.put_delegation(signed, identity.signing.public)
        if kept_us == serial_us:
            return signed
        if kept_us > now_us() + _SKEW_US:
            break
        serial_us = max(now_us(), kept_us + 1)
    raise UsageError(
        Code.CHAIN_DELEGATION,
        "the broker has a delegation of yours that is newer than now, and keeps it",
        hint="set the clock that is wrong: timedatectl set-ntp true",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Minted:
    """A launch that was recorded."""

    launch: bytes  # the launch file; secret
    token: TokenClaims

    def __repr__(self) -> str:
        return f"Minted({self.token.run_id})"


def mint(
    serving: Serving | GateBroker,
    manifest: Manifest,
    deployment: str,
    policy: DeploymentPolicy,
    run_id: str,
    delegation: Envelope,
    group: Group | None,
    *,
    line: LineRequest | None = None,
    broker_url: str,
    place: str,
) -> Minted:
    """Mint container and launch key, and have the launch recorded; raises `PeerError` for a token of anything else."""
    kind = place if place == LocalPlace.name else "ssh"
    launch_key, container = SigningKey.generate(), f"{kind}-{secrets.token_hex(8)}"
    request = LaunchRequest(
        deployment=deployment,
        run_id=run_id,
        container_id=container,
        container_source=ContainerSource.MINTED,
        launch_public=launch_key.public,
        lifetime_s=TOKEN_LIFETIME_S,
        group=group,
        line=line,
    )
    token = serving.client().add_launch(request)
    # The gate judges a runtime by its token: a looser policy of the same owner and package, moved to this
    # deployment by who can edit the gate's database, shows here.
    try:
        issued = parse_token_at_issue(token, broker_public=serving.public)
    except FormatError as error:
        raise PeerError(Code.BROKER_PROTOCOL, f"the broker's launch token does not hold: {error.message}") from None
    requested = ("deployment", "run_id", "container_id", "container_source", "launch_public", "group")
    asked = {name: getattr(request, name) for name in requested} | {
        "package_id": manifest.package_id,
        "manifest_sha256": manifest.sha256,
        "floor_sha256": manifest.floor.sha256,
        "policy_sha256": policy.sha256,
    }
    other = [name for name, value in asked.items() if getattr(issued, name) != value]
    other += [] if _is_leg(issued.line, line) else ["leg of a line"]
    if other:
        raise PeerError(
            Code.BROKER_PROTOCOL,
            f"the broker's launch token is for another {', '.join(other)} than was asked for; nothing was started",
            hint="ask who runs the broker whether its database was edited",
        )
    launch = LaunchFile(
        token=token,
        launch_seed=launch_key.seed(),
        broker_public=serving.public,
        broker_url=broker_url,
        delegation=delegation,
        run_id=run_id,
        container_id=container,
        container_source=ContainerSource.MINTED,
        profile=manifest.floor.profile,
        hardware=kinds_wanted(policy.assurance, policy.hardware),
    )
    return Minted(launch=launch.encode(), token=issued)


def _is_leg(issued: LineStart | None, asked: LineRequest | None) -> bool:
    """Return whether a token begins the leg that was asked for, of that line or of a new one."""
    if issued is None or asked is None:
        return issued is None and asked is None
    names = ("leg", "seq", "checkpoint", "rewind")
    return asked.id in (None, issued.id) and all(getattr(issued, name) == getattr(asked, name) for name in names)


def now_us() -> int:
    """Return the time here."""
    return time.time_ns() // 1000
