"""The owner's calls about lines: how one stands, and that a leg's machines are lost."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sqlalchemy import Connection, bindparam, select

from glasshouse.broker.decide.decisions import ApiAnswer
from glasshouse.broker.decide.lines.leg_release import ended, machines_of, put_line
from glasshouse.broker.http_api import MAX_BODY_BYTES, LegLostRequest, LineView
from glasshouse.broker.store import audit_log, recorded
from glasshouse.broker.store.database import BrokerState
from glasshouse.broker.store.database_schema import abandoned
from glasshouse.broker.store.line_rows import LineMemory, Newest, envelope_in, line_record
from glasshouse.broker.store.quota import Quota
from glasshouse.broker.store.recorded import DeploymentStanding
from glasshouse.broker.store.scope import Scope
from glasshouse.errors import Code, UsageError
from glasshouse.handshake.lines import LineRecord, lost
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.lines.line_start import LINE_BYTES
from glasshouse.wire.lines.statements import LegLost

_ID = re.compile(f"[0-9a-f]{{{2 * LINE_BYTES}}}")
_MOST_ABANDONED = 64  # the newest, and of these as many as a view has room for
_ABANDONED = (
    select(abandoned.c.envelope)
    .where(abandoned.c.line == bindparam("line"))
    .order_by(abandoned.c.leg.desc())
    .limit(_MOST_ABANDONED)
)


@dataclass(frozen=True, slots=True)
class LineRequests:
    """Carries out the owner's requests about lines."""

    broker: BrokerState
    quota: Quota
    memory: LineMemory

    def line(self, _body: bytes, parameters: Mapping[str, str], scope: Scope) -> ApiAnswer:
        """Return how a line stands; raises `UsageError`, `run-unknown`."""

        def look(connection: Connection) -> LineView:
            line, standing = self._found(connection, parameters, scope)
            return self._view(connection, line, standing)

        return ApiAnswer(body=self.broker.database.read(look).encode())

    def lost(self, body: bytes, parameters: Mapping[str, str], scope: Scope) -> ApiAnswer:
        """Record that a leg's machines do not exist any more, and return how its line stands then.

        Raises:
            FormatError: `schema-invalid`, or `signature-invalid` where the package's owner did not sign it.
            RefusedError: `owner-quota`.
            UsageError: `run-unknown`, or a statement about another line.
        """
        envelope, now_us = LegLostRequest.parse(body).lost, self.broker.clock_us()

        def decide(connection: Connection) -> LineView:
            before, standing = self._found(connection, parameters, scope)
            recorded.lock_deployment(connection, before.deployment)
            stated = LegLost.from_envelope(envelope, standing.owner)
            if (stated.line, stated.deployment) != (before.id, before.deployment):
                raise UsageError(Code.USAGE, "a statement about another line")
            line = lost(before, stated.leg, now_us=now_us)
            if line != before:
                self.quota.spend(connection, scope, "lost leg", now_us)
                put_line(connection, before, line)
                self.memory.keep(line.id, Newest(leg=line.leg, holder=line.holder, head=line.head))
                facts: dict[str, str | int] = {"leg": line.leg, "line": line.id.hex()}
                audit_log.append(connection, "leg-lost", now_us, deployment=line.deployment, **facts)
            return self._view(connection, line, standing)

        return ApiAnswer(body=self.broker.database.write(decide).encode())

    def _view(self, connection: Connection, line: LineRecord, standing: DeploymentStanding) -> LineView:
        machines, now_us = machines_of(connection, line), self.broker.clock_us()
        over = ended(machines, line, standing.record.policy.lease_s, now_us) if line.leg else ""
        view = LineView(
            deployment=line.deployment,
            id=line.id,
            leg=line.leg,
            machines=line.machines,
            ranks=line.ranks,
            run_ids=tuple(row["run_id"] for row in machines),
            over=over,
            contact_us=max((row["contact_us"] for row in machines), default=line.since_us),
            seq=line.seq,
            head_seq=line.head.seq,
            head_step=line.head.step,
            head=line.head.digest,
            ticket=None if line.ticket is None else line.ticket.sign(self.broker.key),
        )
        stated, room = list[Envelope](), MAX_BODY_BYTES - len(view.encode())
        for envelope in connection.execute(_ABANDONED, {"line": line.id}).scalars():
            room -= len(envelope) + 1
            if room < 0:
                break
            stated.insert(0, envelope_in(envelope))
        return replace(view, abandoned=tuple(stated))

    def _found(
        self, connection: Connection, parameters: Mapping[str, str], scope: Scope
    ) -> tuple[LineRecord, DeploymentStanding]:
        public, named = self.broker.public, parameters["line"]
        found = line_record(connection, bytes.fromhex(named), broker_public=public) if _ID.fullmatch(named) else None
        standing = None if found is None else recorded.standing(connection, found.deployment, broker_public=public)
        if found is None or standing is None or not scope.covers(standing.owner):
            raise UsageError(Code.RUN_UNKNOWN, "this broker has no such line")
        return found, standing
