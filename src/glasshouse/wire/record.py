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
from dataclasses import MISSING, fields
from enum import StrEnum
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, ClassVar, Final, Self, TypeAlias, Union, get_args, get_origin, get_type_hints

from glasshouse.wire.canonical import (
    DERIVED,
    MAX_INTEGER,
    Codec,
    Json,
    Leaf,
    Members,
    b64decode,
    b64encode,
    decode,
    encode,
    wrong,
)

IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,18})?(e[+-][0-9]{2,3})?")


def text(max_chars: int = 256, pattern: re.Pattern[str] | None = None) -> Codec:
    """Text of at most `max_chars` characters, without NUL, wholly of the form `pattern`."""

    def read(value: Json, where: str) -> str:
        if not isinstance(value, str) or len(value) > max_chars or "\x00" in value:
            raise wrong(where, f"text of at most {max_chars} characters")
        if pattern is not None and not pattern.fullmatch(value):
            raise wrong(where, f"text of the form {pattern.pattern}")
        return value

    return Codec(read)


def choice(options: Collection[str]) -> Codec:
    """One of some texts, or the member of a `StrEnum`; a field whose type is one needs no codec."""
    known = {str(option): option for option in options}

    def read(value: Json, where: str) -> str:
        if not isinstance(value, str) or value not in known:
            raise wrong(where, "one of " + ", ".join(sorted(known)))
        return known[value]

    return Codec(read, str)


