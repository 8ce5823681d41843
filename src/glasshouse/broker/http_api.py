"""What both ends of the HTTP API share (spec/owner-api.md), without database or server.

Bodies of an owner's requests and what answers them; problem documents (RFC 9457), whose `code` is the refusal code; and
the chain of an audit log, in which each record holds the hash of the one before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from glasshouse.attestation.claims import ContainerSource
from glasshouse.attestation.roots.collateral import MAX_PACK_BYTES, Pack
from glasshouse.errors import (
    Code,
    FormatError,
    GlasshouseError,
    PackageError,
    PeerError,
    RefusedError,
    UsageError,
    VerificationError,
)
from glasshouse.wire.canonical import Codec, Json
from glasshouse.wire.crypto import lengths_prefixed, sha256
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.group import MAX_MACHINES, MAX_RANKS, Group
from glasshouse.wire.lines.line_start import LINE_BYTES, MAX_LEGS
from glasshouse.wire.record import (
    LEFT_OUT,
    Id,
    Identifier,
    Member,
    Record,
    Sha256,
    choice,
    digest,
    integer,
    items,
    octets,
    raw,
    text,
)

MAX_BODY_BYTES = 256 * 1024
MAX_COLLATERAL_BYTES = MAX_PACK_BYTES + 69  # exactly what is around a pack, which is read alone later
_MAX_LAUNCH_LIFETIME_S = 7 * 24 * 3600
_MAX_FILES = 16384
_PUBLIC = octets(32)
_TEXT = text()
_PATH = Codec(lambda value, where: Path(_TEXT.read(value, where)), str)


@dataclass(frozen=True, kw_only=True, slots=True)
class DelegationRequest(Record, name="request", max_bytes=MAX_BODY_BYTES):
    """Delegates to the broker."""

    delegation: Envelope
    owner: Annotated[bytes, _PUBLIC]


@dataclass(frozen=True, kw_only=True, slots=True)
class CollateralRequest(Record, name="request", max_bytes=MAX_COLLATERAL_BYTES):
    """Gives the broker what hardware evidence is checked by."""

    collateral: Pack
    owner: Annotated[bytes, _PUBLIC]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentRequest(Record, name="request", max_bytes=MAX_BODY_BYTES):
    """Gives the broker a package's manifest and key, and the policy of one deployment."""

    manifest: Envelope
    package_key: Annotated[bytes, octets(32)] = field(repr=False)
    policy: Annotated[Json, raw()]  # over the network in an envelope of its owner's


@dataclass(frozen=True, kw_only=True, slots=True)
class LineRequest(Record, name="request.line"):
    """Asks for the launch of a leg of a line."""

    id: Annotated[bytes | None, digest(LINE_BYTES), LEFT_OUT] = None  # None for a new line
    leg: Annotated[int, integer(1, MAX_LEGS)] = 1
    seq: int = 0  # of the checkpoint that it begins from
    checkpoint: Annotated[Sha256 | None, LEFT_OUT] = None  # its digest
    rewind: Annotated[bool, LEFT_OUT] = False
    order: Annotated[Envelope | None, LEFT_OUT] = None  # a `ResumeOrder` for just this
    ticket: Annotated[Envelope | None, LEFT_OUT] = None  # the newest that the owner has


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRequest(Record, name="request", max_bytes=MAX_BODY_BYTES):
    """Records a launch, which gets a token."""

    container_id: Annotated[Identifier, Member("container", "id")]
    container_source: Annotated[ContainerSource, Member("container", "source")]
    deployment: Id
    run_id: Id
    launch_public: Annotated[bytes, _PUBLIC]
    lifetime_s: Annotated[int, integer(1, _MAX_LAUNCH_LIFETIME_S)]
    group: Annotated[Group | None, LEFT_OUT] = None  # the machine's place in one
    line: Annotated[LineRequest | None, LEFT_OUT] = None  # the leg of a line


