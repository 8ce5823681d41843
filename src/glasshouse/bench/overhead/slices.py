"""The lines of `slices.jsonl`: one record for each slice, and one that closes each session.

Laws: ``parse(record.encode()) == record``; a line is the canonical JSON of one record and one newline; the
leaf of a line is the Merkle leaf hash of its canonical bytes. Every number is an integer. Times count from
the session's own origin, because nanoseconds since boot leave canonical JSON's 2^53 after 104 days.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias

from glasshouse.bench.overhead.design import SLICES_PER_BLOCK, Arm, Phase
from glasshouse.errors import Code, FormatError
from glasshouse.wire.canonical import MAX_INTEGER, Json, decode, encode
from glasshouse.wire.fields import Fields
from glasshouse.wire.merkle import Tree, leaf_hash

__all__ = [
    "MAX_LINE_BYTES",
    "Encoded",
    "Outcome",
    "Record",
    "SessionEnd",
    "Slice",
    "Throttle",
    "parse",
    "read_lines",
    "tree",
    "whole_lines",
]

MAX_LINE_BYTES = 4096
_CODES = frozenset(code.value for code in Code)


class Encoded(Protocol):
    """A record of one line."""

    def encode(self) -> bytes:
        """Return its canonical bytes."""


class Throttle(StrEnum):
    """A reason that the processor slowed itself down."""

    THERMAL = "thermal"
    POWER_BRAKE = "power-brake"


class Outcome(StrEnum):
    """How a session ended."""

    COMPLETE = "complete"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Slice:
    """What was seen of one slice. None means that this machine could not look, and never that all was well.

    Args:
        session, block, position: where it is in the schedule; warm-up blocks are numbered by themselves.
        arm, phase: which process ran, and for what.
        steps: steps between t0 and t1.
        guard_steps, guard_ns: what ran, unrecorded, before t0.
        t0_ns, t1_ns: after the synchronisations, in nanoseconds since the session's origin.
        done_before, done_after: the worker's own count of steps at t0 and t1.
        first_batch: the number of the first batch that the slice used.
        parked_cpu_ns: CPU time of the waiting arm from before the guard until after t1.
        hooks_ns: time inside protection hooks between t0 and t1; None for a raw arm.
        loss_finite: whether every loss that was looked at was finite.
        steal_ppm: the part of the CPUs' time, over the same stretch, that the hypervisor took, in millionths.
        clock_skew_ns: what another clock counted between t0 and t1, less t1 − t0.
        throttle: what slowed the processor, in the order of `Throttle`.
        ecc_errors: uncorrected memory errors that appeared during the slice.
        foreign_processes: processes on the GPU that are neither arm.
        state_sha256: a keyed digest of the trained state at t1, where the run is deterministic and it was taken.
    """

    _: KW_ONLY
    session: int
    block: int
    position: int
    arm: Arm
    phase: Phase
    steps: int
    guard_steps: int
    guard_ns: int
    t0_ns: int
    t1_ns: int
    done_before: int
    done_after: int
    first_batch: int
    loss_finite: bool
    clock_skew_ns: int
    parked_cpu_ns: int | None = None
    hooks_ns: int | None = None
    steal_ppm: int | None = None
    throttle: tuple[Throttle, ...] | None = None
    ecc_errors: int | None = None
    foreign_processes: int | None = None
    state_sha256: bytes | None = None

    @property
    def duration_ns(self) -> int:
        return self.t1_ns - self.t0_ns

    def to_json(self) -> dict[str, Json]:
        """Return the closed object of spec/overhead-artifact.md section 3.1."""
        return {
            "arm": self.arm.value,
            "block": self.block,
            "clock_skew_ns": self.clock_skew_ns,
            "done_after": self.done_after,
            "done_before": self.done_before,
            "ecc_errors": self.ecc_errors,
            "first_batch": self.first_batch,
            "foreign_processes": self.foreign_processes,
            "guard_ns": self.guard_ns,
            "guard_steps": self.guard_steps,
            "hooks_ns": self.hooks_ns,
            "kind": "slice",
            "loss_finite": self.loss_finite,
            "parked_cpu_ns": self.parked_cpu_ns,
            "phase": self.phase.value,
            "position": self.position,
            "session": self.session,
            "state_sha256": None if self.state_sha256 is None else self.state_sha256.hex(),
            "steal_ppm": self.steal_ppm,
            "steps": self.steps,
            "t0_ns": self.t0_ns,
            "t1_ns": self.t1_ns,
            "throttle": None if self.throttle is None else [reason.value for reason in self.throttle],
        }

    def encode(self) -> bytes:
        return encode(self.to_json())

    @classmethod
    def read(cls, fields: Fields) -> Slice:
        """Read a slice from an object whose `kind` is already taken.

        Raises:
            FormatError: `schema-invalid`.
        """
        found = cls(
            session=fields.integer("session"),
            block=fields.integer("block"),
            position=fields.integer("position", high=SLICES_PER_BLOCK - 1),
            arm=Arm(fields.choice("arm", [arm.value for arm in Arm])),
            phase=Phase(fields.choice("phase", [phase.value for phase in Phase])),
            steps=fields.integer("steps", low=1),
            guard_steps=fields.integer("guard_steps"),
            guard_ns=fields.integer("guard_ns"),
            t0_ns=fields.integer("t0_ns"),
            t1_ns=fields.integer("t1_ns"),
            done_before=fields.integer("done_before"),
            done_after=fields.integer("done_after"),
            first_batch=fields.integer("first_batch"),
            loss_finite=fields.flag("loss_finite"),
            clock_skew_ns=fields.integer("clock_skew_ns", low=-MAX_INTEGER),
            parked_cpu_ns=_count(fields, "parked_cpu_ns"),
            hooks_ns=_count(fields, "hooks_ns"),
            steal_ppm=_count(fields, "steal_ppm", high=1_000_000),
            throttle=_throttle(fields),
            ecc_errors=_count(fields, "ecc_errors"),
            foreign_processes=_count(fields, "foreign_processes"),
            state_sha256=None if fields.null("state_sha256") else fields.digest("state_sha256"),
        )
        fields.end()
        return found


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """Closes a session: what was begun in it, so that nothing that failed can be left out.

    Args:
        session: its number.
        launched_first: whose process was started first.
        warmup_blocks, blocks_started: blocks begun in each phase, unfinished ones included.
        outcome: how it ended.
        code: why, unless it is complete.

    Raises:
        FormatError: `schema-invalid`, an outcome and a code that contradict each other.
    """

    _: KW_ONLY
    session: int
    launched_first: Arm
    warmup_blocks: int
    blocks_started: int
    outcome: Outcome
    code: Code | None = None

    def __post_init__(self) -> None:
        if (self.outcome is Outcome.COMPLETE) != (self.code is None):
            raise FormatError(Code.SCHEMA, f"session {self.session} is {self.outcome.value} with code {self.code}")

    def to_json(self) -> dict[str, Json]:
        """Return the closed object of spec/overhead-artifact.md section 3.2."""
        return {
            "blocks_started": self.blocks_started,
            "code": None if self.code is None else self.code.value,
            "kind": "session",
            "launched_first": self.launched_first.value,
            "outcome": self.outcome.value,
            "session": self.session,
            "warmup_blocks": self.warmup_blocks,
        }

    def encode(self) -> bytes:
        return encode(self.to_json())

    @classmethod
    def read(cls, fields: Fields) -> SessionEnd:
        """Read a session's end from an object whose `kind` is already taken.

        Raises:
            FormatError: `schema-invalid`.
        """
        found = cls(
            session=fields.integer("session"),
            launched_first=Arm(fields.choice("launched_first", [arm.value for arm in Arm])),
            warmup_blocks=fields.integer("warmup_blocks"),
            blocks_started=fields.integer("blocks_started"),
            outcome=Outcome(fields.choice("outcome", [outcome.value for outcome in Outcome])),
            code=None if fields.null("code") else Code(fields.choice("code", _CODES)),
        )
        fields.end()
        return found


Record: TypeAlias = Slice | SessionEnd


def parse(line: bytes) -> Record:
    """Return the record of one line, without its newline.

    Raises:
        FormatError: `too-large`, `not-canonical` or `schema-invalid`.
    """
    fields = Fields(decode(line, max_bytes=MAX_LINE_BYTES), "record")
    if fields.choice("kind", ("slice", "session")) == "slice":
        return Slice.read(fields)
    return SessionEnd.read(fields)


def whole_lines(lines: Iterable[bytes], what: str) -> Iterator[bytes]:
    """Yield lines without their newline; a last line without one is refused.

    Args:
        lines: as a file gives them.
        what: whose lines they are, for people.

    Raises:
        FormatError: `schema-invalid`, a line that was cut off.
    """
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            raise FormatError(Code.SCHEMA, f"line {number} of the {what} is cut off")
        yield line[:-1]


def read_lines(lines: Iterable[bytes]) -> Iterator[Record]:
    """Yield the records of whole lines; raises `FormatError` as `whole_lines` and `parse` do."""
    return map(parse, whole_lines(lines, "slices"))


def tree(records: Iterable[Encoded]) -> Tree:
    """Return the Merkle tree (RFC 9162 section 2.1) over the records' canonical bytes, in order."""
    grown = Tree()
    for record in records:
        grown.append(leaf_hash(record.encode()))
    return grown


def _count(fields: Fields, name: str, *, high: int = MAX_INTEGER) -> int | None:
    return None if fields.null(name) else fields.integer(name, high=high)


def _throttle(fields: Fields) -> tuple[Throttle, ...] | None:
    if fields.null("throttle"):
        return None
    texts = fields.texts("throttle", max_items=len(Throttle))
    found = tuple(reason for reason in Throttle if reason.value in texts)
    if [reason.value for reason in found] != texts:
        raise FormatError(Code.SCHEMA, "record.throttle is not a list of known reasons in their order")
    return found
