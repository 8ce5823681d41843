"""Cells, sizes, times and ratios as a reader meets them, in the terminal and on the page."""

from __future__ import annotations

from glasshouse.bench.collectives.values import Cell, Kind, Way
from glasshouse.bench.report.numbers import NB, seconds

__all__ = ["WAYS", "cap_words", "cell_words", "size_words", "time_words", "times_words"]

WAYS = {
    Way.RAW: "raw gloo, in plaintext",
    Way.SEALED: "sealed, as on one machine",
    Way.NETWORK: "sealed, through the network",
    Way.SERIAL: "serial, the paper's pattern",
    Way.RING: "ring, pipelined",
    Way.DIRECT: "direct, in two phases",
    Way.PLAIN: "network without AEAD, here only",
    Way.ALONE: "no communication",
}


def size_words(bytes_: int) -> str:
    """Return `64 KiB`, `25 MiB`, `1.5 GiB`."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if bytes_ >= size:
            return f"{round(bytes_ / size, 1):g}{NB}{unit}"
    return f"{bytes_}{NB}B"


def cap_words(cap_mib: int | None) -> str:
    """Return `cap 25 MiB`, or that DDP chose it by itself."""
    return "default cap" if cap_mib is None else f"cap {cap_mib}{NB}MiB"


def cell_words(cell: Cell, *, short: bool = False) -> str:
    """Return what a cell is, in one line.

    Args:
        cell: the cell.
        short: without what goes without saying in a table for one number of ranks.
    """
    words = [size_words(cell.bytes or 0) if cell.kind is Kind.ALL_REDUCE else str(cell.model)]
    if cell.dtype != "float32":
        words.append(cell.dtype)
    if cell.kind is not Kind.ALL_REDUCE and not (short and cell.cap_mib is None):
        words.append(cap_words(cell.cap_mib))
    if not short:
        words.append(f"{cell.ranks} ranks")
    return ", ".join(words)


def time_words(value_s: float) -> str:
    """Return a time with three significant digits."""
    return seconds(value_s)


def times_words(ratio: float) -> str:
    """Return `1.05×`, `12.3×`."""
    return f"{ratio:.2f}×" if ratio < 10 else f"{ratio:.1f}×"