@dataclass(frozen=True, kw_only=True, slots=True)
class LegLostRequest(Record, name="request", max_bytes=MAX_BODY_BYTES):
    """Reports that the machines of a leg do not exist any more."""

    lost: Envelope  # a `LegLost`


@dataclass(frozen=True, kw_only=True, slots=True)
class LineView(Record, name="line", max_bytes=MAX_BODY_BYTES):
    """How a line stands at its gate."""

    deployment: Id
    id: Annotated[bytes, digest(LINE_BYTES)]
    leg: int  # the last that was released; 0 before the first
    machines: Annotated[int, integer(1, MAX_MACHINES)]
    ranks: Annotated[int, integer(1, MAX_RANKS)]
    run_ids: Annotated[tuple[Id, ...], items(MAX_MACHINES)]  # of that leg, by machine
    over: Annotated[str, choice(("", "lease", "lost", "receipt"))]  # how it ended; empty while it goes on
    contact_us: int  # when one of its machines was last heard from
    seq: int  # the greatest number of a checkpoint that was counted
    head_seq: int  # that of the head, which is smaller after a rewind; 0 for none
    head_step: int
    head: Annotated[Sha256 | None, LEFT_OUT] = None  # its digest
    ticket: Annotated[Envelope | None, LEFT_OUT] = None  # the newest
    abandoned: Annotated[tuple[Envelope, ...], items(64)] = ()  # the last ended without a receipt; those that fit


