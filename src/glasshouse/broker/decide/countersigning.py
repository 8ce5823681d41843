"""What an attested runtime reports: heads of its log, and its receipt, countersigned.

One transaction each. The rules themselves are `evidence.heads` and `evidence.bundle`; here is kept what they
compare with. A report that is sent again is answered with the same countersignature.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, Connection, update

from glasshouse.broker.decide.decisions import ApiAnswer, Decision, Effect, keep
from glasshouse.broker.store import audit_log, recorded
from glasshouse.broker.store.database import BrokerState, OvertakenError
from glasshouse.broker.store.database_schema import releases
from glasshouse.errors import Code, RefusedError
from glasshouse.evidence.bundle import (
    CountersignedReceipt,
    ReceiptAnswer,
    ReceiptSubmission,
    SignedReceiptRefusedError,
    countersign_receipt,
)
from glasshouse.evidence.heads import CountersignedHead, HeadSubmission, check_signed, claimed_head, countersign
from glasshouse.evidence.receipt import Receipt
from glasshouse.handshake.delegation import Use
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.states import State

_MOST_SPOILED = 4096
_ENDING = frozenset({State.ZEROIZING, State.ZEROIZED})


class Countersigner:
    """Countersigns what attested runtimes report."""

    def __init__(self, broker: BrokerState) -> None:
        self._broker = broker
        self._spoiled: OrderedDict[str, None] = OrderedDict()  # keys that signed what is no receipt of their run

    def heads(self, body: bytes) -> Decision:
        """Read a head; what is returned countersigns it if it is larger than and consistent with the last one.

        Raises:
            RefusedError: `run-unknown`, `package-revoked` where the owner ends the package's runs, `line-superseded`
                of a leg after which another was released, or as `evidence.heads.countersign`.
            VerificationError: `delegation-invalid`: the owner has not delegated this, or no longer.
            FormatError: for what is not a submission.
        """
        submission = HeadSubmission.parse(body)
        run_id, signer = claimed_head(submission.head).run_id, _signer(submission.head)

        def judge(connection: Connection) -> tuple[recorded.AttestedRuntime, CountersignedHead]:
            found = recorded.attested(connection, run_id, signer, broker_public=self._broker.public)
            if found.stopped:
                raise RefusedError(Code.PACKAGE_REVOKED, "the package's owner ends its runs")
            now_us = self._now_us(found)
            self._delegated(connection, found, now_us)
            signed = countersign(
                submission.head,
                submission.proof,
                run_id=found.row["run_id"],
                previous=found.head,
                evidence_public=found.row["evidence_public"],
                broker_key=self._broker.key,
                now_us=now_us,
            )
            # Also a head that is repeated: its answer would renew the lease.
            if found.superseded and signed.head.state not in _ENDING:
                raise RefusedError(Code.LINE_SUPERSEDED, "a later leg of this line was released: zeroize")
            return found, signed

        def decide(connection: Connection) -> ApiAnswer:
            found, signed = judge(connection)
            if signed is not found.head:
                unchanged = releases.c.head_size == found.row["head_size"]
                values = {"head": signed.encode(), "head_size": signed.head.size, "contact_us": self._now_us(found)}
                _change(connection, found, unchanged, values)
            return ApiAnswer(body=signed.encode())

        # What would be refused is refused here: a genuine head with another proof is no sign of life, nor is one
        # that is repeated, which a recording is enough for.
        found, signed = self._broker.database.read(judge)
        if signed is found.head:
            return Decision(decide=lambda: ApiAnswer(body=signed.encode()), effect=Effect.CHARGE)
        return Decision(decide=partial(self._broker.database.write, decide), effect=Effect.CREDIT)

    def receipt(self, body: bytes) -> Decision:
        """Read a receipt; what is returned countersigns it if the runtime's last head, countersigned, is its end.

        Raises:
            RefusedError: `run-unknown`, or as `evidence.bundle.countersign_receipt`.
            VerificationError: `delegation-invalid`: the owner has not delegated this, or no longer.
            FormatError: for what is not a submission.
        """
        submission = ReceiptSubmission.parse(body)
        run_id, signer = claimed_head(submission.head).run_id, _signer(submission.head)

        def judge(connection: Connection) -> tuple[recorded.AttestedRuntime, CountersignedReceipt, ApiAnswer]:
            found = recorded.attested(connection, run_id, signer, broker_public=self._broker.public)
            check_signed(submission.head, found.row["evidence_public"])
            if found.head is None or found.head.head != claimed_head(submission.head):
                raise RefusedError(Code.HEAD_INCONSISTENT, "a receipt whose final head was not countersigned")
            now_us = self._now_us(found)
            envelope = self._delegated(connection, found, now_us)
            signed = self._countersigned(submission.receipt, found, found.head, now_us)
            answer = ReceiptAnswer(countersignature=signed.encode(), delegation=envelope)
            return found, signed, ApiAnswer(body=answer.encode())

        def decide(connection: Connection) -> ApiAnswer:
            found, signed, answer = judge(connection)
            if not found.row["receipt"]:
                now_us = self._now_us(found)
                outcome = Receipt.parse(
                    Envelope.parse(submission.receipt, max_bytes=len(submission.receipt)).payload
                ).outcome.value
                values = {
                    "receipt": signed.encode(),
                    "receipt_sha256": signed.receipt_sha256,
                    "outcome": outcome,
                    "contact_us": now_us,
                }
                _change(connection, found, releases.c.receipt.is_(None), values)
                audit_log.append(
                    connection,
                    "receipt",
                    now_us,
                    deployment=found.row["deployment"],
                    outcome=outcome,
                    receipt_sha256=signed.receipt_sha256.hex(),
                    run_id=signed.run_id,
                )
            return answer

        # As with heads: a recorded head beside any receipt, and a receipt that is repeated, decide nothing.
        found, _, answer = self._broker.database.read(judge)
        if found.row["receipt"]:
            return Decision(decide=lambda: answer, effect=Effect.CHARGE)
        return Decision(decide=partial(self._broker.database.write, decide), effect=Effect.CREDIT)

    def _countersigned(
        self, receipt: bytes, found: recorded.AttestedRuntime, final: CountersignedHead, now_us: int
    ) -> CountersignedReceipt:
        row, previous = found.row, None
        if row["receipt"]:
            previous = CountersignedReceipt.parse_signed(row["receipt"], self._broker.public)
        # With 400 outputs a receipt costs ten times another message: a run's key has one looked at, and not many.
        key = row["evidence_public"].hex()
        if previous is None and key in self._spoiled:
            raise RefusedError(Code.HEAD_INCONSISTENT, "a second receipt of a run whose first was refused")
        try:
            return countersign_receipt(
                receipt,
                final=final,
                previous=previous,
                evidence_public=row["evidence_public"],
                broker_key=self._broker.key,
                now_us=now_us,
            )
        except SignedReceiptRefusedError:
            keep(self._spoiled, key, None, most=_MOST_SPOILED)
            raise

    def _now_us(self, found: recorded.AttestedRuntime) -> int:
        """Return the time, or that of the run's release or last head where the clock was set back since."""
        dated_us: int = max(found.row["released_us"], found.head.time_us if found.head else 0)
        return max(self._broker.clock_us(), dated_us)

    def _delegated(self, connection: Connection, found: recorded.AttestedRuntime, now_us: int) -> bytes:
        """Return the owner's delegation of this use, looked up anew: they may have narrowed it, or let it end."""
        return recorded.delegated(
            connection, found.package_id, Use.COUNTERSIGN, broker_public=self._broker.public, now_us=now_us
        )


def _change(
    connection: Connection,
    found: recorded.AttestedRuntime,
    unchanged: ColumnElement[bool],
    values: dict[str, Any],
) -> None:
    mine = releases.c.evidence_public == found.row["evidence_public"]
    if connection.execute(update(releases).where(mine, unchanged).values(**values)).rowcount != 1:
        raise OvertakenError


def _signer(envelope: bytes) -> str:
    return Envelope.parse(envelope, max_bytes=len(envelope)).signatures[0][0]
