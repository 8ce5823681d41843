"""Reads a job file's `[params]` strictly: every error names the field and says what belongs there."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from glasshouse.errors import Code, UsageError

__all__ = ["Table", "invalid"]


def invalid(field: str, expected: str) -> UsageError:
    """Return the error of a field that is not what belongs there."""
    return UsageError(Code.JOB_INVALID, f"params.{field} must be {expected}")


class Table:
    """One table of parameters; each accessor takes a field once, `end` refuses what is left.

    Args:
        values: as parsed from TOML or JSON. Where a number with a fraction belongs, a decimal string
            is taken too: it is the form in which one travels in canonical JSON.

    Raises:
        UsageError: `job-invalid` from every method.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._left = dict(values)

    def text(self, name: str, default: str | None = None, *, max_chars: int = 1024) -> str:
        value = self._left.pop(name, default)
        if value is None:
            raise UsageError(Code.JOB_INVALID, f"params.{name} is missing")
        if not isinstance(value, str) or not value or len(value) > max_chars or "\x00" in value:
            raise invalid(name, f"a text of 1 to {max_chars} characters")
        return value

    def optional_text(self, name: str) -> str | None:
        return self.text(name) if name in self._left else None

    def texts(self, name: str, default: tuple[str, ...] = (), *, max_items: int = 256) -> tuple[str, ...]:
        value = self._left.pop(name, default)
        if not isinstance(value, (list, tuple)) or len(value) > max_items:
            raise invalid(name, f"a list of at most {max_items} texts")
        if not all(isinstance(item, str) and len(item) <= 4096 and "\x00" not in item for item in value):
            raise invalid(name, "a list of texts")
        return tuple(value)

    def choice(self, name: str, default: str, options: Collection[str]) -> str:
        value = self._left.pop(name, default)
        if not isinstance(value, str) or value not in options:
            raise invalid(name, "one of " + ", ".join(sorted(options)))
        return value

    def integer(self, name: str, default: int, *, low: int, high: int) -> int:
        value = self._left.pop(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise invalid(name, f"a whole number from {low} to {high}")
        return value

    def optional_integer(self, name: str, *, low: int, high: int) -> int | None:
        return self.integer(name, low, low=low, high=high) if name in self._left else None

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        value = self._left.pop(name, default)
        try:
            number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
        except (ValueError, OverflowError):
            number = math.nan
        if not low <= number <= high:  # also refuses what is not a number
            raise invalid(name, f"a number from {low:g} to {high:g}")
        return number

    def optional_number(self, name: str, *, low: float, high: float) -> float | None:
        return self.number(name, low, low=low, high=high) if name in self._left else None

    def flag(self, name: str, default: bool) -> bool:
        value = self._left.pop(name, default)
        if not isinstance(value, bool):
            raise invalid(name, "true or false")
        return value

    def end(self, known: Collection[str]) -> None:
        """Refuse fields that nobody asked for."""
        if not self._left:
            return
        import difflib  # only for a mistake: every start of a worker compiles what it imports

        unknown = sorted(map(str, self._left))[0][:64]
        near = difflib.get_close_matches(unknown.lower().replace("-", "_"), known, n=1)
        raise UsageError(
            Code.JOB_INVALID,
            f"params.{unknown} is not a parameter of this workload",
            hint=(f"did you mean {near[0]!r}? " if near else "") + "known: " + ", ".join(sorted(known)),
        )
