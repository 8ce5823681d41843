"""A gate, as the owner's side asks it: records what it was asked, and launches the legs of one line."""

from __future__ import annotations

import secrets
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.broker.http_api import LaunchRequest, LineRequest, LineView
from glasshouse.errors import Code, UsageError
from glasshouse.handshake.delegation import Delegation
from glasshouse.handshake.launch import TokenClaims, issue_token
from glasshouse.package.manifest import parse_signed
from glasshouse.wire.crypto import SigningKey, sha256
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.group import Group
from glasshouse.wire.lines.line_start import LineStart
from glasshouse.wire.lines.statements import LegAbandoned, LegLost, Ticket

LINE = bytes(range(32))
NOW_S = 1_900_000_000


def checkpoint(seq: int, fork: int = 0) -> bytes:
    """Return the digest of a checkpoint."""
    return sha256(f"checkpoint {seq} {fork}".encode())


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
        self.view: LineView | None = None
        self.lost: list[LegLost] = []

    @property
    def serving(self) -> LineGate:
        return self

    @property
    def asked(self) -> list[LineRequest | None]:
        """What launches asked for of a line, in order."""
        return [one.line for one in self.launches]

    def ensure(self) -> LineGate:
        return self

    def kept(self) -> AbstractContextManager[LineGate]:
        return nullcontext(self)

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

    def line(self, line: bytes) -> LineView:
        if line != LINE or self.view is None:
            raise UsageError(Code.RUN_UNKNOWN, "this broker has no such line")  # as of a 404
        return self.view

    def leg_lost(self, line: bytes, lost: Envelope) -> LineView:
        said = LegLost.from_envelope(lost, self._owner)
        assert said.line == line
        self.lost.append(said)
        assert self.view is not None
        self.view = replace(self.view, leg=max(said.leg, self.view.leg), over="lost")
        return self.view

    def signed(self, said: LegAbandoned) -> Envelope:
        return said.sign(self._key)

    def stands(self, **changes: Any) -> LineView:
        """Change how the line stands, from a first leg that goes on and has counted nothing."""
        first = LineView(
            deployment="d" * 32,
            id=LINE,
            leg=1,
            machines=1,
            ranks=1,
            run_ids=(self.launches[0].run_id,),
            over="",
            contact_us=NOW_S * 1_000_000,
            seq=0,
            head_seq=0,
            head_step=0,
        )
        self.view = replace(self.view or first, **changes)
        return self.view

    def ticket(self, seq: int, *, leg: int = 1, run_id: str | None = None, fork: int = 0) -> Ticket:
        """Count a checkpoint, 50 steps after the one before, by a digest of its number; `fork` makes it another."""
        ticket = Ticket(
            counted_us=NOW_S * 1_000_000,
            deployment="d" * 32,
            digest=checkpoint(seq, fork),
            holder="e" * 32,
            leg=leg,
            line=LINE,
            manifest_sha256=self.manifest.sha256,
            run_id=run_id or self.launches[0].run_id,
            seq=seq,
            step=50 * seq,
            previous=checkpoint(seq - 1) if seq > 1 else None,
        )
        head = {"head_seq": seq, "head_step": ticket.step, "head": ticket.digest}
        self.stands(seq=seq, ticket=ticket.sign(self._key), **head)
        return ticket

    def add_launch(self, request: LaunchRequest) -> str:
        self.launches.append(request)
        line, start = request.line, None
        if line is not None:
            names = ("leg", "seq", "checkpoint", "rewind")
            counted = 0 if self.view is None or self.view.seq <= line.seq else self.view.seq
            start = LineStart(id=line.id or LINE, counted=counted, **{name: getattr(line, name) for name in names})
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