def integer(low: int = 0, high: int = MAX_INTEGER) -> Codec:
    """An integer from `low` to `high`, both inclusive; a field that may be any of 0 to 2^53 - 1 needs no codec."""

    def read(value: Json, where: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise wrong(where, f"an integer from {low} to {high}")
        return value

    return Codec(read)


def flag() -> Codec:
    """True or false; a field of the type `bool` needs no codec."""

    def read(value: Json, where: str) -> bool:
        if not isinstance(value, bool):
            raise wrong(where, "true or false")
        return value

    return Codec(read)


def octets(length: int | None = None, *, max_length: int = 65536) -> Codec:
    """Bytes in base64url without padding: exactly `length`, or at most `max_length`."""
    limit = max_length if length is None else length
    form = text((limit * 4 + 2) // 3)

    def read(value: Json, where: str) -> bytes:
        data = b64decode(form.read(value, where))
        if len(data) > limit or (length is not None and len(data) != length):
            raise wrong(where, f"{limit} bytes")
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

    def of(item: Codec) -> Codec:
        def read(value: Json, where: str) -> tuple[Any, ...]:
            if not isinstance(value, list) or not min_items <= len(value) <= max_items:
                raise wrong(where, f"a list of {min_items} to {max_items}")
            return tuple([item.read(each, where) for each in value])

        return Codec(read, lambda value: [item.write(each) for each in value])

    return of if item is None else of(item)  # type: ignore[return-value]  # bound when a field has it


def table(max_items: int, name: Codec, item: Codec | None = None, *, min_items: int = 0) -> Codec:
    """An object of `min_items` to `max_items` members of one kind, kept as a mapping.

    Args:
        item: of each value; a field of the type ``Mapping[str, X]``, where X needs no codec, needs none.
    """

    def of(item: Codec) -> Codec:
        def read(value: Json, where: str) -> dict[str, Any]:
            if not isinstance(value, dict) or not min_items <= len(value) <= max_items:
                raise wrong(where, f"an object of {min_items} to {max_items} members")
            return {name.read(key, where): item.read(each, f"{where}.{key[:64]}") for key, each in value.items()}

        return Codec(read, lambda value: {key: item.write(each) for key, each in value.items()})

    return of if item is None else of(item)  # type: ignore[return-value]  # bound when a field has it


def one_of(member: str, *kinds: type[Record]) -> Codec:
    """One of several records, which differ in the constant that they have as `member`."""
    known = {str(kind._constants[member]): kind for kind in kinds}
    tag = choice(known)

    def read(value: Json, where: str) -> Record:
        if not isinstance(value, dict):
            raise wrong(where, "an object")
        return known[tag.read(value.get(member), f"{where}.{member}")].from_json(value, where)

    return Codec(read, lambda record: record.to_json())


def fixed(defaults: Mapping[str, Any] = MappingProxyType({}), /, **members: Codec) -> Codec:
    """An object of exactly these members, kept as a tuple in this order: for what needs no class.

    Args:
        defaults: of the members that are left out where they have this value.
        members: the codec of each.
    """
    whole = Members({name: Leaf(name, codec, defaults.get(name, MISSING)) for name, codec in members.items()}, {})

    def read(value: Json, where: str) -> tuple[Any, ...]:
        found = whole.read(value, where, dict(defaults))
        return tuple([found[name] for name in members])

    def write(value: tuple[Any, ...]) -> dict[str, Json]:
        pairs = zip(members, value, strict=True)
        return {n: members[n].write(each) for n, each in pairs if n not in defaults or each != defaults[n]}

    return Codec(read, write)


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

    def __init_subclass__(cls, **arguments: Any) -> None:
        # `dataclass(slots=True)` makes the class a second time, with these attributes and without the arguments.
        for name, value in arguments.items():
            if not hasattr(cls, f"_{name}"):
                raise TypeError(f"a record has no class argument {name}")
            setattr(cls, f"_{name}", value)

    @classmethod
    def member_names(cls) -> set[str]:
        """Return the names of all members, those of the objects that group them too."""
        return _members(cls).names()

    def to_json(self) -> dict[str, Json]:
        """Return the object."""
        return _members(type(self)).write(self)

    @classmethod
    def from_json(cls, value: Json, where: str | None = None, **apart: Any) -> Self:
        """Inverse of `to_json`.

        Args:
            where: what errors call the object; None takes the record's name.
            apart: the fields that are `APART`.

        Raises:
            FormatError: `schema-invalid`, and what ``__post_init__`` raises.
        """
        found = _members(cls).read(value, where or cls._name, {})
        derived = found.pop(DERIVED, ())
        record = cls(**found, **apart)
        for place, attribute, given in derived:
            if encode(given) != encode(getattr(record, attribute)):
                raise wrong(place, "what follows from the rest")
        return record

    @classmethod
    def known(cls, value: Mapping[str, Json]) -> dict[str, Json]:
        """Return the members that this version has, for state files in which a later one may have written more."""
        schema = _members(cls)
        return {name: one for name, one in value.items() if name in schema.members or name in schema.constants}

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


def _declared_members(kind: type[Any]) -> Members:
    whole = Members({}, dict(kind._constants))
    hints = get_type_hints(kind, include_extras=True)
    for one in fields(kind):
        if APART in getattr(hints[one.name], "__metadata__", ()):
            continue
        codec, marks = _declared(hints[one.name], f"{kind.__name__}.{one.name}")
        path = next((mark.path for mark in marks if isinstance(mark, Member)), (one.name,))
        whole.place(path, Leaf(one.name, codec, one.default if LEFT_OUT in marks else MISSING))
    for place, attribute in kind._derived.items():
        whole.place((place,) if isinstance(place, str) else place, Leaf(attribute, None, MISSING))
    return whole


_members: Callable[[type[Record]], Members] = cache(_declared_members)  # type: ignore[assignment]  # classes are hashable


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
    codec = next((mark for mark in marks if isinstance(mark, Codec) or callable(mark)), None) or _by_type(hint, name)
    if not isinstance(codec, Codec):  # a list or table of what its type has: tuple[X, ...] or Mapping[str, X]
        codec = codec(_declared([each for each in get_args(hint) if each is not Ellipsis][-1], name)[0])
    return (nullable(codec) if may_be_null and LEFT_OUT not in marks else codec), marks


def _by_type(hint: Any, name: str) -> Codec:
    if hint is bool:
        return flag()
    if hint is int:
        return integer()
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return choice(list(hint))
    if isinstance(hint, type) and issubclass(hint, Record):
        return Codec(hint.from_json, hint.to_json)
    raise TypeError(f"{name} needs a codec")
