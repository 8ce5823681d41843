"""Canonical JSON (RFC 8785, narrowed to what needs no number formatting), objects of a closed schema, and base64url.

Values are null, booleans, integers with ``|n| < 2**53``, strings without lone surrogates, arrays and
objects. Floats do not exist: losses travel as decimal strings, times as integer microseconds.
Laws: ``decode(encode(v)) == v``; ``encode(decode(b)) == b`` for every ``b`` that decode accepts.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any, NoReturn, TypeAlias

from glasshouse.errors import Code, FormatError

Json: TypeAlias = bool | int | str | Sequence["Json"] | Mapping[str, "Json"] | None

MAX_INTEGER = 2**53 - 1
MAX_DEPTH = 16
DERIVED = ""  # no field's name: where, property and value of each derived member that was read


def encode(value: Json) -> bytes:
    """Return the one valid encoding of `value`.

    Raises:
        FormatError: `schema-invalid` for a float, a large integer, a lone surrogate, a non-string key
            or a value nested deeper than `MAX_DEPTH`.
    """
    if _plain(value, 0) and (text := _SORTING.encode(value)).isascii():
        # For ASCII keys the order of RFC 8785 is that of the code points, which the C encoder sorts by.
        return text.encode("ascii")
    try:
        return _KEEPING.encode(_ordered(value, 0)).encode()
    except UnicodeEncodeError:
        raise FormatError(Code.SCHEMA, "a string with a lone surrogate") from None


def decode(data: bytes | bytearray | memoryview, *, max_bytes: int, max_elements: int | None = None) -> Json:
    """Parse canonical JSON and refuse every other encoding of the same value.

    Args:
        max_bytes: refused before parsing when longer.
        max_elements: for unauthenticated input: refused before parsing when it has more of the bytes ``,`` ``[`` and
            ``{``, which the cost of parsing grows with, or is not ASCII: other keys are sorted in Python.

    Raises:
        FormatError: `too-large`, `schema-invalid` or `not-canonical`.
    """
    if len(data) > max_bytes:
        raise FormatError(Code.TOO_LARGE, f"{len(data)} bytes of JSON where at most {max_bytes} are allowed")
    raw = bytes(data)
    containers = raw.count(b"[") + raw.count(b"{")
    if max_elements is not None and not raw.isascii():
        raise FormatError(Code.SCHEMA, "text that is not ASCII where none has a place")
    if max_elements is not None and containers + raw.count(b",") > max_elements:
        raise FormatError(Code.SCHEMA, f"JSON of more than {max_elements} elements")
    try:
        value: Json = _DECODER.decode(raw.decode("utf-8"))
        if not raw.isascii():
            again = _KEEPING.encode(_ordered(value, 0)).encode()
        # The decoder's values are of exact types and within the bounds of numbers: only their depth is still open.
        elif containers > MAX_DEPTH and _too_deep(value):
            raise FormatError(Code.SCHEMA, f"JSON nested deeper than {MAX_DEPTH}")
        else:
            again = _SORTING.encode(value).encode()
    except (ValueError, RecursionError) as error:
        raise FormatError(Code.SCHEMA, "not a JSON document") from error
    if again != raw:
        raise FormatError(Code.NOT_CANONICAL, "JSON that is not in its canonical form (RFC 8785)")
    return value


def _plain(value: object, depth: int) -> bool:
    """Return whether `value` is made of exact JSON types within every limit; `_ordered` names what is wrong with it."""
    items: Collection[object]
    if type(value) is dict:
        if not all(type(key) is str for key in value):
            return False
        items = value.values()
    elif type(value) is list or type(value) is tuple:
        items = value
    else:
        items, depth = (value,), depth - 1
    if items and depth >= MAX_DEPTH:
        return False
    for item in items:
        kind = type(item)
        if kind is int:
            if not -MAX_INTEGER <= item <= MAX_INTEGER:
                return False
        elif kind is dict or kind is list or kind is tuple:
            if not _plain(item, depth + 1):
                return False
        elif kind is not str and kind is not bool and item is not None:
            return False
    return True


def _too_deep(value: Json) -> bool:
    """Return whether a decoded value is nested deeper than `MAX_DEPTH`: faster than `_plain`."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        inner = [each for each in level if type(each) is list or type(each) is dict]
        level = [item for each in inner for item in (each.values() if type(each) is dict else each)]
    return bool(level)


def _ordered(value: Json, depth: int) -> Json:
    if depth > MAX_DEPTH:
        raise FormatError(Code.SCHEMA, f"JSON nested deeper than {MAX_DEPTH}")
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        if not -MAX_INTEGER <= value <= MAX_INTEGER:
            raise FormatError(Code.SCHEMA, "an integer of 2^53 or more")
        return int(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise FormatError(Code.SCHEMA, "an object key that is not a string")
        # RFC 8785 section 3.2.3: sorted by UTF-16 code units, not by code points.
        return {key: _ordered(value[key], depth + 1) for key in sorted(value, key=lambda key: key.encode("utf-16-be"))}
    if isinstance(value, (list, tuple)):
        return [_ordered(item, depth + 1) for item in value]
    raise FormatError(Code.SCHEMA, f"a {type(value).__name__} has no canonical JSON form")


def _closed_object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise FormatError(Code.SCHEMA, "an object with a repeated key")
    return found


def _bounded_integer(digits: str) -> int:
    if len(digits) > 17 or not -MAX_INTEGER <= (value := int(digits)) <= MAX_INTEGER:
        raise FormatError(Code.SCHEMA, "an integer of 2^53 or more")
    return value


def _no_float(_digits: str) -> NoReturn:
    raise FormatError(Code.SCHEMA, "a number that is not an integer")


def _encoder(*, sort_keys: bool) -> json.JSONEncoder:
    return json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, sort_keys=sort_keys)


# Made once: `json.dumps` and `json.loads` make new ones for every call that is not by their defaults.
_SORTING, _KEEPING = _encoder(sort_keys=True), _encoder(sort_keys=False)
_DECODER = json.JSONDecoder(
    object_pairs_hook=_closed_object, parse_float=_no_float, parse_constant=_no_float, parse_int=_bounded_integer
)


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


def b64encode(data: bytes) -> str:
    """Return base64url without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def b64decode(text: str) -> bytes:
    """Inverse of `b64encode`; refuses any other spelling of the same bytes. Raises `FormatError`, `schema-invalid`."""
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except ValueError:
        raise FormatError(Code.SCHEMA, "not base64url") from None
    if b64encode(data) != text:
        raise FormatError(Code.SCHEMA, "not the one valid base64url form")
    return data
