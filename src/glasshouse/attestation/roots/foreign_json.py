"""JSON that others wrote and signed, which is canonical in no form: one reading of it, or none."""

from __future__ import annotations

import json
from typing import Any

from glasshouse.errors import Code, FormatError


def read_foreign(data: bytes) -> dict[str, Any]:
    """Return an object of JSON in which no object has a key twice; raises `FormatError`, `schema-invalid`."""
    try:
        found = json.loads(data.decode(), object_pairs_hook=_once)
    except (RecursionError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise FormatError(Code.SCHEMA, "no object of JSON in which each key is there once")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError
    return found
