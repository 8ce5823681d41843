"""Launches of legs: a line's first one makes its id; what would be refused later is refused before anything is rented.

Law: a launch changes nothing of a line but what this gate had forgotten.
"""

from __future__ import annotations

import secrets

from sqlalchemy import Connection, insert, select

from glasshouse.broker.decide.lines.leg_release import next_leg, put_line
from glasshouse.broker.http_api import LaunchRequest, LineRequest
from glasshouse.broker.store import audit_log, recorded
from glasshouse.broker.store.database import BrokerState
from glasshouse.broker.store.database_schema import line_launches, lines, members
from glasshouse.broker.store.line_rows import LineMemory, Newest, line_record
from glasshouse.broker.store.recorded import DeploymentStanding
from glasshouse.errors import Code, RefusedError, UsageError, VerificationError
from glasshouse.handshake.delegation import Use
from glasshouse.handshake.lines import LineRecord, forward, shown
from glasshouse.wire.group import Group
from glasshouse.wire.lines.checkpoint import MAX_WORLD
from glasshouse.wire.lines.line_start import LINE_BYTES, LineStart
from glasshouse.wire.lines.statements import Ticket


def begin_leg(
    broker: BrokerState,
    connection: Connection,
    standing: DeploymentStanding,
    request: LaunchRequest,
    memory: LineMemory,
    now_us: int,
) -> LineStart | None:
    """Return where the leg of a launch begins, and make its line if it is the first; None for a run of no line.

    Raises:
        CheckFailedError: check 15, as of now.
        RefusedError: `checkpoint-foreign` for the ticket of another line, `checkpoint-incomplete` for a checkpoint
            that is not stored any more.
        FormatError: `signature-invalid` for a ticket of another gate.
        UsageError: `run-unknown`, `delegation-invalid`, or what no line can be.
    """
    asked, group = request.line, request.group
    if asked is None:
        return None
    recorded.lock_deployment(connection, request.deployment)
    try:
        public = broker.public
        recorded.delegated(connection, standing.package_row, Use.STORE, broker_public=public, now_us=now_us)
    except VerificationError as error:
        raise UsageError(error.code, f"{error.message}: nothing would keep this line's checkpoints") from None
    if group is not None and group.world_size > MAX_WORLD:
        raise UsageError(Code.USAGE, f"a line of {group.world_size} ranks, of {MAX_WORLD} at most")
    if asked.id is None:
        line = _new_line(connection, asked, group, request.deployment, now_us)
    else:
        line = _known_line(broker, connection, asked, asked.id, request.deployment, memory, now_us)
    start = LineStart(
        id=line.id,
        leg=asked.leg,
        seq=asked.seq,
        checkpoint=asked.checkpoint,
        rewind=asked.rewind,
        counted=line.counted_beside(asked.seq),
    )
    next_leg(connection, standing, line, start, group, asked.order, memory, now_us)
    if start.checkpoint is not None and memory.header(line.id, start.checkpoint) is None:
        raise RefusedError(
            Code.CHECKPOINT_INCOMPLETE,
            f"checkpoint {start.seq} of this line is not stored here any more, and nothing can go on from it",
        )
    return start


def _new_line(
    connection: Connection, asked: LineRequest, group: Group | None, deployment: str, now_us: int
) -> LineRecord:
    if group is not None and group.machine != 0:
        raise UsageError(Code.USAGE, "a new line is made by the launch of machine 0: the others of its group name it")
    if asked != LineRequest():
        raise UsageError(Code.USAGE, "a new line that goes on from something")
    line = LineRecord(
        id=secrets.token_bytes(LINE_BYTES),
        deployment=deployment,
        machines=1 if group is None else group.machines,
        ranks=1 if group is None else group.ranks,
        since_us=now_us,
    )
    named = ("id", "deployment", "machines", "ranks", "since_us")
    connection.execute(insert(lines).values({name: getattr(line, name) for name in named}))
    return line


def _known_line(
    broker: BrokerState,
    connection: Connection,
    asked: LineRequest,
    line_id: bytes,
    deployment: str,
    memory: LineMemory,
    now_us: int,
) -> LineRecord:
    line = line_record(connection, line_id, broker_public=broker.public)
    if line is None or line.deployment != deployment:
        raise UsageError(Code.RUN_UNKNOWN, "this broker has no such line")  # it may be another owner's
    line = move_forward(broker, connection, line, memory.newest(line_id), now_us)
    if asked.ticket is None:
        return line
    return move_forward(broker, connection, line, Newest(leg=0, ticket=asked.ticket), now_us)


def move_forward(
    broker: BrokerState, connection: Connection, line: LineRecord, newest: Newest | None, now_us: int
) -> LineRecord:
    """Return a line after what its gate is shown of its own, which it may have forgotten."""
    if newest is None:
        return line
    after, ticket = line, dict[str, bytes]()
    if newest.ticket is not None:
        after = shown(after, Ticket.from_envelope(newest.ticket, broker.public), now_us=now_us)
        if after.ticket != line.ticket:
            ticket = {"ticket": newest.ticket.encode()}
    # Behind the ticket: a leg that counted none yet may have gone back behind that.
    after = forward(after, newest.leg, newest.holder, now_us=now_us, head=newest.head)
    if after != line:
        put_line(connection, line, after, **ticket)
        facts: dict[str, str | int] = {"leg": after.leg, "line": line.id.hex(), "seq": after.seq}
        audit_log.append(connection, "line-forward", now_us, deployment=line.deployment, **facts)
    return after


def catch_up(broker: BrokerState, memory: LineMemory) -> None:
    """Move every line forward to what is kept beside the database, which may have been put back from a backup."""

    def decide(connection: Connection) -> None:
        for line_id, newest in memory.all().items():
            line = line_record(connection, line_id, broker_public=broker.public)
            if line is not None:
                move_forward(broker, connection, line, newest, broker.clock_us())

    broker.database.write(decide)


def record_leg(
    connection: Connection, request: LaunchRequest, start: LineStart | None, *, jti: str, group: Group | None
) -> None:
    """Record what a launch begins from.

    Raises:
        UsageError: another machine of its group begins elsewhere, or is of no line.
    """
    if start is not None and request.line is not None:
        order = request.line.order
        values = {
            "jti": jti,
            "line": start.id,
            "leg": start.leg,
            "seq": start.seq,
            "counted": start.counted,
            "checkpoint": start.checkpoint,
            "rewind": start.rewind,
            "order": None if order is None else order.encode(),
        }
        connection.execute(insert(line_launches).values(values))
    if group is not None:
        begins = select(*(line_launches.c[name] for name in ("line", "leg", "seq", "counted", "checkpoint", "rewind")))
        of_group = begins.select_from(members.outerjoin(line_launches, line_launches.c.jti == members.c.jti))
        if len(connection.execute(of_group.where(members.c.group_id == group.id).distinct()).all()) != 1:
            raise UsageError(Code.USAGE, "machines of one group that are of another leg, or begin elsewhere")
