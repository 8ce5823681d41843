"""Records: JSON objects of a closed schema, whose members are declared once, at the fields of a dataclass.

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Challenge(Record, name="challenge", max_bytes=1024):
        nonce: Annotated[bytes, octets(32)]  # used once
        deployment: Id
        expires_us: int

Reading refuses a member that is missing, unknown, of another type or beyond its limit. An error names the member and
never its value, which may be a secret or a megabyte. What holds between fields is for ``__post_init__``.
Laws: ``R.from_json(r.to_json()) == r``; ``R.parse(r.encode()) == r`` and the reverse, byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Final, Self, TypeAlias, Union, get_args, get_origin, get_type_hints

from glasshouse.errors import Code, FormatError
from glasshouse.wire.canonical import MAX_INTEGER, Json, decode, encode
from glasshouse.wire.fields import DECIMAL, IDENTIFIER, b64decode, b64encode

__all__ = [
    "APART",
    "LEFT_OUT",
    "Codec",
    "Decimal",
    "Id",
    "Identifier",
    "Member",
    "Record",
    "Sha256",
    "choice",
    "digest",
    "digest_text",
    "fixed",
    "integer",
    "items",
    "nullable",
    "octets",
    "one_of",
    "raw",
    "table",
    "text",
]


@dataclass(frozen=True, slots=True)
class Codec:
    """How a value is written, and what limits hold for it.

    Attributes:
        read: takes the JSON and what errors call it; returns the value or raises `FormatError` (`schema-invalid`).
        write: the inverse.
    """

    read: Callable[[Json, str], Any]
    write: Callable[[Any], Json] = lambda value: value


def text(max_chars: int = 256, pattern: re.Pattern[str] | None = None) -> Codec:
    """Text of at most `max_chars` characters, without NUL, wholly of the form `pattern`."""

    def read(value: Json, where: str) -> str:
        if not isinstance(value, str) or len(value) > max_chars or "\x00" in value:
            raise _wrong(where, f"text of at most {max_chars} characters")
        if pattern is not None and not pattern.fullmatch(value):
            raise _wrong(where, f"text of the form {pattern.pattern}")
        return value

    return Codec(read)


def choice(options: Collection[str]) -> Codec:
    """One of some texts, or the member of a `StrEnum`; a field whose type is one needs no codec."""
    known = {str(option): option for option in options}

    def read(value: Json, where: str) -> str:
        if not isinstance(value, str) or value not in known:
            raise _wrong(where, "one of " + ", ".join(sorted(known)))
        return known[value]

    return Codec(read, str)


def integer(low: int = 0, high: int = MAX_INTEGER) -> Codec:
    """An integer from `low` to `high`, both inclusive; a field that may be any of 0 to 2^53 - 1 needs no codec."""

    def read(value: Json, where: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise _wrong(where, f"an integer from {low} to {high}")
        return value

    return Codec(read)


def octets(length: int | None = None, *, max_length: int = 65536) -> Codec:
    """Bytes in base64url without padding: exactly `length`, or at most `max_length`."""
    limit = max_length if length is None else length
    form = text((limit * 4 + 2) // 3)

    def read(value: Json, where: str) -> bytes:
        data = b64decode(form.read(value, where))
        if len(data) > limit or (length is not None and len(data) != length):
            raise _wrong(where, f"{limit} bytes")
        return data

    return Codec(read, b64encode)


def digest_text(length: int = 32) -> Codec:
    """`length` bytes in lower-case hexadecimal, kept as text."""
    return text(2 * length, re.compile(f"[0-9a-f]{{{2 * length}}}"))


def digest(length: int = 32) -> Codec:
    """`length` bytes in lower-case hexadecimal, kept as bytes."""
    form = digest_text(length)
    return Codec(lambda value, where: bytes.fromhex(form.read(value, where)), bytes.hex)


def items(max_items: int, item: Codec | None = None, *, min_items: int = 0) -> Codec:
    """A list of `min_items` to `max_items`, kept as a tuple.

    Args:
        item: of each; a field of the type ``tuple[X, ...]``, where X needs no codec, needs none.
    """

    def bound(item: Codec) -> Codec:
        def read(value: Json, where: str) -> tuple[Any, ...]:
            if not isinstance(value, list) or not min_items <= len(value) <= max_items:
                raise _wrong(where, f"a list of {min_items} to {max_items}")
            return tuple([item.read(each, where) for each in value])

        return Codec(read, lambda value: [item.write(each) for each in value])

    return _Items(bound) if item is None else bound(item)  # type: ignore[return-value]  # bound when a field has it


def table(max_items: int, name: Codec, item: Codec | None = None, *, min_items: int = 0) -> Codec:
    """An object of `min_items` to `max_items` members of one kind, kept as a mapping.

    Args:
        item: of each value; a field of the type ``Mapping[str, X]``, where X needs no codec, needs none.
    """

    def bound(item: Codec) -> Codec:
        def read(value: Json, where: str) -> dict[str, Any]:
            if not isinstance(value, dict) or not min_items <= len(value) <= max_items:
                raise _wrong(where, f"an object of {min_items} to {max_items} members")
            return {name.read(key, where): item.read(each, f"{where}.{key[:64]}") for key, each in value.items()}

        return Codec(read, lambda value: {key: item.write(each) for key, each in value.items()})

    return _Items(bound) if item is None else bound(item)  # type: ignore[return-value]  # bound when a field has it


def one_of(member: str, *kinds: type[Record]) -> Codec:
    """One of several records, which differ in the constant that they have as `member`."""
    known = {kind._constants[member]: kind for kind in kinds}

    def read(value: Json, where: str) -> Record:
        if not isinstance(value, dict):
            raise FormatError(Code.SCHEMA, f"{where} is not an object")
        found = value.get(member)
        if not isinstance(found, str) or found not in known:
            raise _wrong(f"{where}.{member}", "one of " + ", ".join(sorted(map(str, known))))
        return known[found].from_json(value, where)

    return Codec(read, lambda record: record.to_json())


def fixed(**members: Codec) -> Codec:
    """An object of exactly these members, kept as a tuple in this order: for pairs that need no class."""
    whole = _Object({name: _Leaf(name, codec, MISSING) for name, codec in members.items()}, {})

    def read(value: Json, where: str) -> tuple[Any, ...]:
        found: dict[str, Any] = {}
        whole.read(value, where, found)
        return tuple(found.values())

    return Codec(
        read, lambda value: {name: members[name].write(each) for name, each in zip(members, value, strict=True)}
    )


def nullable(codec: Codec) -> Codec:
    """Null, or what `codec` takes; a field whose type has None needs none."""
    return Codec(
        lambda value, where: None if value is None else codec.read(value, where),
        lambda value: None if value is None else codec.write(value),
    )


def raw(check: Callable[[Json], Any] = lambda value: value) -> Codec:
    """JSON of any shape, which `check` returns or refuses."""
    return Codec(lambda value, _where: check(value))


class Member:
    """Where a field stands in the JSON, if not under its own name: the names from the outside inwards."""

    __slots__ = ("path",)

    def __init__(self, *path: str) -> None:
        self.path = path


LEFT_OUT: Final = object()
"""Marks a field whose member is left out where it has its default; it is never null."""
APART: Final = object()
"""Marks a field that is no member of the object: `from_json` and `parse` take it by name, `to_json` leaves it out."""

Decimal: TypeAlias = Annotated[str, text(48, DECIMAL)]
Id: TypeAlias = Annotated[str, digest_text(16)]
Identifier: TypeAlias = Annotated[str, text(128, IDENTIFIER)]
Sha256: TypeAlias = Annotated[bytes, digest()]


class Record:
    """Base of the dataclasses that are written as JSON; see the module.

    Class arguments:
        name: what errors call the object.
        max_bytes, max_elements: limits of `parse`, as of `canonical.decode`.
        constants: members that always have these values, and no field; those of a `Member`'s object stand within its.
        derived: members that follow from the fields: by name, or by the names from the outside inwards, the property
            that has the value. What is read must be the same.
    """

    __slots__ = ()
    _name: ClassVar[str] = "record"
    _max_bytes: ClassVar[int] = 0
    _max_elements: ClassVar[int | None] = None
    _constants: ClassVar[Mapping[str, Json]] = {}
    _derived: ClassVar[Mapping[str | tuple[str, ...], str]] = {}

    def __init_subclass__(
        cls,
        *,
        name: str | None = None,
        max_bytes: int | None = None,
        max_elements: int | None = None,
        constants: Mapping[str, Json] | None = None,
        derived: Mapping[str | tuple[str, ...], str] | None = None,
    ) -> None:
        given = {
            "_name": name,
            "_max_bytes": max_bytes,
            "_max_elements": max_elements,
            "_constants": constants,
            "_derived": derived,
        }
        # `dataclass(slots=True)` makes the class a second time, with these attributes and without the arguments.
        for attribute, value in given.items():
            if value is not None:
                setattr(cls, attribute, value)

    def to_json(self) -> dict[str, Json]:
        """Return the object."""
        return _object(type(self)).write(self)

    @classmethod
    def from_json(cls, value: Json, where: str | None = None, **apart: Any) -> Self:
        """Inverse of `to_json`.

        Args:
            where: what errors call the object; None takes the record's name.
            apart: the fields that are `APART`.

        Raises:
            FormatError: `schema-invalid`, and what ``__post_init__`` raises.
        """
        found: dict[str, Any] = {}
        _object(cls).read(value, where or cls._name, found)
        derived = found.pop(_DERIVED, ())
        record = cls(**found, **apart)
        for place, attribute, given in derived:
            if encode(given) != encode(getattr(record, attribute)):
                raise _wrong(place, "what follows from the rest")
        return record

    def encode(self) -> bytes:
        """Return the canonical JSON."""
        return encode(self.to_json())

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview, **apart: Any) -> Self:
        """Inverse of `encode`.

        Raises:
            FormatError: `too-large`, `not-canonical` or `schema-invalid`, and what ``__post_init__`` raises.
        """
        return cls.from_json(decode(data, max_bytes=cls._max_bytes, max_elements=cls._max_elements), **apart)


@dataclass(frozen=True, slots=True)
class _Items:
    """A list or a table whose codec depends on the field's type."""

    of: Callable[[Codec], Codec]


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One field as a member of an object."""

    field: str
    codec: Codec
    default: Any  # MISSING where the member may not be left out

    def read(self, value: Json, where: str, found: dict[str, Any]) -> None:
        found[self.field] = self.codec.read(value, where)


_DERIVED = ""  # no field's name: where, property and value of each derived member that was read


@dataclass(frozen=True, slots=True)
class _Derived:
    """A member that has the value of a property."""

    attribute: str

    def read(self, value: Json, where: str, found: dict[str, Any]) -> None:
        found.setdefault(_DERIVED, []).append((where, self.attribute, value))


@dataclass(frozen=True, slots=True)
class _Object:
    """An object's members: fields, derived ones, and objects that group them."""

    members: dict[str, _Leaf | _Derived | _Object]
    constants: dict[str, Json]

    def read(self, value: Json, where: str, found: dict[str, Any]) -> None:
        if not isinstance(value, dict):
            raise FormatError(Code.SCHEMA, f"{where} is not an object")
        left = dict(value)
        for name, constant in self.constants.items():
            # A text equals nothing but itself; 1 and true are equal to Python, and differ as they are written.
            if name not in left or ((one := left.pop(name)) != constant) or not _alike(one, constant):
                raise _wrong(f"{where}.{name}", f"{constant!r}")
        for name, member in self.members.items():
            if name in left:
                member.read(left.pop(name), f"{where}.{name}", found)
            elif not isinstance(member, _Leaf) or member.default is MISSING:
                raise FormatError(Code.SCHEMA, f"{where}.{name} is missing")
        if left:
            raise FormatError(Code.SCHEMA, f"{where} has an unknown field {min(left)[:64]!r}")

    def write(self, record: Record) -> dict[str, Json]:
        written: dict[str, Json] = dict(self.constants)
        for name, member in self.members.items():
            if isinstance(member, _Object):
                written[name] = member.write(record)
            elif isinstance(member, _Derived):
                written[name] = getattr(record, member.attribute)
            elif (value := getattr(record, member.field)) != member.default or member.default is MISSING:
                written[name] = member.codec.write(value)
        return written


