"""Figures that others published, for comparison and nothing else: single pairs of legs, one after the other."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from glasshouse.errors import Code, FormatError
from glasshouse.jobs.files import read_bounded
from glasshouse.wire.fields import Fields

__all__ = ["Published", "read_rows"]

MAX_BYTES = 1 << 18
MAX_ROWS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """One published pair.

    Args:
        kind: the workload's.
        label: what ran, where, and until when.
        order: the leg that ran first; None where the source does not say.
        slowdown: δ = T_protected/T_raw − 1.
    """

    kind: str
    label: str
    order: str | None
    slowdown: float


def read_rows(path: Path | None, *, kind: str) -> list[Published]:
    """Return the rows of one kind of workload.

    Args:
        path: a file of ``{"note": …, "rows": [{"kind", "name", "gpu", "target", "order", "overhead_pct"}, …]}``;
            None for the one that comes along.

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
    fields = Fields(value, "published")
    fields.text("note", max_chars=2000)
    rows = [_row(Fields(one, "published.rows")) for one in fields.items("rows", max_items=MAX_ROWS)]
    fields.end()
    return [one for one in rows if one.kind == kind]


def _row(fields: Fields) -> Published:
    kind, name, gpu, target = (fields.text(one, max_chars=40) for one in ("kind", "name", "gpu", "target"))
    order = None if fields.null("order") else fields.choice("order", ["protected-first", "raw-first"])
    loss = float(fields.decimal("overhead_pct")) / 100
    fields.end()
    if loss >= 1:
        raise FormatError(Code.SCHEMA, "a published loss of all throughput")
    # The loss of throughput 1 − X_p/X_r, as time.
    return Published(kind=kind, label=f"{name}, {gpu}, {target}", order=order, slowdown=loss / (1 - loss))
