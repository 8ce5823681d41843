"""The design of one part of a measurement: what is fixed before its first session (spec/measurement.md, section 8).

Its digest goes into the broker's log before the first session; the schedule of each session follows from it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from glasshouse.errors import Code, FormatError
from glasshouse.wire.policy import Assurance
from glasshouse.workloads.measurement.slots import ALONE, MAX_SLOT_NS, MAX_STEPS, Plan
from glasshouse_bench.documents import COUNT, PLAIN, Document, integer, listed

__all__ = ["Design", "Exclusions", "Gpu", "Kind", "Machine", "Mode", "Padding", "Planted", "Workload"]

MAX_DESIGN_BYTES = 1 << 16
MAX_SESSIONS = 4096
WIDENING = 1_000_000
_SESSION = b"glasshouse/measurement/v1/session\x00"
_ORDER = b"glasshouse/measurement/v1/order\x00"


class Mode(StrEnum):
    """How the two arms share the machine."""

    INTERLEAVED = "interleaved"
    NULL = "null"  # interleaved, with a second raw worker in the place of the protected one
    SEQUENTIAL = "sequential"  # whole processes, one after the other
    ALTERNATING = "alternating"  # the same in ABBA order, at least ten pairs

    @property
    def whole(self) -> bool:
        """Whether the arms run one after the other, each in every slot."""
        return self in (Mode.SEQUENTIAL, Mode.ALTERNATING)


class Kind(StrEnum):
    """What is trained."""

    LORA = "lora"
    MLP = "mlp"
    SCRIPT = "script"


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload(Document):
    """What is trained, and how.

    Args:
        kind, name: of the job; the name is for readers.
        commitment: HMAC-SHA-256 of the job's digest, parameters and files, under a key that its owner alone can make
            again: a bare digest of parameters can be guessed. None where there is none.
        deterministic: whether losses of equal steps have to be equal.
        threads: of each arm.
        cpus: on which both arms may run.
    """

    kind: Kind
    name: Annotated[str, PLAIN]
    commitment: bytes | None
    deterministic: bool
    threads: Annotated[int, integer(1, 4096)]
    cpus: Annotated[tuple[int, ...], listed(integer(0, 65535), most=4096)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu(Document):
    name: Annotated[str, PLAIN]
    driver: Annotated[str, PLAIN] | None
    mig: bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine(Document):
    """Where it is measured; None for what is not there or could not be found out.

    Args:
        cpus: logical processors of the machine.
        speculation: the kernel's lines on processor faults and their mitigations, without punctuation of paths.
        virtualised: whether the processor names a hypervisor above it.
    """

    cpu: Annotated[str, PLAIN] | None
    cpus: Annotated[int, integer(1, 65536)] | None
    glasshouse: Annotated[str, PLAIN] | None
    gpu: Gpu | None
    kernel: Annotated[str, PLAIN] | None
    memory_bytes: Annotated[int, integer(1)] | None
    python: Annotated[str, PLAIN] | None
    speculation: Annotated[tuple[str, ...], listed(PLAIN, most=64)] | None
    torch: Annotated[str, PLAIN] | None
    virtualised: bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Exclusions(Document):
    """Blocks in which the hypervisor took more of the processors' time, in millionths, count for neither arm."""

    steal_ppm: Annotated[int, integer(0, 1_000_000)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Padding(Document):
    """Environment and arguments of each arm are padded to `fixed_bytes` and by 0 to `random_bytes` more, drawn anew."""

    fixed_bytes: Annotated[int, integer(0, 1 << 20)]
    random_bytes: Annotated[int, integer(0, 1 << 20)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Planted(Document):
    """Busy time that is added to the arm P on purpose, to try the harness itself.

    Args:
        step_ppm: to each step, in millionths of it.
        bunched_ns: at once, after each second in which the worker ran.
    """

    step_ppm: Annotated[int, integer(0, 10_000_000)]
    bunched_ns: Annotated[int, integer(0, 10**9)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Design(Document):
    """Everything that is decided before the first session; `version` is 1.

    Args:
        seed: 32 bytes; every session's schedule and the randomisation test follow from it.
        sessions: pairs of processes, K. Each is attempted once.
        length_ns: T, the time for which both arms take their slots; when whole, for which each arm runs.
        slot_ns, steps, uncounted, warmup_steps: of the schedule (section 2).
        margin_ppm: the equivalence margin on the log ratio, in millionths.
        widening_ppm: factor on the standard error, in millionths.
        asked_s: the time that was asked for, in seconds.
        planted: None in an honest measurement.
        assurance: that the protected arm shall have; None in a null measurement, which has none.
        calibration_sha256: of `calibration.json`; None where there was none.
        created_us: when it was sealed, by the owner's clock.

    Raises:
        FormatError: `schema-invalid`, values that make no measurement.
    """

    version: Annotated[int, integer(1, 1)] = 1
    mode: Mode
    seed: bytes
    sessions: Annotated[int, integer(1, MAX_SESSIONS)]
    length_ns: Annotated[int, integer(10**6, 86_400 * 10**9)]
    slot_ns: Annotated[int, integer(10**6, MAX_SLOT_NS)]
    steps: Annotated[int, integer(1, 64)]
    uncounted: Annotated[int, integer(1, 4)]
    warmup_steps: Annotated[int, integer(0, MAX_STEPS - 1)]
    margin_ppm: Annotated[int, integer(1, 999_999)]
    widening_ppm: Annotated[int, integer(WIDENING, 100 * WIDENING)] = WIDENING
    asked_s: Annotated[int, COUNT]
    exclusions: Exclusions
    padding: Padding
    planted: Planted | None = None
    assurance: Assurance | None
    workload: Workload
    machine: Machine
    calibration_sha256: bytes | None
    created_us: Annotated[int, COUNT]

    def _check(self) -> None:
        if (self.assurance is None) != (self.mode is Mode.NULL):
            raise FormatError(Code.SCHEMA, "a design names an assurance exactly where one arm is protected")
        if self.mode is Mode.ALTERNATING and self.sessions < 10:
            raise FormatError(Code.SCHEMA, "whole processes in alternation are ten sessions or more")

    @property
    def margin(self) -> float:
        return self.margin_ppm / 1_000_000

    @property
    def widening(self) -> float:
        return self.widening_ppm / WIDENING

    def session_seed(self, session: int) -> bytes:
        """Return the seed of one session's schedule: it binds what is sealed, and the records, to the whole design."""
        return hashlib.sha256(_SESSION + self.sha256 + session.to_bytes(8, "big")).digest()

    def plan(self, session: int, arm: str, *, end_ns: int) -> Plan:
        """Return what is sealed into one worker's parameters.

        Args:
            arm: `R` or `P`; when whole, both have every slot.
        """
        return Plan(
            seed=self.session_seed(session),
            arm=ALONE if self.mode.whole else arm,
            slot_ns=self.slot_ns,
            steps=self.steps,
            uncounted=self.uncounted,
            warmup_steps=self.warmup_steps,
            end_ns=end_ns,
        )

    def raw_first(self, session: int) -> bool:
        """Return whether the raw arm runs first in a session of whole processes: RP PR or PR RP, two by two."""
        drawn = hashlib.sha256(_ORDER + self.seed + (session // 2).to_bytes(8, "big")).digest()[0] & 1
        return (drawn + session) % 2 == 0
