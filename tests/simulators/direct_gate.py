"""A gate whose decisions are called in this process, its store's memory, and owner and machines of lines before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from starlette.routing import compile_path

from glasshouse.attestation.measurements.measured import References
from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.broker.client.owner_client import OwnerClient, Reply
from glasshouse.broker.decide.challenges import ChallengeIssuer, GateLimits
from glasshouse.broker.decide.countersigning import Countersigner
from glasshouse.broker.decide.decisions import ApiAnswer
from glasshouse.broker.decide.group_release import ReleaseRequests
from glasshouse.broker.decide.key_release import ReleaseGate
from glasshouse.broker.decide.lines.counting import CheckpointCounter
from glasshouse.broker.decide.lines.leg_launch import catch_up
from glasshouse.broker.decide.owner_views import OwnerViews
from glasshouse.broker.http.endpoints import OwnerCall
from glasshouse.broker.http_api import LineRequest, LineView
from glasshouse.broker.serving import _owner_calls
from glasshouse.broker.store.broker_state import open_broker, system_clock_us
from glasshouse.broker.store.line_rows import Newest
from glasshouse.broker.store.quota import Quota
from glasshouse.broker.store.scope import EVERYTHING
from glasshouse.evidence.events import EventType
from glasshouse.handshake.delegation import RUN_USES, Delegation, Use
from glasshouse.handshake.messages import Challenge
from glasshouse.handshake.runtime_side import challenge_request, check_release
from glasshouse.tamper.stage import Actor, Owner
from glasshouse.wire.crypto import SigningKey, key_id, lengths_prefixed, sha256
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.group import Group
from glasshouse.wire.lines.checkpoint import CheckpointHeader
from glasshouse.wire.lines.line_start import LineStart
from glasshouse.wire.lines.statements import COUNT_PATH, CheckpointMessage, LegLost, ResumeOrder, Stored, Ticket
from glasshouse.wire.policy import Assurance
from glasshouse.wire.states import State
from simulators.reporting import Reporter

LEASE_S = 600
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
            before = replace(before, leg=newest.leg, holder=newest.holder, head=newest.head)
        if newest.ticket is not None and _seq(newest.ticket) > _seq(before.ticket):
            before = replace(before, ticket=newest.ticket)
            self.store(Ticket.parse(newest.ticket.payload))
        self.kept[line] = before

    def header(self, _line: bytes, digest: bytes) -> CheckpointHeader | None:
        return self.headers.get(digest)

    def store(self, ticket: Ticket) -> None:
        """Have the header of a checkpoint, in which a gate looks at three members."""
        header = SimpleNamespace(line=ticket.line, seq=ticket.seq, step=ticket.step)
        self.headers[ticket.digest] = cast(CheckpointHeader, header)


def _seq(ticket: Envelope | None) -> int:
    return 0 if ticket is None else Ticket.parse(ticket.payload).seq


class DirectGate:
    """The same decisions as behind the sockets, without them."""

    runtime_url = "http://127.0.0.1:1"

    def __init__(self, directory: Path, memory: StoreMemory | None = None) -> None:
        self.directory, self.memory, self.offset_us = directory, memory or StoreMemory(), 0
        self.store_key = SigningKey.generate()
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
            COUNT_PATH: CheckpointCounter(broker, memory).count,
        }
        views = OwnerViews(broker, stores=False, store_public=self.store_key.public)
        calls = [OwnerCall("GET", "/v1/broker", lambda *_: views.identity())]
        calls += _owner_calls(broker, views, Quota(), None, memory)
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

    def _send(self, method: str, path: str, body: bytes | None) -> Reply:
        return self._gate.send(method, path, body)


@dataclass(frozen=True, kw_only=True, slots=True)
class _DirectActor(Actor):
    gate: DirectGate

    def post(self, path: str, body: bytes) -> Reply:
        return self.gate.send("POST", path, body)


class LineOwner(Owner):
    """An owner whose gate keeps checkpoints."""

    def __init__(self, gate: DirectGate, *, releases: int = 1, max_legs: int = 100, **more: Any) -> None:
        super().__init__(gate, releases=releases, **more)
        self.gate, self.store, self.releases_most = gate, gate.store_key, releases
        self.delegate()
        if max_legs != 1:
            self.redeploy(max_legs=max_legs)

    def delegate(self, *, uses: frozenset[Use] = RUN_USES | {Use.STORE}) -> None:
        """Delegate anew, to this gate and its store."""
        now_us = self.gate.clock_us()
        self.delegation = Delegation(
            broker_public=self.gate.broker_public,
            uses=uses,
            not_before_us=now_us - HOUR_US,
            not_after_us=now_us + 24 * HOUR_US,
            serial_us=now_us,
            store_public=self.store.public if Use.STORE in uses else None,
        ).sign(self.signing)
        self.client().put_delegation(self.delegation, self.signing.public)

    def redeploy(self, *, max_legs: int) -> None:
        """Record another deployment of the same package, which lets this many legs in without an order."""
        policy = DeploymentPolicy(
            assurance=Assurance.SOFTWARE,
            profile=self.manifest.floor.profile,
            egress=self.manifest.floor.egress,
            references=References.of(self.measurement),
            release_budget=self.releases_most,
            not_after_us=self.gate.clock_us() + 24 * HOUR_US,
            lease_s=LEASE_S,
            max_duration_s=3600,
            max_legs=max_legs,
        )
        self.deployment = self.client().add_deployment(self.manifest.sign(self.signing), self.package_key, policy)

    def leg(self, asked: LineRequest | None = None, *, group: Group | None = None) -> Machine:
        """Launch a leg, of a new line if none is named, and return the machine."""
        launch = self.launch(group=group, lifetime_s=24 * 3600, line=asked or LineRequest())
        actor = Actor.enter(self, launch)
        direct = _DirectActor(
            owner=self, launch=launch, hpke=actor.hpke, evidence=actor.evidence, url="", gate=self.gate
        )
        return Machine(direct, self.gate)

    def next(self, line: bytes, **changes: Any) -> LineRequest:
        """Return what asks for the next leg, as the gate shows the line."""
        view = self.client().line(line)
        asked = LineRequest(id=line, leg=view.leg + 1, seq=view.head_seq, checkpoint=view.head, ticket=view.ticket)
        return replace(asked, **changes)

    def order(self, asked: LineRequest, *, signer: SigningKey | None = None, **changes: Any) -> LineRequest:
        """Return what is asked with an order for it."""
        assert asked.id is not None
        order = ResumeOrder(
            deployment=self.deployment,
            digest=asked.checkpoint,
            leg=asked.leg,
            line=asked.id,
            rewind=asked.rewind,
            seq=asked.seq,
            serial_us=self.gate.clock_us(),
        )
        return replace(asked, order=replace(order, **changes).sign(signer or self.signing))

    def lost(self, line: bytes, leg: int, *, signer: SigningKey | None = None) -> LineView:
        """Report that a leg's machines do not exist any more."""
        lost = LegLost(deployment=self.deployment, leg=leg, line=line, serial_us=self.gate.clock_us())
        return self.client().leg_lost(line, lost.sign(signer or self.signing))