_OBJECTS: dict[type[Record], _Object] = {}


def _object(kind: type[Record]) -> _Object:
    """Return how the fields of a record are written; worked out at its first use."""
    if kind not in _OBJECTS:
        _OBJECTS[kind] = _worked_out(kind)
    return _OBJECTS[kind]


def _worked_out(kind: type[Record]) -> _Object:
    whole = _Object({}, dict(kind._constants))
    hints = get_type_hints(kind, include_extras=True)
    for one in fields(kind):  # type: ignore[arg-type]  # a record is a dataclass
        hint = hints[one.name]
        if APART in getattr(hint, "__metadata__", ()):
            continue
        codec, marks = _declared(hint, f"{kind.__name__}.{one.name}")
        path = next((mark.path for mark in marks if isinstance(mark, Member)), (one.name,))
        _place(whole, path, _Leaf(one.name, codec, one.default if LEFT_OUT in marks else MISSING))
    for place, attribute in kind._derived.items():
        _place(whole, (place,) if isinstance(place, str) else place, _Derived(attribute))
    return whole


def _place(whole: _Object, path: tuple[str, ...], member: _Leaf | _Derived) -> None:
    *outer, name = path
    for group in outer:
        if group not in whole.members:
            whole.members[group] = _Object({}, dict(whole.constants.pop(group, {})))  # type: ignore[arg-type]  # is one
        whole = whole.members[group]  # type: ignore[assignment]  # a group is no field
    whole.members[name] = member


