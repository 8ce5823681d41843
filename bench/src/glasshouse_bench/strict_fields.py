"""Reads one JSON object of a closed schema, field by field, with limits.

Every accessor takes a field exactly once; `end` refuses what is left. An error names the field and
never its value, which may be a secret or a megabyte.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from glasshouse.errors import Code, FormatError
from glasshouse.wire.canonical import MAX_INTEGER, Json, b64decode
from glasshouse.wire.record import DECIMAL, IDENTIFIER

__all__ = ["Fields"]


class Fields:
    """One JSON object, read strictly.

    Args:
        value: what was parsed.
        where: what the object is called in errors, e.g. ``manifest``.

    Raises:
        FormatError: `schema-invalid` from every method, naming ``where.field``.
    """

    def __init__(self, value: Json, where: str) -> None:
        if not isinstance(value, dict):
            raise FormatError(Code.SCHEMA, f"{where} is not an object")
        self._left: dict[str, Json] = dict(value)
        self._where = where

    def has(self, name: str) -> bool:
        """Return whether an optional field is still there to be read."""
        return name in self._left

    def null(self, name: str) -> bool:
        """Return whether a nullable field is null; it is taken then, and else left to be read."""
        if name in self._left and self._left[name] is None:
            del self._left[name]
            return True
        return False

    def any(self, name: str) -> Json:
        """Take a field of any shape; the caller validates it."""
        if name not in self._left:
            raise FormatError(Code.SCHEMA, f"{self._where}.{name} is missing")
        return self._left.pop(name)

    def text(self, name: str, *, max_chars: int = 256, pattern: re.Pattern[str] | None = None) -> str:
        value = self.any(name)
        if not isinstance(value, str) or len(value) > max_chars or "\x00" in value:
            raise self._wrong(name, f"text of at most {max_chars} characters")
        if pattern is not None and not pattern.fullmatch(value):
            raise self._wrong(name, f"text of the form {pattern.pattern}")
        return value

    def identifier(self, name: str) -> str:
        return self.text(name, max_chars=128, pattern=IDENTIFIER)

    def decimal(self, name: str) -> str:
        return self.text(name, max_chars=48, pattern=DECIMAL)

    def choice(self, name: str, options: Collection[str]) -> str:
        value = self.any(name)
        if not isinstance(value, str) or value not in set(options):
            raise self._wrong(name, "one of " + ", ".join(sorted(options)))
        return value

    def integer(self, name: str, *, low: int = 0, high: int = MAX_INTEGER) -> int:
        value = self.any(name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self._wrong(name, f"an integer from {low} to {high}")
        return value

    def flag(self, name: str) -> bool:
        value = self.any(name)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def octets(self, name: str, *, length: int | None = None, max_length: int = 65536) -> bytes:
        """Take base64url bytes, of exactly `length` or at most `max_length` bytes."""
        limit = max_length if length is None else length
        data = b64decode(self.text(name, max_chars=(limit * 4 + 2) // 3))
        if len(data) > limit or (length is not None and len(data) != length):
            raise self._wrong(name, f"{limit} bytes")
        return data

    def digest(self, name: str, *, length: int = 32) -> bytes:
        """Take a digest in lower-case hexadecimal; `length` is in bytes."""
        return bytes.fromhex(self.text(name, max_chars=2 * length, pattern=re.compile(f"[0-9a-f]{{{2 * length}}}")))

    def digest_or_null(self, name: str) -> bytes | None:
        return None if self.null(name) else self.digest(name)

    def integer_or_null(self, name: str) -> int | None:
        return None if self.null(name) else self.integer(name)

    def items(self, name: str, *, max_items: int) -> list[Json]:
        value = self.any(name)
        if not isinstance(value, list) or len(value) > max_items:
            raise self._wrong(name, f"a list of at most {max_items}")
        return value

    def texts(self, name: str, *, max_items: int, max_chars: int = 256) -> list[str]:
        found: list[str] = []
        for item in self.items(name, max_items=max_items):
            if not isinstance(item, str) or len(item) > max_chars or "\x00" in item:
                raise self._wrong(name, "a list of short texts")
            found.append(item)
        return found

    def child(self, name: str) -> Fields:
        return Fields(self.any(name), f"{self._where}.{name}")

    def end(self) -> None:
        """Refuse fields that were not asked for."""
        if self._left:
            unknown = sorted(self._left)[0][:64]
            raise FormatError(Code.SCHEMA, f"{self._where} has an unknown field {unknown!r}")

    def _wrong(self, name: str, expected: str) -> FormatError:
        return FormatError(Code.SCHEMA, f"{self._where}.{name} is not {expected}")
