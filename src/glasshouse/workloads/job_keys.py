"""The keys of a job file's tables, each declared once: what it may be, what stands in for it, and what it means.

The check with its error, the reference page and the JSON Schema (`jobs.schema`) follow from one declaration. Laws: a
key that is not declared is refused; every error names the key, its allowed values and the value that was there.
Messages of protocols are records (`wire.record`) instead: those have no defaults, and their errors show no value.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass
from dataclasses import fields as dataclass_fields
from types import MappingProxyType
from typing import Annotated, Any, get_origin, get_type_hints

from glasshouse.errors import Code, UsageError

REQUIRED = ...
"""In the place of a default: the key must be there."""

_SHOWN_CHARS = 60
_MOST_NAMED = 12
_DECIMAL = r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?"
# Without control characters: what a job file names is shown on terminals.
_PRINTABLE = r"[^\x00-\x1f\x7f]*"


@dataclass(frozen=True, slots=True)
class Kind:
    """What a value may be."""

    allowed: str  # in words that follow "must be"
    schema: Mapping[str, Any]  # as JSON Schema, as far as that can express it; of a table, its `fields` have it
    # Takes a value and its path; returns it as the program takes it, or raises ValueError, or `UsageError` inside it.
    read: Callable[[Any, str], Any]
    write: Callable[[Any], Any] = lambda value: value  # the inverse, for defaults
    fields: tuple[Field, ...] = ()  # the keys of a table


@dataclass(frozen=True, slots=True)
class Field:
    """One key."""

    name: str
    kind: Kind
    meaning: str  # one sentence for the reference
    default: Any = REQUIRED  # None where nothing stands in for it


@dataclass(frozen=True, slots=True)
class Rule:
    """What keys of one table demand of each other."""

    words: str  # as a sentence for the reference
    schema: Mapping[str, Any]
    check: Callable[[Mapping[str, Any], str], None]  # refuses a table, which has this path, that breaks it


def whole(form: str) -> str:
    """Return the JSON Schema pattern of a text that is wholly of a form."""
    # In some dialects `$` also stands before a line break at the end.
    return rf"^(?:{form})$(?!\n)"


def text(form: str = _PRINTABLE, words: str = "", *, max_chars: int = 1024, min_chars: int = 1) -> Kind:
    """A text, wholly of a form: a regular expression in the subset that JSON Schema shares; `words` is what it is."""

    def read(value: Any, _path: str) -> str:
        _require(isinstance(value, str) and min_chars <= len(value) <= max_chars and re.fullmatch(form, value))
        return str(value)

    schema = {"type": "string", "minLength": min_chars, "maxLength": max_chars, "pattern": whole(form)}
    return Kind(words or f"text of {min_chars} to {max_chars} characters", schema, read)


def choice(*options: str | int) -> Kind:
    """One of a few texts or numbers."""

    def read(value: Any, _path: str) -> Any:
        # By type too: True is not 1 here.
        _require(any(type(value) is type(option) and value == option for option in options))
        return value

    return Kind("one of " + ", ".join(map(repr, options)), {"enum": list(options)}, read)


def integer(low: int, high: int) -> Kind:
    """A whole number."""

    def read(value: Any, _path: str) -> int:
        _require(isinstance(value, int) and not isinstance(value, bool) and low <= value <= high)
        return int(value)

    return Kind(f"a whole number from {low} to {high}", {"type": "integer", "minimum": low, "maximum": high}, read)


def number(low: float, high: float) -> Kind:
    """A number; as a decimal text too, the form in which one with a fraction travels in canonical JSON."""

    def read(value: Any, _path: str) -> float:
        _require(isinstance(value, int | float) or (isinstance(value, str) and re.fullmatch(_DECIMAL, value)))
        _require(not isinstance(value, bool))
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
        _require(low <= found <= high)  # also refuses what is not a number
        return found

    plain = {"type": "number", "minimum": low, "maximum": high}
    schema = {"anyOf": [plain, {"type": "string", "pattern": whole(_DECIMAL)}]}
    return Kind(f"a number from {low:g} to {high:g}", schema, read)


def _flag(value: Any, _path: str) -> bool:
    _require(isinstance(value, bool))
    return bool(value)


FLAG = Kind("true or false", {"type": "boolean"}, _flag)


def texts(
    item: Kind, words: str = "texts", *, min_items: int = 0, max_items: int = 256, distinct: bool = False
) -> Kind:
    """A list of texts, none of them twice where they are to be `distinct`; `words` is what they are."""

    def read(value: Any, path: str) -> tuple[str, ...]:
        _require(isinstance(value, (list, tuple)) and min_items <= len(value) <= max_items)
        found = tuple(_read(item, each, f"{path}[{at}]") for at, each in enumerate(value))
        _require(not distinct or len(set(found)) == len(found))
        return found

    count = f"{min_items} to {max_items}" if min_items else f"at most {max_items}"
    schema = {"type": "array", "items": item.schema, "minItems": min_items, "maxItems": max_items}
    return Kind(
        f"a list of {count} {'different ' if distinct else ''}{words}",
        schema | ({"uniqueItems": True} if distinct else {}),
        read,
        list,
    )


def either(*kinds: Kind) -> Kind:
    """What one of several kinds takes."""

    def take(value: Any, path: str) -> Any:
        for kind in kinds:
            with contextlib.suppress(ValueError, UsageError):
                return kind.read(value, path)
        raise ValueError

    schema = {"anyOf": [kind.schema for kind in kinds]}
    write = lambda value: list(value) if isinstance(value, tuple) else value  # noqa: E731
    return Kind(", or ".join(kind.allowed for kind in kinds), schema, take, write)


def mapped(key: Kind, value: Kind, *, min_items: int = 0, max_items: int = 64) -> Kind:
    """A table whose keys are the owner's own, from texts to texts."""

    def read(given: Any, path: str) -> dict[str, str]:
        _require(isinstance(given, Mapping) and min_items <= len(given) <= max_items)
        for name in given:
            _read(key, name, f"the name {_short(name)} in {path}", shown=False)
        return {name: _read(value, each, f"{path}.{name}") for name, each in given.items()}

    schema = {
        "type": "object",
        "propertyNames": key.schema,
        "additionalProperties": value.schema,
        "minProperties": min_items,
        "maxProperties": max_items,
    }
    return Kind(f"a table of {min_items} to {max_items} keys", schema, read)


