"""Reads one table of a job file, key by key; every error names the key and what it may be."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from typing import Any

from glasshouse.errors import Code, UsageError

__all__ = ["Table"]

_MAX_CHARS = 1024


class Table:
    """One TOML table, read strictly.

    Args:
        values: as parsed.
        name: of the table; empty for the top level.

    Raises:
        UsageError: `job-invalid` from every method.
    """

    def __init__(self, values: Any, name: str) -> None:
        if not isinstance(values, dict):
            raise UsageError(Code.JOB_INVALID, f"{name} must be a table: write [{name}]")
        self._left: dict[str, Any] = dict(values)
        self._asked: list[str] = []
        self._name = name

    def choice(self, key: str, options: Collection[str], *, default: str | None = None) -> str:
        allowed = "one of " + ", ".join(repr(option) for option in options)
        value = self._take(key, default, allowed)
        if not isinstance(value, str) or value not in options:
            raise self.wrong(key, allowed, value)
        return value

    def text(self, key: str, *, default: str | None = None, max_chars: int = _MAX_CHARS) -> str:
        allowed = f"text of 1 to {max_chars} characters"
        value = self._take(key, default, allowed)
        if not isinstance(value, str) or not 0 < len(value) <= max_chars or not value.isprintable():
            raise self.wrong(key, allowed, value)
        return value

    def integer(self, key: str, *, low: int, high: int, default: int | None = None) -> int:
        allowed = f"a whole number from {low} to {high}"
        value = self._take(key, default, allowed)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.wrong(key, allowed, value)
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._take(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return value

    def text_list(self, key: str, *, max_items: int) -> list[str]:
        """Take a list of texts; a missing one is empty."""
        allowed = f"a list of at most {max_items} texts"
        value = self._take(key, [], allowed)
        if not isinstance(value, list) or len(value) > max_items or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, allowed, value)
        return value

    def table(self, key: str, *, required: bool = False) -> Table:
        """Take a table; a missing one is empty unless it is required."""
        return Table(self._take(key, None if required else {}, "a table"), self._path(key))

    def texts(self) -> dict[str, str]:
        """Take everything that is left as a mapping of texts to texts."""
        values = self.rest()
        for key, value in values.items():
            if not isinstance(value, str) or not value:
                raise self.wrong(key, "a path: text", value)
        return values

    def rest(self) -> dict[str, Any]:
        """Take everything that is left, unread."""
        values, self._left = self._left, {}
        return values

    def end(self) -> None:
        """Refuse keys that nobody asked for."""
        if self._left:
            key = sorted(self._left)[0]
            near = get_close_matches(key, self._asked, n=1)
            raise UsageError(
                Code.JOB_INVALID,
                f"the job file has an unknown key {self._path(key)!r}; known here: {', '.join(sorted(self._asked))}",
                hint=f"did you mean {self._path(near[0])!r}?" if near else "",
            )

    def wrong(self, key: str, allowed: str, value: Any = None) -> UsageError:
        given = "" if value is None else f", not {_short(value)}"
        return UsageError(Code.JOB_INVALID, f"{self._path(key)} in the job file must be {allowed}{given}")

    def _take(self, key: str, default: Any, allowed: str) -> Any:
        self._asked.append(key)
        if key in self._left:
            return self._left.pop(key)
        if default is None:
            near = get_close_matches(key, [name for name in self._left if name not in self._asked], n=1)
            raise UsageError(
                Code.JOB_INVALID,
                f"the job file lacks {self._path(key)!r}: {allowed}",
                hint=f"{self._path(near[0])!r} is unknown: did you mean {self._path(key)!r}?" if near else "",
            )
        return default

    def _path(self, key: str) -> str:
        return f"{self._name}.{key}" if self._name else key


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
