"""A gate whose decisions are called in this process, its store's memory, and owner and machines of lines before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from starlette.routing import compile_path

from glasshouse.broker.client.owner_client import OwnerClient, Reply
from glasshouse.broker.decide.challenges import ChallengeIssuer, GateLimits
from glasshouse.broker.decide.countersigning import Countersigner
from glasshouse.broker.decide.decisions import ApiAnswer
from glasshouse.broker.decide.group_release import ReleaseRequests
from glasshouse.broker.decide.key_release import ReleaseGate
from glasshouse.broker.decide.lines.leg_launch import catch_up
from glasshouse.broker.decide.owner_views import OwnerViews
from glasshouse.broker.http_api import LaunchRequest, LineRequest
from glasshouse.broker.serving import _owner_calls
from glasshouse.broker.store.broker_state import open_broker, system_clock_us
from glasshouse.broker.store.line_rows import Newest
from glasshouse.broker.store.quota import Quota
from glasshouse.broker.store.scope import EVERYTHING
from glasshouse.handshake.delegation import RUN_USES, Delegation, Use
from glasshouse.handshake.messages import Challenge
from glasshouse.handshake.runtime_side import CheckedRelease, challenge_request, check_release
from glasshouse.tamper.stage import Actor, Owner
from glasshouse.wire.crypto import SigningKey, lengths_prefixed
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.group import Group
from glasshouse.wire.lines.checkpoint import CheckpointHeader
from glasshouse.wire.lines.line_start import LineStart
from glasshouse.wire.lines.statements import LegLost, ResumeOrder, Ticket

HOUR_US = 3600 * 1_000_000


class StoreMemory:
    """What a store keeps beside the database: it outlives one that is put back from a backup."""

    def __init__(self) -> None:
        self.kept: dict[bytes, Newest] = {}
        self.headers: dict[bytes, CheckpointHeader] = {}

    def all(self) -> dict[bytes, Newest]:
        return dict(self.kept)

    def newest(self, line: bytes) -> Newest | None:
        return self.kept.get(line)

    def keep(self, line: bytes, newest: Newest) -> None:
        before = self.kept.get(line, Newest(leg=0))
        if newest.leg > before.leg:
            before = replace(before, leg=newest.leg, holder=newest.holder)
        if newest.ticket is not None and _seq(newest.ticket) > _seq(before.ticket):
            before = replace(before, ticket=newest.ticket)
        self.kept[line] = before

    def header(self, _line: bytes, digest: bytes) -> CheckpointHeader | None:
        return self.headers.get(digest)


def _seq(ticket: Envelope | None) -> int:
    return 0 if ticket is None else Ticket.parse(ticket.payload).seq


class DirectGate:
    """The same decisions as behind the sockets, without them."""

    runtime_url = "http://127.0.0.1:1"

    def __init__(self, directory: Path, memory: StoreMemory | None = None) -> None:
        self.directory, self.memory, self.offset_us = directory, memory or StoreMemory(), 0
        self.open()

    def open(self) -> None:
        """Start, as after a restart."""
        broker, memory = open_broker(self.directory, clock_us=self.clock_us), self.memory
        catch_up(broker, memory)
        reports = Countersigner(broker)
        self.broker, self.broker_public = broker, broker.public
        self._messages = {
            "/v1/challenge": ChallengeIssuer(broker, GateLimits()).challenge,
            "/v1/evidence": ReleaseGate(broker, memory).evidence,
            "/v1/release": ReleaseRequests(broker).ask,
            "/v1/heads": reports.heads,
            "/v1/receipt": reports.receipt,
        }
        calls = _owner_calls(broker, OwnerViews(broker, stores=False), Quota(), None, memory)
        self._calls = [(call.method, compile_path(call.path)[0], call.handler) for call in calls]

    def close(self) -> None:
        self.broker.database.close()

    def clock_us(self) -> int:
        return system_clock_us() + self.offset_us

    def advance(self, seconds: float) -> None:
        self.offset_us += int(seconds * 1_000_000)

    def client(self) -> OwnerClient:
        return _DirectClient(self)

    def send(self, method: str, path: str, body: bytes | None) -> Reply:
        try:
            answer = self._answer(method, path, body or b"")
        except Exception as error:
            answer = ApiAnswer.refusal(error)
        return Reply(status=answer.status, body=answer.body)

    def _answer(self, method: str, path: str, body: bytes) -> ApiAnswer:
        if path in self._messages:
            return self._messages[path](body).decide()
        where, _, query = path.partition("?after=")
        for name, pattern, handler in self._calls:
            if name == method and (match := pattern.match(where)):
                parameters: Mapping[str, str] = match.groupdict() | ({"after": query} if query else {})
                return handler(body, parameters, EVERYTHING)
        raise AssertionError(f"no call {method} {path}")


class _DirectClient(OwnerClient):
    def __init__(self, gate: DirectGate) -> None:
        self._gate = gate

    def broker_public(self) -> bytes:
        return self._gate.broker_public

    def _send(self, method: str, path: str, body: bytes | None) -> Reply:
        return self._gate.send(method, path, body)


class LineOwner(Owner):
    """An owner whose gate keeps checkpoints."""

    def __init__(self, gate: DirectGate, *, releases: int = 1, **more: Any) -> None:
        super().__init__(gate, releases=releases, **more)
        self.gate, self.store = gate, SigningKey.generate()
        now_us = gate.clock_us()
        self.delegation = Delegation(
            broker_public=gate.broker_public,
            uses=RUN_USES | {Use.STORE},
            not_before_us=now_us - HOUR_US,
            not_after_us=now_us + 24 * HOUR_US,
            serial_us=now_us,
            store_public=self.store.public,
        ).sign(self.signing)
        self.client().put_delegation(self.delegation, self.signing.public)

    def leg(self, asked: LineRequest | None = None, *, group: Group | None = None) -> Machine:
        """Launch a leg, of a new line if none is named, and return the machine."""
        client, line = self.client(), asked or LineRequest()
        self._client = _Asking(client, line)
        try:
            launch = self.launch(group=group)
        finally:
            self._client = client
        return Machine(Actor.enter(self, launch), self.gate)

    def order(
        self, start: LineRequest, *, serial_us: int = 0, signer: SigningKey | None = None, **changes: Any
    ) -> Envelope:
        """Return the order for what is asked."""
        assert start.id is not None
        order = ResumeOrder(
            deployment=self.deployment,
            digest=start.checkpoint,
            leg=start.leg,
            line=start.id,
            rewind=start.rewind,
            seq=start.seq,
            serial_us=serial_us or self.gate.clock_us(),
        )
        return replace(order, **changes).sign(signer or self.signing)

    def lost(self, line: bytes, leg: int, *, signer: SigningKey | None = None) -> Envelope:
        """Return the statement that a leg's machines do not exist any more."""
        lost = LegLost(deployment=self.deployment, leg=leg, line=line, serial_us=self.gate.clock_us())
        return lost.sign(signer or self.signing)


