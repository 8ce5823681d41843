"""Messages that pace a job which is being measured (ADR 0009): orders to its worker, and the worker's reports.

One message is the canonical JSON of one object, at most `MAX_BYTES` long. Laws: ``order(encode(o)) == o`` and
``report(encode(r)) == r``; every schema is closed, and every number has a limit; there is no text in a message
but its type, the origin of its times and names out of `PHASES`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from glasshouse.errors import Code, FormatError
from glasshouse.wire import canonical
from glasshouse.wire.canonical import MAX_INTEGER, Json
from glasshouse.wire.fields import Fields

__all__ = [
    "MAX_BYTES",
    "PHASES",
    "End",
    "Go",
    "Order",
    "Parked",
    "Report",
    "Slice",
    "encode",
    "order",
    "parse_order",
    "parse_report",
    "report",
]

MAX_BYTES = 4096
# Of a step, in the order in which most take them; `gradients` is their exchange between machines.
PHASES = ("data", "forward", "backward", "gradients", "optimizer", "checkpoint", "residual")

_MAX_SLICE_NS = 86_400 * 10**9
_MAX_GUARD_NS = 3600 * 10**9
_MAX_BURN_NS = 10**9
# A clock that counts nanoseconds since the machine's start passes 2^53 after 104 days.
_ORIGIN = re.compile(r"0|[1-9][0-9]{0,18}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Go:
    """Go on: a guard that nobody records, then one slice, then park.

    Attributes:
        origin_ns: what `time.perf_counter_ns` (CLOCK_MONOTONIC) said at the origin of the reported times.
        until: the guard lasts at least until so many steps are done …
        guard_ns: … and so long.
        steps: length of the slice in steps; None where `least_ns` says it.
        least_ns: the slice ends with the first step that ends so long after its beginning; None where `steps` says it.
        burn_ns: added to every step by waiting busily: an overhead that is planted to be found.
        stamps: whether the phases of each step are timed.
    """

    origin_ns: int
    until: int
    steps: int | None
    least_ns: int | None
    guard_ns: int
    burn_ns: int
    stamps: bool

    def to_json(self) -> dict[str, Json]:
        return {
            "burn_ns": self.burn_ns,
            "guard_ns": self.guard_ns,
            "least_ns": self.least_ns,
            "origin_ns": str(self.origin_ns),
            "stamps": self.stamps,
            "steps": self.steps,
            "type": "pace-go",
            "until": self.until,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """Go on until so many steps are done, then end as if the owner had stopped the job."""

    until: int

    def to_json(self) -> dict[str, Json]:
        return {"type": "pace-end", "until": self.until}


@dataclass(frozen=True, kw_only=True, slots=True)
class Parked:
    """The worker stands at its first step boundary, with so many steps done."""

    done: int

    def to_json(self) -> dict[str, Json]:
        return {"done": self.done, "type": "pace-parked"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A slice is over, and the worker stands again.

    Attributes:
        done_before, done_after: steps done at t0 and at t1.
        t0_ns, t1_ns: after the synchronisations, since the order's origin.
        guard_steps, guard_ns: every step since the worker stood before, and how long they took.
        skew_ns: what the clock that runs while the machine sleeps counted between t0 and t1, less t1 − t0.
        hooks_ns: time that the steps waited for their channel and their inputs.
        loss_finite: whether the last loss, if one was given, is a finite number.
        steps: boundaries that were counted between t0 and t1.
        cpu_ns: CPU time of the worker's process between t0 and t1, all its threads together.
        device_bytes: the most memory that tensors have taken on the GPU so far; None where there is none.
        wait_ppm: how much of a step's time, in millionths, passes on the GPU after the host has told it everything;
            looked at in the guard of a slice with stamps, else None, and None where there is no GPU.
        phases: nanoseconds by phase, of those that were stamped; None where none were to be.
    """

    done_before: int
    done_after: int
    t0_ns: int
    t1_ns: int
    guard_steps: int
    guard_ns: int
    skew_ns: int
    hooks_ns: int
    loss_finite: bool
    steps: int
    cpu_ns: int
    device_bytes: int | None
    wait_ppm: int | None
    phases: Mapping[str, int] | None

    def to_json(self) -> dict[str, Json]:
        return {
            "cpu_ns": self.cpu_ns,
            "device_bytes": self.device_bytes,
            "done_after": self.done_after,
            "done_before": self.done_before,
            "guard_ns": self.guard_ns,
            "guard_steps": self.guard_steps,
            "hooks_ns": self.hooks_ns,
            "loss_finite": self.loss_finite,
            "phases": None if self.phases is None else dict(self.phases),
            "skew_ns": self.skew_ns,
            "steps": self.steps,
            "t0_ns": self.t0_ns,
            "t1_ns": self.t1_ns,
            "type": "pace-slice",
            "wait_ppm": self.wait_ppm,
        }


