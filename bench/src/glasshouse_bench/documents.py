"""Documents of closed schemas, each member written once: its name, its type, and its limits.

Law: ``D.parse(d.to_json()) == d`` for every value that can be made, and what could not be read cannot be made.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache
from types import NoneType
from typing import Annotated, Any, Self, get_args, get_origin, get_type_hints

from glasshouse.errors import Code, FormatError
from glasshouse.wire.canonical import MAX_INTEGER, Json, encode
from glasshouse.wire.crypto import sha256
from glasshouse_bench.strict_fields import Fields

__all__ = ["COUNT", "INSTANT", "NAME", "PLAIN", "Document", "Kind", "integer", "listed", "plain"]

_INSTANT = re.compile(r"0|[1-9][0-9]{0,18}")
# No slash, no colon, no backslash: nothing that could be a path or an address.
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ()@.,_+-]{0,95}")


@dataclass(frozen=True, slots=True)
class Kind:
    """How a member is taken from its object, and written."""

    read: Callable[[Fields, str], Any]
    write: Callable[[Any], Json] = lambda value: value


def integer(low: int = 0, high: int = MAX_INTEGER) -> Kind:
    return Kind(lambda found, name: found.integer(name, low=low, high=high))


COUNT = integer()
NAME = Kind(Fields.identifier)
PLAIN = Kind(lambda found, name: found.text(name, max_chars=96, pattern=_PLAIN))


def _instant(found: Fields, name: str) -> int:
    value = int(found.text(name, max_chars=19, pattern=_INSTANT))
    if value >= 2**62:
        raise FormatError(Code.SCHEMA, f"{name} is not an instant below 2^62")
    return value


INSTANT = Kind(_instant, str)


def listed(one: Any, *, most: int) -> Kind:
    """A list, as a tuple, of members that are annotated so."""
    kind = _kind(one)

    def read(found: Fields, name: str) -> tuple[Any, ...]:
        return tuple(kind.read(Fields({name: one}, "list"), name) for one in found.items(name, max_items=most))

    return Kind(read, lambda values: [kind.write(one) for one in values])


def plain(text: str) -> str | None:
    """Return a text of the machine's (a CPU's name, a version) as `PLAIN` has it; None if nothing is left."""
    kept = " ".join(re.sub(r"[^A-Za-z0-9 ()@.,_+-]", " ", text).split()).lstrip(" ()@.,_+-")[:96].rstrip()
    return kept or None


class Document:
    """A frozen dataclass whose members have a `Kind`, by their annotation or their type (`bytes` are digests).

    Raises:
        FormatError: `schema-invalid`, also on construction, for a value outside its limits.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, kind in _kinds(type(self)).items():
            kind.read(Fields({name: kind.write(getattr(self, name))}, _title(type(self))), name)
        self._check()

    def _check(self) -> None:
        """Refuse members that do not fit each other."""

    def to_json(self) -> dict[str, Json]:
        return {name: kind.write(getattr(self, name)) for name, kind in _kinds(type(self)).items()}

    def encode(self) -> bytes:
        return encode(self.to_json())

    @property
    def sha256(self) -> bytes:
        return sha256(self.encode())

    @classmethod
    def read(cls, found: Fields) -> Self:
        values = {name: kind.read(found, name) for name, kind in _kinds(cls).items()}
        found.end()
        return cls(**values)

    @classmethod
    def parse(cls, value: Json) -> Self:
        """Inverse of `to_json`."""
        return cls.read(Fields(value, _title(cls)))


def _members(document: Any) -> dict[str, Kind]:
    hints = get_type_hints(document, include_extras=True)
    return {one.name: _kind(hints[one.name]) for one in fields(document)}


_kinds: Callable[[Any], dict[str, Kind]] = cache(_members)


def _kind(hint: Any) -> Kind:
    """Return the `Kind` that stands in an annotation, or the one that follows from its type."""
    if isinstance(hint, Kind):
        return hint
    if get_origin(hint) is Annotated:
        return _kind(hint.__metadata__[0])
    if NoneType in get_args(hint):
        [other] = (_kind(one) for one in get_args(hint) if one is not NoneType)
        return Kind(
            lambda found, name: None if found.null(name) else other.read(found, name),
            lambda value: None if value is None else other.write(value),
        )
    if issubclass(hint, Document):
        return Kind(lambda found, name: hint.read(found.child(name)), lambda value: value.to_json())
    if issubclass(hint, StrEnum):
        return Kind(lambda found, name: hint(found.choice(name, [one.value for one in hint])), str)
    return {bool: Kind(Fields.flag), bytes: Kind(Fields.digest, bytes.hex)}[hint]


def _title(document: type[Document]) -> str:
    return document.__name__.lower()