@dataclass
class _Asking:
    """A client that asks for a leg with each launch."""

    client: OwnerClient
    line: LineRequest

    def add_launch(self, request: LaunchRequest) -> str:
        return self.client.add_launch(replace(request, line=self.line))


@dataclass
class Machine:
    """A machine that was launched for a leg, and what it knows of its line."""

    actor: Actor
    gate: DirectGate
    seq: int = 0
    head: bytes | None = None
    release: CheckedRelease | None = field(default=None, repr=False)

    @property
    def token(self) -> LineStart:
        line = self.actor.launch.claims().line
        assert line is not None
        return line

    def attest(self) -> Reply:
        """Send evidence for a new challenge, by the gate's clock."""
        actor, gate = self.actor, self.gate
        self.challenge = Challenge.parse(gate.send("POST", "/v1/challenge", challenge_request(actor.launch)).content())
        times = {"issued_us": self.challenge.issued_us, "started_us": self.challenge.issued_us}
        self.evidence = actor.sign(replace(actor.claims(self.challenge), **times))
        return gate.send("POST", "/v1/evidence", self.evidence)

    def opened(self, reply: Reply) -> LineStart:
        """Open a release as a custodian does, and return the leg in its EAR."""
        actor, manifest = self.actor, self.actor.owner.manifest
        self.release = check_release(
            reply.content(),
            actor.launch,
            self.challenge,
            evidence=self.evidence,
            evidence_public=actor.evidence.public,
            manifest_sha256=manifest.sha256,
            floor=manifest.floor,
            now_us=self.gate.clock_us(),
        )
        line = self.release.ear.line
        assert line is not None
        info = self.release.info
        if line.encode() not in info:
            info += lengths_prefixed(line.encode())
        assert actor.hpke.open(self.release.sealed_key, info=info) == actor.owner.package_key
        self.seq, self.head = line.next_seq - 1, line.checkpoint
        return line