def _declared(hint: Any, name: str) -> tuple[Codec, list[Any]]:
    """Return the codec of a field's type, and all that is annotated."""
    marks: list[Any] = []
    may_be_null = False
    while (origin := get_origin(hint)) in (Annotated, Union, UnionType):
        if origin is Annotated:
            marks = [*hint.__metadata__, *marks]
            hint = hint.__origin__
        elif NoneType in (kinds := get_args(hint)):
            may_be_null = True
            hint = Union[tuple(each for each in kinds if each is not NoneType)]  # noqa: UP007 — of a tuple
        else:
            break
    codec = next((mark for mark in marks if isinstance(mark, Codec | _Items)), None) or _by_type(hint, name)
    if isinstance(codec, _Items):
        item = [each for each in get_args(hint) if each is not Ellipsis][-1]  # of tuple[X, ...] or Mapping[str, X]
        codec = codec.of(_declared(item, name)[0])
    return (nullable(codec) if may_be_null and LEFT_OUT not in marks else codec), marks


def _by_type(hint: Any, name: str) -> Codec:
    if hint is bool:
        return Codec(_flag)
    if hint is int:
        return integer()
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return choice(list(hint))
    if isinstance(hint, type) and issubclass(hint, Record):
        return Codec(hint.from_json, hint.to_json)
    if hasattr(hint, "from_json"):
        return Codec(lambda value, _where: hint.from_json(value), hint.to_json)
    raise TypeError(f"{name} needs a codec")


def _alike(one: Json, constant: Json) -> bool:
    return isinstance(constant, str) or encode(one) == encode(constant)


def _flag(value: Json, where: str) -> bool:
    if not isinstance(value, bool):
        raise _wrong(where, "true or false")
    return value


def _wrong(where: str, expected: str) -> FormatError:
    return FormatError(Code.SCHEMA, f"{where} is not {expected}")
