"""Mints a launch: a container, a launch key, and the broker's token for both."""

from __future__ import annotations

import secrets

from glasshouse.attestation.claims import ContainerSource
from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.broker.http_api import LaunchRequest
from glasshouse.errors import Code, FormatError, PeerError
from glasshouse.handshake.launch import LaunchFile, parse_token_at_issue
from glasshouse.jobs.gates.run_broker import Reached
from glasshouse.package.manifest import Manifest
from glasshouse.providers.place.local import LocalPlace
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.group import Group

TOKEN_LIFETIME_S = 900


def mint(
    serving: Reached,
    manifest: Manifest,
    deployment: str,
    policy: DeploymentPolicy,
    run_id: str,
    delegation: Envelope,
    group: Group | None,
    *,
    broker_url: str,
    place: str,
) -> bytes:
    """Mint container and launch key, and return the launch file; raises `PeerError` for a token of anything else."""
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
    )
    token = serving.client().add_launch(request)
    # The gate judges a runtime by its token: a looser policy of the same owner and package, moved to this
    # deployment by who can edit the gate's database, shows here.
    try:
        issued = parse_token_at_issue(token, broker_public=serving.public)
    except FormatError as error:
        raise PeerError(Code.BROKER_PROTOCOL, f"the broker's launch token does not hold: {error.message}") from None
    asked = {
        "deployment": deployment,
        "run_id": run_id,
        "package_id": manifest.package_id,
        "manifest_sha256": manifest.sha256,
        "floor_sha256": manifest.floor.sha256,
        "policy_sha256": policy.sha256,
        "container_id": container,
        "container_source": ContainerSource.MINTED,
        "launch_public": launch_key.public,
        "group": group,
    }
    if other := [name for name, value in asked.items() if getattr(issued, name) != value]:
        raise PeerError(
            Code.BROKER_PROTOCOL,
            f"the broker's launch token is for another {', '.join(other)} than was asked for; nothing was started",
            hint="ask who runs the broker whether its database was edited",
        )
    return LaunchFile(
        token=token,
        launch_seed=launch_key.seed(),
        broker_public=serving.public,
        broker_url=broker_url,
        delegation=delegation,
        run_id=run_id,
        container_id=container,
        container_source=ContainerSource.MINTED,
        profile=manifest.floor.profile,
    ).encode()