def table(*fields: Field) -> Kind:
    """A table of declared keys."""

    def take(value: Any, path: str) -> dict[str, Any]:
        _require(isinstance(value, Mapping))
        return read(fields, value, path)

    needed = [field.name for field in fields if field.default is REQUIRED]
    return Kind(f"a table with {' and '.join(needed)}" if needed else "a table", {}, take, fields=fields)


def needs(name: str, *others: str) -> Rule:
    """The one key is there, and not false, only beside one of the others."""

    def check(given: Mapping[str, Any], path: str) -> None:
        if _asked(given, name) and not any(other in given for other in others):
            raise invalid(f"{path}.{name}", f"absent where there is no {' or '.join(others)}")

    beside = {"anyOf": [{"required": [other]} for other in others]}
    words = " or ".join(f"`{other}`" for other in others)
    return Rule(f"`{name}` needs {words}.", {"if": _asking(name), "then": beside}, check)


def at_most_one(one: str, *others: str) -> Rule:
    """A key is not beside any of the others, but for those that are false."""

    def check(given: Mapping[str, Any], path: str) -> None:
        beside = [other for other in others if _asked(given, other)]
        if beside and _asked(given, one):
            raise job_invalid(f"{path}.{one} may not be beside {', '.join(beside)}: take out one or the other")

    both = {"allOf": [_asking(one), {"anyOf": [_asking(other) for other in others]}]}
    words = " and ".join(f"`{other}`" for other in others)
    return Rule(f"`{one}` is not beside {words}.", {"not": both}, check)


def _asked(given: Mapping[str, Any], name: str) -> bool:
    return given.get(name, False) is not False


def _asking(name: str) -> dict[str, Any]:
    return {"properties": {name: {"not": {"const": False}}}, "required": [name]}


def exactly_one(one: str, other: str) -> Rule:
    """One of two keys is there."""

    def check(given: Mapping[str, Any], path: str) -> None:
        if (one in given) == (other in given):
            raise job_invalid(f"{path}.{one} or {path}.{other}: exactly one of them must be there")

    schema = {"oneOf": [{"required": [one]}, {"required": [other]}]}
    return Rule(f"Either `{one}` or `{other}` must be there.", schema, check)


