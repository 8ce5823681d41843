"""The messages of a rank to its worker, beside progress and those of `rank_store`.

`rank_channel` writes them, `rank_server` and `rank_pairs` read them. A rank numbers its requests, and the worker's
answer has the same number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from glasshouse.errors import Code
from glasshouse.wire.record import LEFT_OUT, Decimal, Member, Record, choice, integer, items, table, text
from glasshouse.workloads.process.failures import MOST_WORDS

DOOR_NAME_CHARS = 32
PASSING_ON_S = 60.0
"""A rank that is at its end, and a worker whose ranks are, wait no longer for what was saved to be passed on."""
_MAX_DIGESTS = 64
_MAX_PATHS = 64

Number: TypeAlias = Annotated[int, Member("id")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Join(Record, name="rank request", constants={"type": "join"}):
    """The first message over an inherited connection; elsewhere it has a token (`wire.ranks`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report(Record, name="ended", constants={"type": "ended"}):
    """The end of rank 0, which is the run's; see `process.job_control.Result`."""

    stop_reason: Annotated[str, text()] = "finished"  # this and the digests are checked by the agent
    unit: Annotated[str, choice(("epoch", "step"))] = "step"
    done: int = 0
    elapsed_us: int = 0
    loss_first: Decimal | None = None
    loss_final: Decimal | None = None
    trainable: int | None = None
    digests: Annotated[Mapping[str, str], table(_MAX_DIGESTS, text(), text())] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFailed(Record, name="failed", constants={"type": "failed"}):
    """The end of a rank that failed."""

    code: Code
    words: Annotated[str, text(MOST_WORDS)]  # for the sealed log


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOutput(Record, name="output", constants={"type": "output"}):
    """An output of rank 0, in the file whose descriptor comes along."""

    number: Number
    kind: Annotated[str, text()]  # this and the name are checked by `Task.pass_on`
    name: Annotated[str, text()]


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveTogether(Record, name="checkpoint", constants={"type": "checkpoint"}):
    """Requests a checkpoint together with all other ranks."""

    number: Number
    shared: bool  # whether these are files that other ranks name and change too
    step: int
    # What this rank saves; without it, none saves.
    paths: Annotated[tuple[str, ...] | None, items(_MAX_PATHS, text()), LEFT_OUT] = None
    wait_us: Annotated[int | None, integer(), LEFT_OUT] = None  # how long it may take to begin; without it, any time


@dataclass(frozen=True, kw_only=True, slots=True)
class PartBegins(Record, name="part", constants={"type": "part"}):
    """A rank's part, which comes through the pipe whose end comes along."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartEnds(Record, name="part-end", constants={"type": "part-end"}):
    """All of it is in the pipe."""

    number: Number
    size: Annotated[int, Member("bytes")]
    whole: bool  # whether it is to be counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Dial(Record, name="dial", constants={"type": "dial"}):
    """Requests a connection with a listener on another machine's loopback."""

    number: Number
    machine: int
    port: Annotated[int, integer(0, 65535)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask(Record, name="rank request"):
    """Requests the group secret, or a door: a socket on which connections of other ranks come as descriptors.

    Or, as `saved`, the word that no checkpoint is under way any more, by a rank that is at its end.
    """

    number: Number
    kind: Annotated[str, Member("type"), choice(("door", "group-secret", "saved"))]


@dataclass(frozen=True, kw_only=True, slots=True)
class CallDoor(Record, name="call", constants={"type": "call"}):
    """Requests a connection through the door of that name."""

    number: Number
    name: Annotated[str, text(DOOR_NAME_CHARS)]