Order: TypeAlias = Go | End
Report: TypeAlias = Parked | Slice


def encode(message: Order | Report) -> bytes:
    """Return a message's bytes."""
    return canonical.encode(message.to_json())


def order(data: bytes) -> Order:
    """Parse an order's bytes; raises `FormatError`."""
    return parse_order(canonical.decode(data, max_bytes=MAX_BYTES))


def report(data: bytes) -> Report:
    """Parse a report's bytes; raises `FormatError`."""
    return parse_report(canonical.decode(data, max_bytes=MAX_BYTES))


def parse_order(value: Json) -> Order:
    """Inverse of `to_json`.

    Raises:
        FormatError: `schema-invalid`.
    """
    fields = Fields(value, "order")
    if fields.choice("type", ("pace-end", "pace-go")) == "pace-end":
        end = End(until=fields.integer("until"))
        fields.end()
        return end
    go = Go(
        origin_ns=int(fields.text("origin_ns", max_chars=19, pattern=_ORIGIN)),
        until=fields.integer("until"),
        steps=None if fields.null("steps") else fields.integer("steps", low=1),
        least_ns=None if fields.null("least_ns") else fields.integer("least_ns", low=1, high=_MAX_SLICE_NS),
        guard_ns=fields.integer("guard_ns", high=_MAX_GUARD_NS),
        burn_ns=fields.integer("burn_ns", high=_MAX_BURN_NS),
        stamps=fields.flag("stamps"),
    )
    fields.end()
    if (go.steps is None) == (go.least_ns is None):
        raise FormatError(Code.SCHEMA, "a slice ends by its steps or by its time, and by one of them")
    return go


def parse_report(value: Json) -> Report:
    """Inverse of `to_json`.

    Raises:
        FormatError: `schema-invalid`.
    """
    fields = Fields(value, "report")
    if fields.choice("type", ("pace-parked", "pace-slice")) == "pace-parked":
        parked = Parked(done=fields.integer("done"))
        fields.end()
        return parked
    found = Slice(
        done_before=fields.integer("done_before"),
        done_after=fields.integer("done_after"),
        t0_ns=fields.integer("t0_ns"),
        t1_ns=fields.integer("t1_ns"),
        guard_steps=fields.integer("guard_steps"),
        guard_ns=fields.integer("guard_ns"),
        skew_ns=fields.integer("skew_ns", low=-MAX_INTEGER),
        hooks_ns=fields.integer("hooks_ns"),
        loss_finite=fields.flag("loss_finite"),
        steps=fields.integer("steps"),
        cpu_ns=fields.integer("cpu_ns"),
        device_bytes=None if fields.null("device_bytes") else fields.integer("device_bytes"),
        wait_ppm=None if fields.null("wait_ppm") else fields.integer("wait_ppm", high=1_000_000),
        phases=None if fields.null("phases") else _phases(fields.any("phases")),
    )
    fields.end()
    return found


def _phases(value: Json) -> dict[str, int]:
    fields = Fields(value, "phases")
    found = {name: fields.integer(name) for name in PHASES if fields.has(name)}
    fields.end()
    return found
