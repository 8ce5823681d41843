"""Figures that others published, for comparison and nothing else: single pairs of legs, one after the other."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from glasshouse.errors import Code, FormatError
from glasshouse.jobs.owner.home import read_bounded
from glasshouse_bench.documents import Document, Kind, listed
from glasshouse_bench.strict_fields import Fields

__all__ = ["Published", "read_rows"]

MAX_BYTES = 1 << 18
MAX_ROWS = 64
_SHORT = Kind(lambda found, name: found.text(name, max_chars=40))
_NOTE = Kind(lambda found, name: found.text(name, max_chars=2000))
_ORDER = Kind(lambda found, name: found.choice(name, ("protected-first", "raw-first")))


@dataclass(frozen=True, kw_only=True, slots=True)
class Published(Document):
    """One published pair: its workload's kind, what ran, where, until when, and in which order, if that is known.

    Args:
        overhead_pct: the loss of throughput 1 − X_p/X_r, in percent.
    """

    kind: Annotated[str, _SHORT]
    name: Annotated[str, _SHORT]
    gpu: Annotated[str, _SHORT]
    target: Annotated[str, _SHORT]
    order: Annotated[str, _ORDER] | None
    overhead_pct: Annotated[str, Kind(Fields.decimal)]

    def _check(self) -> None:
        if float(self.overhead_pct) >= 100:
            raise FormatError(Code.SCHEMA, "a published loss of all throughput")

    @property
    def label(self) -> str:
        return f"{self.name}, {self.gpu}, {self.target} ({self.order or 'order unknown'})"

    @property
    def slowdown(self) -> float:
        """δ = T_protected/T_raw − 1."""
        loss = float(self.overhead_pct) / 100
        return loss / (1 - loss)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Published(Document):
    note: Annotated[str, _NOTE]
    rows: Annotated[tuple[Published, ...], listed(Published, most=MAX_ROWS)]


def read_rows(path: Path | None, *, kind: str) -> list[Published]:
    """Return the rows of one kind of workload, of a file or, for None, of the one that comes along.

    Raises:
        UsageError: the file cannot be read.
        FormatError: `schema-invalid`.
    """
    own = files(__package__).joinpath("published.json")
    data = own.read_bytes() if path is None else read_bounded(path, max_bytes=MAX_BYTES, what="file of published rows")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise FormatError(Code.SCHEMA, "the file of published rows is not JSON") from None
    return [one for one in _Published.parse(value).rows if one.kind == kind]
