"""Check 15, and what the release of a leg leaves in the database.

Laws: the caller holds the deployment's row; a line advances in the transaction of the release, with machine 0's, which
is in one transaction with the others'; nothing is written before everything that could still refuse was looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, RowMapping, bindparam, insert, select, update

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.broker.store import audit_log
from glasshouse.broker.store.database import BrokerState, OvertakenError
from glasshouse.broker.store.database_schema import abandoned, legs, line_launches, lines, releases
from glasshouse.broker.store.line_rows import LineMemory, Newest, envelope_in, line_record
from glasshouse.broker.store.recorded import DeploymentStanding
from glasshouse.handshake.lines import (
    UNKNOWN_HOLDER,
    Head,
    LineRecord,
    Terms,
    check_15_line,
    check_rewound,
    forked,
    released,
)
from glasshouse.handshake.records import LaunchRecord
from glasshouse.wire.crypto import key_id
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.group import Group
from glasshouse.wire.lines.line_start import LineStart
from glasshouse.wire.lines.statements import LegAbandoned

_ABANDONED_AT_ONCE = 64  # as many as a view of the line has

# Built once.
_MACHINES = (
    select(
        legs.c.leg,
        legs.c.machine,
        legs.c.run_id,
        releases.c.evidence_public,
        releases.c.contact_us,
        releases.c.head,
        releases.c.receipt_sha256,
    )
    .join(releases, releases.c.run_id == legs.c.run_id)
    .where(legs.c.line == bindparam("line"), legs.c.leg.between(bindparam("first"), bindparam("last")))
    .order_by(legs.c.leg, legs.c.machine)
)
_PREVIOUS = select(legs.c.previous).where(legs.c.run_id == bindparam("run_id"))
_ORDER = select(line_launches.c.order).where(line_launches.c.jti == bindparam("jti"))
_TAKE = insert(legs)
_ADVANCE = update(lines).where(lines.c.id == bindparam("line"), lines.c.leg == bindparam("before"))
_CURRENT = select(lines.c.leg).where(lines.c.id == bindparam("line"))
_STATED = select(abandoned.c.leg).where(abandoned.c.line == bindparam("line"))


@dataclass(frozen=True, kw_only=True, slots=True)
class LegRelease:
    """A release of a leg that passed check 15, and is not yet written down."""

    start: LineStart  # as the EAR has it
    # The line as it is advanced, and its head afterwards; None for a release that is only repeated.
    before: LineRecord | None = None
    head: Head | None = None


def check_15(
    connection: Connection,
    standing: DeploymentStanding,
    launch: LaunchRecord,
    memory: LineMemory,
    *,
    again: bool,
    broker_public: bytes,
    now_us: int,
) -> LegRelease | None:
    """Run check 15 for a launch; a run of no line passes it as None.

    Args:
        again: whether this runtime was released to before, with the same keys.

    Raises:
        CheckFailedError: as `check_15_line`.
    """
    if launch.line is None:
        return None
    line = line_record(connection, launch.line.id, broker_public=broker_public)
    if again and line is not None and launch.line.leg == line.leg:  # a lost answer: the same `line`, uncounted
        previous = connection.execute(_PREVIOUS, {"run_id": launch.run_id}).scalar_one()
        return LegRelease(start=replace(launch.line, previous=previous))
    order = connection.execute(_ORDER, {"jti": launch.jti}).scalar_one()
    order = order and envelope_in(order)
    line, head = next_leg(connection, standing, line, launch.line, launch.group, order, memory, now_us)
    previous = (line.holder or UNKNOWN_HOLDER) if launch.line.leg > 1 else None
    return LegRelease(start=replace(launch.line, previous=previous), before=line, head=head)


def next_leg(
    connection: Connection,
    standing: DeploymentStanding,
    line: LineRecord | None,
    start: LineStart,
    group: Group | None,
    order: Envelope | None,
    memory: LineMemory,
    now_us: int,
) -> tuple[LineRecord, Head]:
    """Judge whether a leg may be released now; return its line, and the head that it would begin from.

    Raises:
        CheckFailedError: as `check_15_line`.
    """
    policy = standing.record.policy
    terms = Terms(
        deployment=standing.record.deployment,
        machines=1 if group is None else group.machines,
        ranks=1 if group is None else group.ranks,
        max_legs=policy.max_legs,
        owner=standing.owner,
        over="" if line is None else ended(machines_of(connection, line), line, policy.lease_s, now_us),
        order=order,
    )
    line = check_15_line(line, start, terms)
    if not start.rewind:
        return line, line.head
    header = None if start.checkpoint is None else memory.header(line.id, start.checkpoint)
    is_it = header is not None and (header.line, header.seq) == (line.id, start.seq)
    return line, check_rewound(start, header.step if header is not None and is_it else None)


def later_leg(connection: Connection, start: LineStart) -> CheckFailedError | None:
    """Return the refusal of a leg that was released, where a later one was since."""
    leg = connection.execute(_CURRENT, {"line": start.id}).scalar_one()
    return None if leg == start.leg else forked(start.leg, leg)


def machines_of(connection: Connection, line: LineRecord, *, first: int = 0) -> Sequence[RowMapping]:
    """Return the machines of the current leg, or of all from `first` to it, and what they reported since."""
    named = {"line": line.id, "first": first or line.leg, "last": line.leg}
    return connection.execute(_MACHINES, named).mappings().all()


def ended(machines: Sequence[RowMapping], line: LineRecord, lease_s: int, now_us: int) -> str:
    """Return how the current leg ended, as `LineRecord.ended`."""
    return line.ended(
        receipts=left_receipts(machines, line),
        contact_us=max((row["contact_us"] for row in machines), default=0),
        lease_s=lease_s,
        now_us=now_us,
    )


def left_receipts(machines: Sequence[RowMapping], line: LineRecord) -> bool:
    """Return whether every machine of a leg left a receipt."""
    return len(machines) == line.machines and all(row["receipt_sha256"] for row in machines)


def write_leg(
    broker: BrokerState,
    connection: Connection,
    standing: DeploymentStanding,
    launch: LaunchRecord,
    leg: LegRelease,
    *,
    evidence_public: bytes,
    now_us: int,
) -> None:
    """Record a machine of a leg; with machine 0 the line advances, and the legs before that left nothing are stated.

    Raises:
        OvertakenError: another process was faster, and the transaction is to be run again.
    """
    start, line, head = leg.start, leg.before, leg.head
    if line is None or head is None:
        return
    machine = 0 if launch.group is None else launch.group.machine
    connection.execute(
        _TAKE,
        {
            "line": line.id,
            "leg": start.leg,
            "machine": machine,
            "run_id": launch.run_id,
            "jti": launch.jti,
            "previous": start.previous,
        },
    )
    if machine != 0:
        return
    if line.leg:
        _state_abandoned(broker, connection, standing, line, now_us)
    after = released(line, start, holder=key_id(evidence_public), head=head, now_us=now_us)
    put_line(connection, line, after)


def keep_leg(memory: LineMemory, launch: LaunchRecord, leg: LegRelease | None, *, evidence_public: bytes) -> None:
    """Keep beside the database which leg was released, once all of its release is written and may be committed.

    What is kept of a release that is then taken back would fence the leg before for nothing.
    """
    if leg is not None and (launch.group is None or launch.group.machine == 0):
        memory.keep(leg.start.id, Newest(leg=leg.start.leg, holder=key_id(evidence_public), head=leg.head))


def put_line(connection: Connection, before: LineRecord, after: LineRecord, **more: Any) -> None:
    """Write what changed of a line; raises `OvertakenError` where its leg is another meanwhile."""
    values = {
        "line": before.id,
        "before": before.leg,
        "leg": after.leg,
        "holder": after.holder,
        "lost": after.lost,
        "since_us": after.since_us,
        "head_seq": after.head.seq,
        "head_step": after.head.step,
        "head": after.head.digest,
        "order_us": after.order_us,
    }
    if connection.execute(_ADVANCE, values | more).rowcount != 1:
        raise OvertakenError


def _state_abandoned(
    broker: BrokerState, connection: Connection, standing: DeploymentStanding, line: LineRecord, now_us: int
) -> None:
    """Sign that legs up to the current one are over without a receipt of each machine."""
    first = max(1, line.leg - _ABANDONED_AT_ONCE + 1)
    of_leg: dict[int, list[RowMapping]] = {leg: [] for leg in range(first, line.leg + 1)}
    for row in machines_of(connection, line, first=first):
        of_leg[row["leg"]].append(row)
    stated = set(connection.execute(_STATED, {"line": line.id}).scalars())
    for leg, rows in of_leg.items():
        if leg in stated or left_receipts(rows, line):
            continue
        head = next((row["head"] for row in rows if row["machine"] == 0), None)
        evidence = tuple(key_id(row["evidence_public"]) for row in rows)
        if not rows and leg == line.leg and line.holder is not None:  # forgotten, and named by a note or a ticket
            evidence = (line.holder,)
        statement = LegAbandoned(
            deployment=line.deployment,
            leg=leg,
            line=line.id,
            evidence=evidence,
            manifest_sha256=standing.record.manifest_sha256,
            run_ids=tuple(row["run_id"] for row in rows),
            seq=line.seq,
            digest=None if line.ticket is None else line.ticket.digest,
            head=None if head is None else envelope_in(head),
            time_us=now_us,
            why="lost" if line.lost else "lease",
        )
        envelope = statement.sign(broker.key).encode()
        connection.execute(insert(abandoned).values(line=line.id, leg=leg, envelope=envelope))
        audit_log.append(
            connection,
            "leg-abandoned",
            now_us,
            deployment=line.deployment,
            leg=leg,
            line=line.id.hex(),
            why=statement.why,
        )


def line_facts(line: LineStart | None) -> dict[str, str | int]:
    """Return what an audit record has of a launch's leg; nothing for a run of no line."""
    return {} if line is None else {"leg": line.leg, "line": line.id.hex(), "seq": line.seq}
