"""The design of a measurement: what is fixed before the first slice runs, and the schedule that follows from it.

Laws: the schedule is a function of the design alone, block by block, so that a verifier draws it again and
an interrupted run has the same beginning as a whole one. ``Design.from_json(d.to_json()) == d``.

Each block of four slices is one of `SEQUENCES`, chosen by the two low bits of the first byte of
``D("measured", session, block, 0)`` (`draws`); warm-up blocks use the purpose ``"warmup"``. Which arm's process
is launched first alternates from session to session; the arm of session 0 is the low bit of the first byte of
``D("launch", 0, 0, 0)``: 0 raw, 1 protected. Every sequence holds each arm twice, so that a constant difference
between the sessions or the blocks cancels, and the draw makes what is left of drift and order random in sign
(restricted randomisation in blocks: Cochran & Cox, Experimental Designs, 2nd ed., chapter 4).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum

from glasshouse.bench.overhead.draws import SEED_BYTES, stream
from glasshouse.errors import Code, UsageError
from glasshouse.wire.canonical import Json, encode
from glasshouse.wire.fields import Fields
from glasshouse.wire.kdf import sha256

__all__ = [
    "MARGIN_QUICK_PPM",
    "MARGIN_STANDARD_PPM",
    "SEQUENCES",
    "SLICES_PER_BLOCK",
    "STANDARD_SESSIONS",
    "Arm",
    "Design",
    "LaunchOrder",
    "Level",
    "Mode",
    "Phase",
    "WarmupRule",
    "default_margin_ppm",
]

SEQUENCES = ("RPPR", "PRRP", "RRPP", "PPRR")
SLICES_PER_BLOCK = 4
STANDARD_SESSIONS = 12
MARGIN_QUICK_PPM = 5_000
MARGIN_STANDARD_PPM = 2_500
STANDARD_MEASURED_S = 3_600
LEAST_GUARD_STEPS = 3
LEAST_GUARD_NS = 250_000_000
VERSION = 1
_MOST_BLOCKS = 1 << 20
_MOST_SESSIONS = 1 << 12
# A verifier judges the window after every block, in time that grows with its square.
_MOST_WINDOW_BLOCKS = 32


class Mode(StrEnum):
    """How the two arms share the machine."""

    INTERLEAVED = "interleaved"
    SEQUENTIAL = "sequential"
    NULL = "null"  # interleaved, with a second raw process in the place of the protected one


class Arm(StrEnum):
    """One side of the comparison; in a null run both are raw, and `PROTECTED` is only a place."""

    RAW = "R"
    PROTECTED = "P"

    @property
    def other(self) -> Arm:
        return Arm.PROTECTED if self is Arm.RAW else Arm.RAW


class Phase(StrEnum):
    """Whether a slice belongs to the warm-up or to the result."""

    WARMUP = "warmup"
    MEASURED = "measured"


class LaunchOrder(StrEnum):
    """Which arm's process starts first in a session; in sequential mode, which leg runs first."""

    ALTERNATING = "alternating"
    RAW_FIRST = "raw-first"
    PROTECTED_FIRST = "protected-first"


class Level(StrEnum):
    """How many process pairs stand behind a result."""

    QUICK = "quick"  # one: everything is conditional on that process pair
    SHORT = "short"
    STANDARD = "standard"  # STANDARD_SESSIONS or more


def default_margin_ppm(*, sessions: int, measured_s: int) -> int:
    """Return the equivalence margin for a plan: 0.25 % for twelve sessions and an hour or more, else 0.5 %."""
    long = sessions >= STANDARD_SESSIONS and measured_s >= STANDARD_MEASURED_S
    return MARGIN_STANDARD_PPM if long else MARGIN_QUICK_PPM