@dataclass
class Machine:
    """A machine that was launched for a leg, and what it has of its line."""

    actor: _DirectActor
    gate: DirectGate
    seq: int = 0  # of the last that was counted, as far as it was told
    head: bytes | None = None
    tickets: list[Ticket] = field(default_factory=list)

    @property
    def owner(self) -> LineOwner:
        owner = self.actor.owner
        assert isinstance(owner, LineOwner)
        return owner

    @property
    def start(self) -> LineStart:
        line = self.actor.launch.claims().line
        assert line is not None
        return line

    @property
    def line(self) -> bytes:
        return self.start.id

    @property
    def key_id(self) -> str:
        return key_id(self.actor.evidence.public)

    @cached_property
    def reporter(self) -> Reporter:
        """Its log, up to where it was released to."""
        reporter = Reporter(self.actor)
        reporter.go_on(State.HARDENED)
        return reporter

    def attest(self) -> Reply:
        """Send evidence for a new challenge, by the gate's clock."""
        self.challenge = Challenge.parse(
            self.actor.post("/v1/challenge", challenge_request(self.actor.launch)).content()
        )
        times = {"issued_us": self.challenge.issued_us, "started_us": self.challenge.issued_us}
        self.evidence = self.actor.sign(replace(self.actor.claims(self.challenge), **times))
        return self.actor.send(self.evidence)

    def opened(self, reply: Reply) -> LineStart:
        """Open a release as agent and custodian do, and return the leg in its EAR."""
        actor, manifest = self.actor, self.actor.owner.manifest
        release = check_release(
            reply.content(),
            actor.launch,
            self.challenge,
            evidence=self.evidence,
            evidence_public=actor.evidence.public,
            manifest_sha256=manifest.sha256,
            floor=manifest.floor,
            now_us=self.gate.clock_us(),
        )
        line = release.ear.line
        assert line is not None
        info = release.info + lengths_prefixed(line.encode())
        assert actor.hpke.open(release.sealed_key, info=info) == actor.owner.package_key
        self.seq, self.head = line.next_seq - 1, line.checkpoint
        return line

    def begin(self) -> Machine:
        """Attest, and be released to."""
        self.opened(self.attest())
        return self

    def message(self, *, signer: SigningKey | None = None, store: SigningKey | None = None, **changes: Any) -> bytes:
        """Return the message that asks for its next checkpoint to be counted."""
        seq, owner = self.seq + 1, self.owner
        digest = changes.get("digest", sha256(b"checkpoint %d of " % seq + self.actor.evidence.public))
        said: dict[str, Any] = {"deployment": owner.deployment, "leg": self.start.leg, "line": self.line, "seq": seq}
        said = said | {"digest": digest} | {name: value for name, value in changes.items() if name in said}
        stored = Stored(**said).sign(store or owner.store)
        about = {"previous": self.head, "run_id": self.actor.launch.run_id, "step": 100 * seq, "stored": stored}
        return CheckpointMessage(**said | about | changes).sign(signer or self.actor.evidence).encode()

    def count(self, message: bytes | None = None) -> Reply:
        """Have a checkpoint counted."""
        return self.actor.post(COUNT_PATH, message or self.message())

    def checkpoint(self) -> Ticket:
        """Have the next checkpoint stored and counted, and keep the ticket."""
        return self.ticket(self.count())

    def ticket(self, reply: Reply) -> Ticket:
        """Return the ticket in an answer, and go on from it."""
        ticket = Ticket.parse_signed(reply.content(), self.gate.broker_public)
        self.seq, self.head = ticket.seq, ticket.digest
        self.tickets.append(ticket)
        return ticket

    def reports(self) -> Reply:
        """Report where its log is."""
        self.reporter.log.append(EventType.NOTICE, {"code": "alive", "value": None})
        return self.reporter.send(self.reporter.submission())

    def ends(self) -> Reply:
        """Wipe, and leave a receipt."""
        reporter = self.reporter
        reporter.end()
        reporter.send(reporter.submission()).content()
        return self.actor.post("/v1/receipt", reporter.receipt())