@dataclass(frozen=True, kw_only=True, slots=True)
class RevocationRequest(Record, name="request", max_bytes=MAX_BODY_BYTES):
    """Ends the releases of a package's key."""

    running: Annotated[bool, LEFT_OUT] = False  # whether its runs are to end too


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRequest(Record, name="request", max_bytes=4096):
    """Announces a group."""

    deployment: Id
    machines: Annotated[int, integer(1, MAX_MACHINES)]
    ranks: Annotated[int, integer(1, MAX_RANKS)]  # on each machine


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRefusal(Record, name="request", max_bytes=4096):
    """Reports that a machine of a group has ended."""

    code: Code
    machine: Annotated[int, integer(0, MAX_MACHINES - 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForgetRequest(Record, name="request", max_bytes=64):
    """Removes what is stored of a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile(Record, name="stored file"):
    """A file of a run that is stored whole."""

    name: Annotated[str, _TEXT]
    bytes: int
    sha256: Sha256


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFiles(Record, name="stored files"):
    """All files of a run that are stored whole."""

    files: Annotated[tuple[StoredFile, ...], items(_MAX_FILES)]


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokerReady(Record, name="ready line", max_bytes=8192):
    """Where a broker listens."""

    runtime_url: Annotated[str, text(512)]  # ``http://host:port`` or ``unix:/path``, as in a launch file
    owner_socket: Annotated[Path, _PATH]
    broker_public: Annotated[bytes, _PUBLIC]  # the key that the owner delegates to
    store_public: Annotated[bytes | None, _PUBLIC, LEFT_OUT] = None  # its store's; None where it keeps no checkpoints


@dataclass(frozen=True, kw_only=True, slots=True)
class GateReady(BrokerReady):
    """Where a gate listens."""

    gate: Annotated[str, text(512)]  # for owners and places over the network
    certificate: Sha256 | None  # of its own certificate; None without TLS of its own


PROBLEM_TYPE = "application/problem+json"
MAX_PROBLEM_BYTES = 16 * 1024
_MAX_SENTENCE = 1000

_STATUS: dict[Code, int] = {
    Code.TOO_LARGE: 413,
    Code.MESSAGE_TOO_LARGE: 413,
    Code.MESSAGE_INVALID: 400,
    Code.NONCE_UNKNOWN: 409,
    Code.NONCE_EXPIRED: 409,
    Code.NONCE_REPLAYED: 409,
    Code.HEAD_INCONSISTENT: 409,
    Code.DEPLOYMENT_UNKNOWN: 404,
    Code.RUN_UNKNOWN: 404,
    Code.CHECKPOINT_STALE: 409,
    Code.CHECKPOINT_INCOMPLETE: 409,
    Code.LINE_BUSY: 409,
    Code.TOO_MANY_CHALLENGES: 429,
    Code.OWNER_REQUEST: 401,
    Code.OWNER_STALE: 409,
    Code.OWNER_QUOTA: 429,
    Code.BROKER_UNREACHABLE: 503,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem(Record, name="problem", max_bytes=MAX_PROBLEM_BYTES, derived={"title": "title", "type": "type"}):
    """One problem document; it holds no secret and no value that a caller sent."""

    code: Code
    status: Annotated[int, integer(400, 599)]  # the HTTP status that it travels under
    detail: Annotated[str, text(_MAX_SENTENCE)]  # one sentence for a person
    check: Annotated[str, text(8), LEFT_OUT] = ""  # number of the gate's check that failed
    # The safe part of both sides.
    expected: Annotated[str, text(_MAX_SENTENCE), LEFT_OUT] = ""
    actual: Annotated[str, text(_MAX_SENTENCE), LEFT_OUT] = ""

    @property
    def title(self) -> str:
        """The code in words."""
        return self.code.value.replace("-", " ")

    @property
    def type(self) -> str:
        """The URN of the code."""
        return f"urn:glasshouse:problem:{self.code.value}"

    @classmethod
    def of(cls, error: BaseException) -> Problem:
        """Return what may be sent of `error`; of a defect, its code alone."""
        if not isinstance(error, GlasshouseError) or error.code is Code.INTERNAL:
            return cls(code=Code.INTERNAL, status=500, detail="the broker failed; nothing was released")
        return cls(
            code=error.code,
            status=_status(error),
            detail=error.message[:_MAX_SENTENCE],
            check=str(getattr(error, "check", "")),
            expected=str(getattr(error, "expected", ""))[:_MAX_SENTENCE],
            actual=str(getattr(error, "actual", ""))[:_MAX_SENTENCE],
        )

    def to_error(self) -> GlasshouseError:
        """Return the exception that a client raises for this problem."""
        if self.status >= 500:
            return PeerError(self.code, self.detail)
        if self.status in (400, 413):
            return FormatError(self.code, self.detail)
        if self.status in (404, 422):
            return UsageError(self.code, self.detail)
        return RefusedError(self.code, self.detail)


def _status(error: GlasshouseError) -> int:
    if error.code in _STATUS:
        return _STATUS[error.code]
    if isinstance(error, (RefusedError, VerificationError)):
        return 403
    if isinstance(error, (FormatError, PackageError)):
        return 400
    return 422 if isinstance(error, UsageError) else 500


GENESIS = bytes(32)
_LABEL = b"glasshouse audit v1"


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditRecord(Record, name="audit record"):
    """One decision; without secrets."""

    event: Annotated[str, text()]
    facts: Annotated[Mapping[str, str | int], raw()]  # ids, codes, digests
    previous: Sha256  # hash of the record before, or `GENESIS`
    sequence: int  # from 1
    time_us: int

    @property
    def sha256(self) -> bytes:
        """Hash of the record, by which the next one names it."""
        return sha256(lengths_prefixed(_LABEL, self.encode()))


def verify_chain(records: Iterable[Json], *, previous: bytes = GENESIS, sequence: int = 0) -> bytes:
    """Check that `records` follow each other, and return the hash of the last one.

    Args:
        previous, sequence: hash and number of the record before the first of them.

    Raises:
        FormatError: `schema-invalid`.
        VerificationError: `log-invalid`.
    """
    for value in records:
        record = AuditRecord.from_json(value)
        sequence += 1
        if (record.sequence, record.previous) != (sequence, previous):
            raise VerificationError(Code.LOG_INVALID, f"the audit log is broken at record {sequence}")
        previous = record.sha256
    return previous
