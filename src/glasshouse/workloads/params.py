"""What the parameters of every workload have in common; checked without any training framework.

Law: ``read(travelling(p)) == read(p)``; `travelling` is idempotent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, BinaryIO, ClassVar, NamedTuple, Protocol, Self

from glasshouse.errors import FormatError
from glasshouse.package.limits import DEFAULT_BYTES, MAX_BYTES, MAX_COUNT, CheckpointLimits
from glasshouse.wire.canonical import Json
from glasshouse.workloads.job_keys import (
    FLAG,
    Field,
    Rule,
    choice,
    declared,
    integer,
    job_invalid,
    needs,
    number,
    read,
    table,
    text,
)

COUNT = integer(1, 10**9)
"""Of steps or epochs."""
NAME = text(r"[^\x00]*")
SECONDS = number(0.01, 30 * 86400.0)

_SLOTS = table(
    Field("arm", choice("A", "P", "R"), "Whose slots these are; A for a worker that has the machine for itself."),
    Field("seed", text("[0-9a-f]{64}", "64 hexadecimal digits"), "From which the order follows."),
    Field("slot_ns", integer(10**6, 60 * 10**9), "Length of a slot in nanoseconds."),
    Field("steps", integer(1, 64), "Counted steps in a slot."),
    Field("uncounted", integer(1, 4), "Steps before them."),
    Field("warmup_steps", integer(0, 2**18 - 1), "Steps until the worker is warm."),
    Field(
        "end_ns",
        text("0|[1-9][0-9]{0,18}", "nanoseconds as a text of at most 19 digits", max_chars=19),
        "When it is over, by CLOCK_MONOTONIC of the machine that it runs on.",
    ),
)


class Example(NamedTuple):
    """A job to begin with: its `[params]`, and its inputs by their names."""

    params: Mapping[str, Any]
    files: Mapping[str, str]


class PlainFile(Protocol):
    """A file that is to be packed."""

    @property
    def bytes(self) -> int:
        """How long it is."""
        ...

    @property
    def open(self) -> Callable[[], BinaryIO]:
        """Opens it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Params:
    """The checked `[params]` of a job file; a workload adds its own keys."""

    RULES: ClassVar[tuple[Rule, ...]] = (needs("profile", "slots"),)
    TARGET: ClassVar[tuple[str, float] | None] = None  # the key and value that a job without an end gets
    ENDS: ClassVar[tuple[str, ...]] = ()  # the keys that give it one
    INPUTS: ClassVar[tuple[str, ...]] = ()  # the keys that name an input
    ELSEWHERE: ClassVar[Mapping[str, str]] = MappingProxyType({})  # what stands for names that are tried, and not known

    seed: Annotated[int, integer(0, 2**31 - 1), "Of everything random: weights, the order of examples."] = 0
    deterministic: Annotated[bool, FLAG, "Bit-equal results from run to run on the same machine and versions."] = False
    threads: Annotated[
        int | None, integer(1, 4096), "Threads of the CPU; 1 in deterministic mode, else the framework's choice."
    ] = None
    max_outputs: Annotated[int, integer(1, MAX_COUNT), "How many outputs may come back."] = MAX_COUNT
    max_output_bytes: Annotated[int, integer(1, MAX_BYTES), "How large they may be together."] = DEFAULT_BYTES
    slots: Annotated[
        Mapping[str, Json] | None,
        _SLOTS,
        "The schedule of a job that is measured (spec/measurement.md): the job ends with it, or by a target named "
        "here; its record is one more output.",
    ] = None
    profile: Annotated[
        int | None, integer(1, 256), "How many steps after the warm-up of a measured job are profiled by phase."
    ] = None
    # How often and how large checkpoints may be; in the job file a table of its own, sealed with the parameters.
    checkpoints: CheckpointLimits | None = None

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Check a table, as parsed from TOML or as `travelling` returned it; raises `UsageError` (`job-invalid`)."""
        try:
            checkpoints = CheckpointLimits.of(values)
        except FormatError as error:
            raise job_invalid(f"checkpoints: {error.message}") from None
        own = {name: value for name, value in values.items() if name != "checkpoints"}
        found = read(declared(cls), own, "params", rules=cls.RULES, elsewhere=cls.ELSEWHERE)
        if cls.TARGET and all(found[name] is None for name in cls.ENDS):
            found[cls.TARGET[0]] = cls.TARGET[1]
        return cls(**found, checkpoints=checkpoints)


@dataclass(frozen=True, kw_only=True)
class DeviceParams(Params):
    """Of a workload that chooses its device itself."""

    device: Annotated[str, choice("auto", "cpu", "cuda"), "`auto` takes a GPU where there is one."] = "auto"


def travelling(value: Any) -> Json:
    """Return a value of `[params]` as it travels in the sealed index: a float becomes a decimal string."""
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return [travelling(item) for item in value]
    checked: Json = value
    return checked
