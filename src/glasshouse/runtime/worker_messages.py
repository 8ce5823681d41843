"""What the worker may say to the agent, read strictly: the worker runs the owner's script and is not
trusted to describe anything but its own work.

Laws: every message is one of the types below, within limits, or `worker-failed`; no text of the worker's
goes anywhere but into sealed outputs (names) and bounded fields of the evidence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from glasshouse.errors import Code, FormatError, RunError
from glasshouse.evidence.events import is_loss
from glasshouse.evidence.results import STOP_REASONS
from glasshouse.wire.canonical import Json
from glasshouse.wire.fields import Fields

__all__ = [
    "Failed",
    "Finished",
    "Imported",
    "Message",
    "Opened",
    "OutputBegins",
    "OutputEnds",
    "Progress",
    "Ready",
    "Running",
    "Sandbox",
    "Work",
    "parse",
]

MAX_OUTPUT_BYTES = 1 << 44
# As the receipt will name it.
_NAME = re.compile(r"[^\x00-\x1f\x7f/\\]+(/[^\x00-\x1f\x7f/\\]+)*")
_DIGEST_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_MAX_DIGESTS = 64
_UNITS = ("epoch", "step")

# The reasons a worker may give for its own end; it cannot speak for the gate, the agent or the verifier.
_FAILURES = frozenset(
    {
        Code.WORKER_FAILED,
        Code.OUT_OF_MEMORY,
        Code.NONFINITE_LOSS,
        Code.MODEL_NOT_FOUND,
        Code.DEVICE_MISSING,
        Code.REQUIREMENT_MISSING,
        Code.SCRIPT_FAILED,
        Code.INTERRUPTED,
        Code.JOB_INVALID,
        Code.ASSET_UNKNOWN,
        Code.ASSET_DIGEST,
        Code.PACKAGE_TAMPERED,
        Code.PACKAGE_TRUNCATED,
        Code.DISK_FULL,
        Code.UNSUPPORTED,
        Code.OUTPUT_REFUSED,
        Code.PLATFORM,
        Code.INTERNAL,
        Code.COLLECTIVE_TAMPERED,
        Code.COLLECTIVE_MISMATCH,
        Code.COLLECTIVE_TIMEOUT,
        Code.COLLECTIVE_ABORTED,
        Code.COLLECTIVE_UNSEALED,
        Code.RANK_LOST,
        Code.GROUP_SECRET,
        Code.GROUP_MISMATCH,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sandbox:
    """The launcher's report, whole, for `sandbox` to read."""

    report: Json


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """The worker has closed itself to debuggers and waits."""

    pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """Third-party frameworks are loaded."""

    us: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """The grant was understood and the inputs are usable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """Training begins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far the work is."""

    done: int
    total: int | None
    unit: str
    loss: str | None
    elapsed_us: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputBegins:
    """An output of `size` bytes follows in data frames."""

    name: str
    kind: str
    content: str
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputEnds:
    """The output is complete; its SHA-256 as the worker saw it."""

    sha256: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """How much was done, and why it stopped."""

    unit: str
    done: int
    elapsed_us: int
    stop_reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The work is complete; `loss` is the first and the final one."""

    work: Work
    loss: tuple[str, str] | None
    trainable: int | None
    digests: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The worker gives up; its words are in the sealed log."""

    code: Code


Message: TypeAlias = (
    Sandbox | Ready | Imported | Opened | Running | Progress | OutputBegins | OutputEnds | Finished | Failed
)


def parse(value: Json) -> Message:
    """Read one control message.

    Raises:
        RunError: `worker-failed`: not a message, or beyond its limits.
    """
    try:
        return _parse(value)
    except FormatError:
        # Its text may quote the worker, so it goes no further.
        raise RunError(Code.WORKER_FAILED, "the worker sent a message that it must not send") from None


def _parse(value: Json) -> Message:
    fields = Fields(value, "worker message")
    kind = fields.identifier("type")
    if kind == "sandbox":
        return Sandbox(report=value)
    message: Message
    match kind:
        case "ready":
            message = Ready(pid=fields.integer("pid", low=1, high=2**31 - 1))
        case "imported":
            message = Imported(us=fields.integer("us"))
        case "opened":
            message = Opened()
        case "running":
            message = Running()
        case "progress":
            message = _progress(fields)
        case "output":
            message = OutputBegins(
                name=_output_name(fields),
                kind=fields.choice("kind", ("checkpoint", "output")),
                content=fields.choice("class", ("file", "weights")),
                size=fields.integer("bytes", high=MAX_OUTPUT_BYTES),
            )
        case "output-end":
            message = OutputEnds(sha256=fields.digest("sha256"))
        case "finished":
            message = _finished(fields)
        case "failed":
            message = Failed(code=_failure(fields.identifier("code")))
        case _:
            raise FormatError(Code.SCHEMA, "an unknown message")
    fields.end()
    return message


def _progress(fields: Fields) -> Progress:
    return Progress(
        done=fields.integer("done"),
        total=_optional_integer(fields, "total"),
        unit=fields.choice("unit", _UNITS),
        loss=_optional_decimal(fields, "loss"),
        elapsed_us=fields.integer("elapsed_us"),
    )


def _finished(fields: Fields) -> Finished:
    work = fields.child("work")
    done = Work(
        unit=work.choice("unit", _UNITS),
        done=work.integer("done"),
        elapsed_us=work.integer("elapsed_us"),
        stop_reason=work.choice("stop_reason", STOP_REASONS),
    )
    work.end()
    losses = fields.any("loss")
    loss = None
    if losses is not None:
        both = Fields(losses, "loss")
        loss = _loss(both.decimal("first")), _loss(both.decimal("final"))
        both.end()
    digests = fields.any("digests")
    if not isinstance(digests, dict) or len(digests) > _MAX_DIGESTS or not all(map(_DIGEST_NAME.fullmatch, digests)):
        raise FormatError(Code.SCHEMA, "digests that are not few and named")
    named = Fields(digests, "digests")
    return Finished(
        work=done,
        loss=loss,
        trainable=_optional_integer(fields, "trainable"),
        digests=tuple((name, named.digest(name)) for name in sorted(digests)),
    )


def _output_name(fields: Fields) -> str:
    name = fields.text("name", max_chars=128, pattern=_NAME)
    if any(part in (".", "..") for part in name.split("/")):
        raise FormatError(Code.SCHEMA, "an output whose name leaves its folder")
    return name


def _failure(text: str) -> Code:
    try:
        code = Code(text)
    except ValueError:
        return Code.WORKER_FAILED
    return code if code in _FAILURES else Code.WORKER_FAILED


def _optional_integer(fields: Fields, name: str) -> int | None:
    value = fields.any(name)
    return None if value is None else Fields({name: value}, "worker message").integer(name)


def _optional_decimal(fields: Fields, name: str) -> str | None:
    value = fields.any(name)
    return None if value is None else _loss(Fields({name: value}, "worker message").decimal(name))


def _loss(text: str) -> str:
    """Return the one spelling of a number with six significant digits."""
    loss = f"{float(text):.6g}"
    if not is_loss(loss):
        raise FormatError(Code.SCHEMA, "a loss that is no finite number")
    return loss
