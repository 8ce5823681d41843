"""A gate, as the owner's side asks it: records what it was asked, and launches the legs of one line."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.broker.http_api import LaunchRequest, LineRequest
from glasshouse.handshake.delegation import Delegation
from glasshouse.handshake.launch import TokenClaims, issue_token
from glasshouse.package.manifest import parse_signed
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.group import Group
from glasshouse.wire.lines.line_start import LineStart

LINE = bytes(range(32))
NOW_S = 1_900_000_000


class LineGate:
    """A broker, its record and its client in one; `told` is what its tokens have otherwise of a line.

    Args:
        owner: the owner's signing key.
        store: the key of its store; None where it keeps no checkpoints.
    """

    runtime_url, owner_socket = "unix:/nowhere", None

    def __init__(self, owner: bytes, *, store: bytes | None) -> None:
        self._owner, self._key, self._store = owner, SigningKey.generate(), store
        self.public = self._key.public
        self.launches: list[LaunchRequest] = []
        self.policies: list[DeploymentPolicy] = []
        self.delegations: list[Delegation] = []
        self.told: dict[str, Any] = {}

    @property
    def serving(self) -> LineGate:
        return self

    @property
    def asked(self) -> list[LineRequest | None]:
        """What launches asked for of a line, in order."""
        return [one.line for one in self.launches]

    def ensure(self) -> LineGate:
        return self

    def give_back(self) -> bool:
        return False

    def client(self) -> LineGate:
        return self

    def store_public(self) -> bytes | None:
        return self._store

    def put_delegation(self, envelope: Envelope, owner: bytes) -> int:
        self.delegations.append(Delegation.from_envelope(envelope, owner))
        return self.delegations[-1].serial_us

    def add_deployment(self, manifest: bytes, _package_key: bytes, policy: DeploymentPolicy) -> str:
        self.manifest = parse_signed(manifest, self._owner)
        self.policies.append(policy)
        return "d" * 32

    def add_group(self, _deployment: str, *, machines: int, ranks: int) -> tuple[Group, ...]:
        return tuple(Group(id=bytes(32), machines=machines, machine=one, ranks=ranks) for one in range(machines))

    def add_launch(self, request: LaunchRequest) -> str:
        self.launches.append(request)
        line, start = request.line, None
        if line is not None:
            names = ("leg", "seq", "checkpoint", "rewind")
            start = LineStart(id=line.id or LINE, **{name: getattr(line, name) for name in names})
            start = replace(start, **self.told)
        same = ("deployment", "run_id", "container_id", "container_source", "launch_public", "group")
        return issue_token(
            self._key,
            TokenClaims(
                jti=secrets.token_hex(16),
                package_id=self.manifest.package_id,
                manifest_sha256=self.manifest.sha256,
                floor_sha256=self.manifest.floor.sha256,
                policy_sha256=self.policies[-1].sha256,
                issued_s=NOW_S,
                expires_s=NOW_S + request.lifetime_s,
                line=start,
                **{name: getattr(request, name) for name in same},
            ),
        )