@dataclass(frozen=True, slots=True)
class WarmupRule:
    """When the warm-up ends (`warmup.assess`)."""

    _: KW_ONLY
    least_ns: int = 30_000_000_000
    # From the first warm-up slice to the last; a session that is not steady by then is flagged.
    cap_ns: int = 300_000_000_000
    window_blocks: int = 8
    # The largest change over the window that still counts as steady.
    drift_ppm: int = 5_000

    def __post_init__(self) -> None:
        if not 0 <= self.least_ns <= self.cap_ns:
            raise _refused(f"a warm-up of {self.least_ns} ns with a cap of {self.cap_ns} ns")
        if not 5 <= self.window_blocks <= _MOST_WINDOW_BLOCKS:
            raise _refused(f"a warm-up window of {self.window_blocks} blocks; 5 to {_MOST_WINDOW_BLOCKS} can be tested")
        if not 0 < self.drift_ppm < 1_000_000:
            raise _refused(f"a warm-up drift of {self.drift_ppm} ppm")

    def to_json(self) -> dict[str, Json]:
        return {
            "cap_ns": self.cap_ns,
            "drift_ppm": self.drift_ppm,
            "least_ns": self.least_ns,
            "window_blocks": self.window_blocks,
        }

    @classmethod
    def read(cls, fields: Fields) -> WarmupRule:
        rule = cls(
            least_ns=fields.integer("least_ns"),
            cap_ns=fields.integer("cap_ns"),
            window_blocks=fields.integer("window_blocks"),
            drift_ppm=fields.integer("drift_ppm"),
        )
        fields.end()
        return rule


