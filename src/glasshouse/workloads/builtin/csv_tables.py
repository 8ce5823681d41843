"""CSV tables as numbers."""

from __future__ import annotations

import csv
import io
import math
from array import array
from collections.abc import Iterable
from typing import BinaryIO, NamedTuple

from glasshouse.workloads.job_keys import job_invalid


class CsvTable(NamedTuple):
    """Features row by row, and one class for each row."""

    features: array[float]  # row-major
    width: int  # features in a row
    labels: array[int]  # the class of each row, an index into `classes`
    classes: tuple[str, ...]  # the label column's different values, sorted


def read_csv(stream: BinaryIO, *, label: str | None, name: str) -> CsvTable:
    """Read a table with a header line; every column but the label, the last one when None, holds numbers.

    Raises:
        UsageError: `job-invalid`, naming line and column.
    """
    text = io.TextIOWrapper(stream, "utf-8", newline="")
    try:
        return _read(csv.reader(text), label, name)
    except (csv.Error, UnicodeDecodeError) as error:
        raise job_invalid(f"{name} is not a CSV table in UTF-8") from error
    finally:
        text.detach()  # the stream is the caller's to close


def _read(lines: Iterable[list[str]], label: str | None, name: str) -> CsvTable:
    rows = iter(lines)
    header = next(rows, [])
    if not header:
        raise job_invalid(f"{name} has no usable row: it is empty, or begins with an empty line")
    wanted = header[-1] if label is None else label
    if len(header) < 2 or wanted not in header:
        raise job_invalid(f"{name} needs a header line with the label column {wanted!r} and others")
    at = header.index(wanted)
    features, found = array("d"), []
    for number, row in enumerate(rows, start=2):
        if not row:
            continue
        if len(row) != len(header):
            raise job_invalid(f"{name} line {number} has {len(row)} columns where the header has {len(header)}")
        found.append(row.pop(at))
        for column, text in zip((*header[:at], *header[at + 1 :]), row, strict=True):
            features.append(_number(text, f"{name} line {number} column {column!r}"))
    if not found:
        raise job_invalid(f"{name} has no usable row: there is nothing below its header line")
    classes = tuple(sorted(set(found)))
    if len(classes) < 2:
        raise job_invalid(f"{name} has fewer than two different values in the column {wanted!r}")
    index = {value: position for position, value in enumerate(classes)}
    return CsvTable(features, len(header) - 1, array("q", (index[value] for value in found)), classes)


def _number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise job_invalid(f"{where} is not a finite number")
    return value