def declared(table: type) -> tuple[Field, ...]:
    """Return the keys of a dataclass: its fields of the form ``Annotated[type, kind, meaning]``, its bases' last."""
    hints = get_type_hints(table, include_extras=True)
    defaults = {one.name: REQUIRED if one.default is MISSING else one.default for one in dataclass_fields(table)}
    names = dict.fromkeys(name for base in (table, *reversed(table.__mro__[1:-1])) for name in base.__annotations__)
    marked = [(name, hints[name].__metadata__) for name in names if get_origin(hints[name]) is Annotated]
    return tuple(Field(name, kind, meaning, defaults[name]) for name, (kind, meaning) in marked)


def job_invalid(message: str, *, hint: str = "") -> UsageError:
    """Return the error of a job file, or of what it names."""
    return UsageError(Code.JOB_INVALID, message, hint=hint)


def invalid(path: str, allowed: str, *given: Any) -> UsageError:
    """Return the error of a key, such as ``params.steps``, that must be `allowed` and was `given`."""
    instead = f", not {_short(given[0])}" if given else ""
    return job_invalid(f"{path} must be {allowed}{instead}")


def read(
    fields: Sequence[Field],
    values: Mapping[str, Any],
    path: str,
    *,
    rules: Sequence[Rule] = (),
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Check a table, from TOML or JSON; return a value for every declared key; raises `UsageError` (`job-invalid`).

    Args:
        elsewhere: what stands for names that are not declared, and that people try.
    """
    known = [field.name for field in fields]
    unknown = sorted(str(name) for name in values if name not in known)
    missing = [field for field in fields if field.default is REQUIRED and field.name not in values]
    found = {}
    for field in fields:
        if field.name in values:
            found[field.name] = _read(field.kind, values[field.name], _path(path, field.name))
        elif field.default is REQUIRED:
            raise _missing(missing, unknown, path)
        else:
            inner = field.kind.fields and field.default is not None
            found[field.name] = field.kind.read(field.default, _path(path, field.name)) if inner else field.default
    if unknown:
        raise _unknown(unknown, known, path, elsewhere)
    for rule in rules:
        rule.check(values, path)
    return found


def _missing(fields: Sequence[Field], unknown: Collection[str], path: str) -> UsageError:
    """Return the error of the first of some keys, which names the others too."""
    first, *others = fields
    name, near = _path(path, first.name), _near(first.name, unknown)
    hints = [f"{_path(path, near)!r} is not known: did you mean {name!r}?"] if near else []
    hints += [f"missing too: {_path(path, other.name)}, which must be {other.kind.allowed}" for other in others]
    return job_invalid(f"{name} is missing; it must be {first.kind.allowed}", hint="; ".join(hints))


def _unknown(names: Sequence[str], known: Collection[str], path: str, elsewhere: Mapping[str, str]) -> UsageError:
    """Return the error of keys that are not known, with what stands for each."""
    others = "known: " + ", ".join(sorted(known))

    def instead(name: str) -> str:
        near = None if name in elsewhere else _near(name, known)
        return elsewhere.get(name) or (f"did you mean {near!r}?" if near else "")

    if len(names) == 1:
        told = instead(names[0])
        hint = told if names[0] in elsewhere else f"{told} {others}".strip()
    else:
        told = "; ".join(f"{name}: {instead(name) or 'nothing like it'}" for name in names)
        hint = told if any(map(instead, names)) else f"{told}; {others}"
    shown = ", ".join(_path(path, name)[:_SHOWN_CHARS] for name in names[:_MOST_NAMED])
    shown += f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return job_invalid(f"{shown} {'is' if len(names) == 1 else 'are'} not known", hint=hint)


def _require(held: object) -> None:
    if not held:
        raise ValueError


def _read(kind: Kind, value: Any, path: str, *, shown: bool = True) -> Any:
    try:
        return kind.read(value, path)
    except ValueError:
        raise invalid(path, kind.allowed, *([value] if shown else [])) from None


def _near(name: str, others: Collection[str]) -> str | None:
    import difflib  # only for a mistake: every start of a worker compiles what it imports

    return next(iter(difflib.get_close_matches(name.lower().replace("-", "_"), others, n=1)), None)


def _path(table: str, key: str) -> str:
    return f"{table}.{key}" if table else key


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= _SHOWN_CHARS else shown[: _SHOWN_CHARS - 3] + "..."