@dataclass(frozen=True, slots=True)
class Design:
    """Everything that is decided before the first slice.

    Args:
        mode: how the arms share the machine.
        seed: 32 bytes; the schedule, the bootstrap and the randomisation test are drawn from it.
        sessions: process pairs.
        blocks_per_session: measured blocks in each, excluded ones included: a block is never replaced. 1 when
            sequential, where the block is the pair of legs.
        slice_steps: steps in a slice, calibrated once; None for a sequential leg that ends by the clock.
        leg_ns: what such a leg lasts at least, and None otherwise.
        guard_steps, guard_ns: at least so many steps, and so long, before t0 of each slice; 0 when sequential.
        launch_order: which process starts first.
        margin_ppm: the equivalence margin on the log ratio, in millionths.
        warmup: when the warm-up ends; for a sequential leg only `least_ns` counts.

    Raises:
        UsageError: `usage`, values that make no measurement.
    """

    _: KW_ONLY
    mode: Mode
    seed: bytes
    sessions: int
    blocks_per_session: int
    slice_steps: int | None
    leg_ns: int | None = None
    guard_steps: int = LEAST_GUARD_STEPS
    guard_ns: int = LEAST_GUARD_NS
    launch_order: LaunchOrder = LaunchOrder.ALTERNATING
    margin_ppm: int = MARGIN_QUICK_PPM
    warmup: WarmupRule = field(default_factory=WarmupRule)

    def __post_init__(self) -> None:
        if len(self.seed) != SEED_BYTES:
            raise _refused(f"a seed of {len(self.seed)} bytes where {SEED_BYTES} are needed")
        if not 1 <= self.sessions <= _MOST_SESSIONS:
            raise _refused(f"{self.sessions} sessions; 1 to {_MOST_SESSIONS} can be planned")
        if not 1 <= self.blocks_per_session <= _MOST_BLOCKS:
            raise _refused(f"{self.blocks_per_session} blocks in a session; 1 to {_MOST_BLOCKS} can be planned")
        if self.slice_steps is not None and self.slice_steps < 1:
            raise _refused(f"slices of {self.slice_steps} steps")
        if not 0 < self.margin_ppm < 1_000_000:
            raise _refused(f"an equivalence margin of {self.margin_ppm} ppm")
        if self.mode is Mode.SEQUENTIAL:
            self._check_legs()
        else:
            self._check_slices()

    def _check_slices(self) -> None:
        if self.slice_steps is None or self.leg_ns is not None:
            raise _refused("interleaved slices have a fixed number of steps and no time target")
        if self.guard_steps < LEAST_GUARD_STEPS or self.guard_ns < LEAST_GUARD_NS:
            raise _refused(
                f"a guard of {self.guard_steps} steps and {self.guard_ns} ns before each slice; "
                f"at least {LEAST_GUARD_STEPS} steps and {LEAST_GUARD_NS} ns are needed"
            )

    def _check_legs(self) -> None:
        if self.blocks_per_session != 1:
            raise _refused("a sequential session is one pair of legs")
        if (self.slice_steps is None) == (self.leg_ns is None) or (self.leg_ns is not None and self.leg_ns < 1):
            raise _refused("a sequential leg ends either after a number of steps or after a time")
        if self.guard_steps or self.guard_ns:
            raise _refused("a sequential leg has a warm-up and no guard steps")

    @property
    def slices_per_block(self) -> int:
        return 2 if self.mode is Mode.SEQUENTIAL else SLICES_PER_BLOCK

    @property
    def margin(self) -> float:
        """The equivalence margin on the log ratio."""
        return self.margin_ppm / 1_000_000

    @property
    def level(self) -> Level:
        """What the plan can become; how many sessions were usable is the estimate's to say."""
        if self.sessions == 1:
            return Level.QUICK
        return Level.STANDARD if self.sessions >= STANDARD_SESSIONS else Level.SHORT

    def launched_first(self, session: int) -> Arm:
        """Return the arm whose process starts first in `session`."""
        if self.launch_order is LaunchOrder.RAW_FIRST:
            return Arm.RAW
        if self.launch_order is LaunchOrder.PROTECTED_FIRST:
            return Arm.PROTECTED
        bit = stream(self.seed, "launch", 0, 0, 1)[0] & 1
        return Arm.PROTECTED if (bit + session) % 2 else Arm.RAW

    def sequence(self, phase: Phase, session: int, block: int) -> str:
        """Return the arms of one block in the order in which they run, as letters."""
        if self.mode is Mode.SEQUENTIAL:
            first = self.launched_first(session)
            return first.value + first.other.value
        return SEQUENCES[stream(self.seed, phase.value, session, block, 1)[0] & 3]

    def schedule(self) -> tuple[tuple[str, ...], ...]:
        """Return the sequences of all measured blocks, session by session."""
        return tuple(
            tuple(self.sequence(Phase.MEASURED, session, block) for block in range(self.blocks_per_session))
            for session in range(self.sessions)
        )

    def to_json(self) -> dict[str, Json]:
        """Return the closed object that `from_json` reads."""
        return {
            "blocks_per_session": self.blocks_per_session,
            "guard_ns": self.guard_ns,
            "guard_steps": self.guard_steps,
            "launch_order": self.launch_order.value,
            "leg_ns": self.leg_ns,
            "margin_ppm": self.margin_ppm,
            "mode": self.mode.value,
            "seed": self.seed.hex(),
            "sessions": self.sessions,
            "slice_steps": self.slice_steps,
            "version": VERSION,
            "warmup": self.warmup.to_json(),
        }

    @classmethod
    def from_json(cls, value: Json) -> Design:
        """Read a design.

        Raises:
            FormatError: `schema-invalid`, another shape.
            UsageError: `usage`, values that make no measurement.
        """
        fields = Fields(value, "design")
        fields.integer("version", low=VERSION, high=VERSION)
        design = cls(
            mode=Mode(fields.choice("mode", [mode.value for mode in Mode])),
            seed=fields.digest("seed"),
            sessions=fields.integer("sessions"),
            blocks_per_session=fields.integer("blocks_per_session"),
            slice_steps=None if fields.null("slice_steps") else fields.integer("slice_steps"),
            leg_ns=None if fields.null("leg_ns") else fields.integer("leg_ns"),
            guard_steps=fields.integer("guard_steps"),
            guard_ns=fields.integer("guard_ns"),
            launch_order=LaunchOrder(fields.choice("launch_order", [order.value for order in LaunchOrder])),
            margin_ppm=fields.integer("margin_ppm"),
            warmup=WarmupRule.read(fields.child("warmup")),
        )
        fields.end()
        return design

    @property
    def sha256(self) -> bytes:
        """The digest that fixes the design: publish it, or have it signed, before the first slice."""
        return sha256(encode(self.to_json()))


def _refused(message: str) -> UsageError:
    return UsageError(Code.USAGE, f"not a design that can be measured: {message}")
