"""Objects of a closed schema: how each member is read from JSON, or refused, and written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass
from typing import Any

from glasshouse.errors import Code, FormatError
from glasshouse.wire.canonical import Json, encode

DERIVED = ""  # no field's name: where, property and value of each derived member that was read


@dataclass(frozen=True, slots=True)
class Codec:
    """How a value is read from JSON, given what errors call it, or refused by `FormatError`; and the inverse."""

    read: Callable[[Json, str], Any]
    write: Callable[[Any], Json] = lambda value: value


@dataclass(frozen=True, slots=True)
class Leaf:
    """A member of an object: a field, or, without a codec, the value of a property."""

    attribute: str
    codec: Codec | None
    default: object  # where the member may be left out; else MISSING


@dataclass(frozen=True, slots=True)
class Members:
    """An object's members, some of them in objects that group them."""

    members: dict[str, Leaf | Members]
    constants: dict[str, Json]

    def place(self, path: tuple[str, ...], leaf: Leaf) -> None:
        """Add a member, and the objects that group it."""
        name, *inner = path
        if inner:
            group = self.members.setdefault(name, Members({}, dict(self.constants.pop(name, {}))))  # type: ignore[arg-type]  # is one
            group.place(tuple(inner), leaf)  # type: ignore[union-attr]  # a group is no field
        else:
            self.members[name] = leaf

    def names(self) -> set[str]:
        """Return the names of all members, those of the objects that group them too."""
        inner = [member.names() for member in self.members.values() if isinstance(member, Members)]
        return {*self.members, *self.constants}.union(*inner)

    def read(self, value: Json, where: str, found: dict[str, Any]) -> dict[str, Any]:
        """Add the fields to `found` by name, and return it; raises `FormatError` (`schema-invalid`)."""
        if not isinstance(value, dict):
            raise wrong(where, "an object")
        left = dict(value)
        for name, constant in self.constants.items():
            given = left.pop(name, MISSING)
            # A text equals nothing but itself; 1 and true are equal to Python, and differ as they are written.
            if given != constant or not (isinstance(constant, str) or encode(given) == encode(constant)):
                raise wrong(f"{where}.{name}", repr(constant))
        for name, member in self.members.items():
            if name not in left:
                if isinstance(member, Members) or member.default is MISSING:
                    raise FormatError(Code.SCHEMA, f"{where}.{name} is missing")
            elif isinstance(member, Members):
                member.read(left.pop(name), f"{where}.{name}", found)
            elif member.codec is not None:
                found[member.attribute] = member.codec.read(left.pop(name), f"{where}.{name}")
            else:
                found.setdefault(DERIVED, []).append((f"{where}.{name}", member.attribute, left.pop(name)))
        if left:
            raise FormatError(Code.SCHEMA, f"{where} has an unknown field {min(left)[:64]!r}")
        return found

    def write(self, record: object) -> dict[str, Json]:
        """Return the object that has a record's fields and properties."""
        written = dict(self.constants)
        for name, member in self.members.items():
            if isinstance(member, Members):
                written[name] = member.write(record)
            elif (value := getattr(record, member.attribute)) != member.default or member.default is MISSING:
                written[name] = value if member.codec is None else member.codec.write(value)
        return written


def wrong(where: str, expected: str) -> FormatError:
    """Return the error of a member that is not what is expected; it never shows the value."""
    return FormatError(Code.SCHEMA, f"{where} is not {expected}")
