"""Rows of lines to values: how a line stands, and which leg of it an attested runtime is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sqlalchemy import Connection, RowMapping, bindparam, select

from glasshouse.broker.store.database_schema import deployments, legs, line_launches, lines, packages, releases
from glasshouse.errors import Code, RefusedError
from glasshouse.handshake.lines import Head, LineRecord
from glasshouse.wire.crypto import key_id
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.lines.checkpoint import CheckpointHeader
from glasshouse.wire.lines.line_start import LineStart
from glasshouse.wire.lines.statements import Ticket

# Built once. Columns of a line are named apart from those of a leg.
LINE_COLUMNS = tuple(column.label(f"line_{column.name}") for column in lines.c)
_LEG = (
    select(
        *LINE_COLUMNS,
        legs.c.leg,
        legs.c.machine,
        legs.c.previous,
        line_launches.c.seq,
        line_launches.c.counted,
        line_launches.c.checkpoint,
        line_launches.c.rewind,
        releases.c.evidence_public,
        packages.c.package_id,
        packages.c.owner,
        packages.c.manifest_sha256,
    )
    .join(lines, lines.c.id == legs.c.line)
    .join(line_launches, line_launches.c.jti == legs.c.jti)
    .join(releases, releases.c.run_id == legs.c.run_id)
    .join(deployments, deployments.c.id == lines.c.deployment)
    .join(packages, packages.c.package_id == deployments.c.package_id)
    .where(legs.c.run_id == bindparam("run_id"))
)
_LINE = select(*LINE_COLUMNS).where(lines.c.id == bindparam("line"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Newest:
    """The last that a gate did for a line."""

    leg: int  # the highest that was released
    holder: str | None = None  # key id of its machine 0's evidence key
    head: Head | None = None  # what it began from
    ticket: Envelope | None = None  # the newest


class LineMemory(Protocol):
    """What is kept of lines beside the database: one that is put back from a backup is moved forward by it.

    A checkpoint store is one; `NOTHING_KEPT` is that of a gate without a store.
    """

    def all(self) -> dict[bytes, Newest]:
        """Return what is kept of each line."""

    def newest(self, line: bytes) -> Newest | None:
        """Return what is kept of one line."""

    def keep(self, line: bytes, newest: Newest) -> None:
        """Keep it on the disk before returning; within the transaction of the decision, which may yet fail.

        Never back: a lower leg or an older ticket than what is kept leaves that part as it is.
        """

    def header(self, line: bytes, digest: bytes) -> CheckpointHeader | None:
        """Return the header of a checkpoint that is stored whole."""


class _NothingKept:
    def all(self) -> dict[bytes, Newest]:
        return {}

    def newest(self, _line: bytes) -> Newest | None:
        return None

    def keep(self, _line: bytes, _newest: Newest) -> None:
        pass

    def header(self, _line: bytes, _digest: bytes) -> CheckpointHeader | None:
        return None


NOTHING_KEPT: LineMemory = _NothingKept()


@dataclass(frozen=True, kw_only=True, slots=True)
class Leg:
    """One machine of a leg that was released, and how its line stands now."""

    line: LineRecord
    start: LineStart  # where it began, as the EAR of its release has it
    machine: int
    run_id: str
    evidence_public: bytes
    # Of the package: what the database calls it, and its owner's public signing key.
    package_row: str
    owner: bytes
    manifest_sha256: bytes

    @property
    def is_current(self) -> bool:
        """Whether no later leg was released."""
        return self.start.leg == self.line.leg

    @property
    def ranks(self) -> range:
        """The ranks on this machine."""
        return range(self.machine * self.line.ranks, (self.machine + 1) * self.line.ranks)


def leg_of(connection: Connection, run_id: str, signer: str, *, broker_public: bytes) -> Leg:
    """Return which leg a run is, whose evidence key is called `signer`; no signature is checked.

    Raises:
        RefusedError: `run-unknown`, also for a run of no line.
    """
    row = connection.execute(_LEG, {"run_id": run_id}).mappings().one_or_none()
    if row is None or key_id(row["evidence_public"]) != signer:
        raise RefusedError(Code.RUN_UNKNOWN, "no runtime with this key was given a leg of a line")
    start = LineStart(
        id=row["line_id"],
        leg=row["leg"],
        seq=row["seq"],
        checkpoint=row["checkpoint"],
        counted=row["counted"],
        rewind=row["rewind"],
        previous=row["previous"],
    )
    return Leg(
        line=as_line(row, broker_public=broker_public),
        start=start,
        machine=row["machine"],
        run_id=run_id,
        evidence_public=row["evidence_public"],
        package_row=row["package_id"],
        owner=row["owner"],
        manifest_sha256=row["manifest_sha256"],
    )


def line_record(connection: Connection, line: bytes, *, broker_public: bytes) -> LineRecord | None:
    """Return how a line stands."""
    row = connection.execute(_LINE, {"line": line}).mappings().one_or_none()
    return None if row is None else as_line(row, broker_public=broker_public)


def as_line(row: RowMapping, *, broker_public: bytes) -> LineRecord:
    """Return the line in a row that holds `LINE_COLUMNS`."""
    found = {column.name: row[f"line_{column.name}"] for column in lines.c}
    head = Head(seq=found.pop("head_seq"), step=found.pop("head_step"), digest=found.pop("head"))
    ticket = found.pop("ticket")
    if ticket is not None:
        ticket = Ticket.from_envelope(envelope_in(ticket), broker_public)
    return LineRecord(**found, head=head, ticket=ticket)


def envelope_in(column: bytes) -> Envelope:
    """Return an envelope as it was written."""
    return Envelope.parse(column, max_bytes=len(column))
