"""What answers a request, and what an authentic message leaves to be decided."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from glasshouse.broker.http_api import Problem
from glasshouse.wire.canonical import Json, encode

JSON_TYPE = "application/json"
PACE_US = 1_000_000
OVER_PACE_US = 60_000_000  # of what was answered for good: a few answers may be lost


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiAnswer:
    """A response: a status and canonical JSON, or text of another content type."""

    body: bytes
    status: int = 200
    media_type: str = JSON_TYPE

    @classmethod
    def of(cls, value: Mapping[str, Json]) -> ApiAnswer:
        """Return an answer in JSON."""
        return cls(body=encode(value))

    @classmethod
    def refusal(cls, error: BaseException) -> ApiAnswer:
        """Return a problem document."""
        problem = Problem.of(error)
        return cls(body=problem.encode(), status=problem.status)


class Effect(Enum):
    """What a message that was read does to the standing of the address that it came from."""

    CREDIT = auto()  # something authentic and new
    NOTHING = auto()  # what an honest runtime repeats, no faster than it should: see `intake.Pace`
    CHARGE = auto()  # it came to nothing, or to no more than its recording played again does


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What an authentic message leaves to be decided."""

    decide: Callable[[], ApiAnswer]  # answers it, on the deciding thread
    # On the standing of its address; what was answered before is charged: anyone on the way can repeat a recording.
    effect: Effect
    repeats: str = ""  # of `Effect.NOTHING`: what is repeated, by a name of its own
    every_us: int = PACE_US  # how often, in microseconds
    ahead: Callable[[], None] | None = None  # what takes long and can be done before, on another thread


@dataclass(frozen=True, kw_only=True, slots=True)
class Rest:
    """What has to be read behind the first part of a message, which is authentic, before anything is decided."""

    of: str  # whose it is: its launch
    size: int  # bytes
    check: Callable[[int], object]  # takes how many bytes follow; it raises for another number
    read: Callable[[bytes], Decision]  # takes them; it raises for others than were signed


def keep(table: OrderedDict[str, Any], name: str, value: object, *, most: int) -> None:
    """Store `value` as the latest, and drop the oldest where there are too many: memory is bounded."""
    table[name] = value
    table.move_to_end(name)
    if len(table) > most:
        table.popitem(last=False)
