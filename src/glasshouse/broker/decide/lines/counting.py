"""Counts checkpoints: one transaction each, and for each number of a line one ticket."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from sqlalchemy import Connection

from glasshouse.broker.decide.decisions import ApiAnswer, Decision, Effect
from glasshouse.broker.decide.lines.leg_release import put_line
from glasshouse.broker.store import recorded
from glasshouse.broker.store.database import BrokerState
from glasshouse.broker.store.line_rows import Leg, LineMemory, Newest, leg_of
from glasshouse.handshake.lines import Counter, count, counted, open_message
from glasshouse.wire.crypto import key_id
from glasshouse.wire.lines.statements import CHECKPOINT_TYPE, Ticket


@dataclass(frozen=True, slots=True)
class CheckpointCounter:
    """Counts what machine 0 of the current leg has stored."""

    broker: BrokerState
    memory: LineMemory

    def count(self, body: bytes) -> Decision:
        """Read a checkpoint message; what is returned answers it with the ticket.

        Raises:
            RefusedError: `message-too-large`, `message-invalid`, `run-unknown`, or as `handshake.lines.count`.
            FormatError: `signature-invalid`.
            VerificationError: `delegation-invalid`.
        """
        envelope, message = open_message(body)
        signer, public = envelope.signatures[0][0], self.broker.public

        def judge(connection: Connection) -> tuple[Leg, Ticket]:
            leg = leg_of(connection, message.run_id, signer, broker_public=public)
            # Before anything is decided; and for a stranger's key nothing is computed.
            envelope.verify(CHECKPOINT_TYPE, leg.evidence_public)
            now_us = self.broker.clock_us()
            counter = Counter(
                leg=leg.start.leg,
                machine=leg.machine,
                run_id=leg.run_id,
                holder=key_id(leg.evidence_public),
                manifest_sha256=leg.manifest_sha256,
            )
            store = recorded.store_public(connection, leg.package_row, broker_public=public, now_us=now_us)
            return leg, count(leg.line, message, counter, store_public=store, now_us=now_us)

        def decide(connection: Connection) -> ApiAnswer:
            recorded.lock_deployment(connection, message.deployment)
            leg, ticket = judge(connection)
            signed = ticket.sign(self.broker.key)  # the same each time
            if ticket is not leg.line.ticket:
                put_line(connection, leg.line, counted(leg.line, ticket), ticket=signed.encode())
                # Before the commit: were it to fail, the message comes again, and the ticket would say the same.
                newest = Newest(leg=ticket.leg, holder=ticket.holder, ticket=signed)
                self.memory.keep(leg.line.id, newest)
            return ApiAnswer(body=signed.encode())

        # What is repeated, which a recording is enough for, and what is refused in any case takes no lock.
        leg, ticket = self.broker.database.read(judge)
        if ticket is leg.line.ticket:
            return Decision(decide=lambda: ApiAnswer(body=ticket.sign(self.broker.key).encode()), effect=Effect.CHARGE)
        return Decision(decide=partial(self.broker.database.write, decide), effect=Effect.CREDIT)
