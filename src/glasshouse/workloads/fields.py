"""The keys of a job file's tables, each declared once: what it may be, what stands in for it, and what it means.

From one declaration follow the check and its error, the reference page and the JSON Schema (`jobs.schema`). Laws: a key
that is not declared is refused; every error names the key, says what it may be, and shows what was there instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from glasshouse.errors import Code, UsageError

__all__ = [
    "DECIMAL",
    "REQUIRED",
    "Choice",
    "ExactlyOne",
    "Field",
    "Flag",
    "Integer",
    "Kind",
    "Mapped",
    "Needs",
    "Number",
    "Rule",
    "Table",
    "Text",
    "Texts",
    "invalid",
    "read",
]

REQUIRED = ...
"""In the place of a default: the key must be there."""

_SHOWN_CHARS = 60
DECIMAL = r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?"
"""The form of a number that travels as a text."""
# Without control characters: what a job file names is shown on terminals.
_PRINTABLE = r"[^\x00-\x1f\x7f]*"


class Kind(Protocol):
    """What a value may be.

    Attributes:
        allowed: the same in words that follow "must be".
    """

    @property
    def allowed(self) -> str: ...

    def read(self, value: Any, path: str) -> Any:
        """Return the value as the program takes it.

        Raises:
            ValueError: it is something else.
            UsageError: something inside it is.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A text.

    Attributes:
        form: a regular expression for the whole of it, in the subset that JSON Schema shares.
        words: what that form is.
        max_chars, min_chars: how long it is.
    """

    form: str = _PRINTABLE
    words: str = ""
    max_chars: int = 1024
    min_chars: int = 1

    @property
    def allowed(self) -> str:
        return self.words or f"text of {self.min_chars} to {self.max_chars} characters"

    def read(self, value: Any, path: str) -> str:
        if not isinstance(value, str) or not self.min_chars <= len(value) <= self.max_chars:
            raise ValueError
        if re.fullmatch(self.form, value) is None:
            raise ValueError
        return value


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few texts or numbers."""

    options: tuple[str | int, ...]

    @property
    def allowed(self) -> str:
        return "one of " + ", ".join(repr(option) for option in self.options)

    def read(self, value: Any, path: str) -> Any:
        # By type too: True is not 1 here.
        if not any(type(value) is type(option) and value == option for option in self.options):
            raise ValueError
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Integer:
    """A whole number."""

    low: int
    high: int

    @property
    def allowed(self) -> str:
        return f"a whole number from {self.low} to {self.high}"

    def read(self, value: Any, path: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not self.low <= value <= self.high:
            raise ValueError
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """A number; as a decimal text too, the form in which one with a fraction travels in canonical JSON."""

    low: float
    high: float

    @property
    def allowed(self) -> str:
        return f"a number from {self.low:g} to {self.high:g}"

    def read(self, value: Any, path: str) -> float:
        if not isinstance(value, (int, float, str)) or isinstance(value, bool):
            raise ValueError
        if isinstance(value, str) and re.fullmatch(DECIMAL, value) is None:
            raise ValueError
        try:
            number = float(value)
        except OverflowError:
            number = math.nan
        if not self.low <= number <= self.high:  # also refuses what is not a number
            raise ValueError
        return number


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    allowed = "true or false"

    def read(self, value: Any, path: str) -> bool:
        if not isinstance(value, bool):
            raise ValueError
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """A list of texts.

    Attributes:
        item: what each is.
        words: what they are.
        min_items, max_items: how many.
        distinct: whether none may stand there twice.
    """

    item: Text
    words: str = "texts"
    min_items: int = 0
    max_items: int = 256
    distinct: bool = False

    @property
    def allowed(self) -> str:
        count = f"{self.min_items} to {self.max_items}" if self.min_items else f"at most {self.max_items}"
        return f"a list of {count} {'different ' if self.distinct else ''}{self.words}"

    def read(self, value: Any, path: str) -> tuple[str, ...]:
        if not isinstance(value, (list, tuple)) or not self.min_items <= len(value) <= self.max_items:
            raise ValueError
        found = tuple(_read(self.item, item, f"{path}[{at}]") for at, item in enumerate(value))
        if self.distinct and len(set(found)) < len(found):
            raise ValueError
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Mapped:
    """A table whose keys are the owner's own, from texts to texts.

    Attributes:
        key, value: what each is.
        min_items, max_items: how many.
    """

    key: Text
    value: Text
    min_items: int = 0
    max_items: int = 64

    @property
    def allowed(self) -> str:
        return f"a table of {self.min_items} to {self.max_items} keys"

    def read(self, value: Any, path: str) -> dict[str, str]:
        if not isinstance(value, Mapping) or not self.min_items <= len(value) <= self.max_items:
            raise ValueError
        for key in value:
            _read(self.key, key, f"the name {_short(key)} in {path}", shown=False)
        return {key: _read(self.value, item, f"{path}.{key}") for key, item in value.items()}


@dataclass(frozen=True, slots=True)
class Table:
    """A table of declared keys."""

    fields: tuple[Field, ...]

    allowed = "a table"

    def read(self, value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise ValueError
        return read(self.fields, value, path)


@dataclass(frozen=True, slots=True)
class Field:
    """One key.

    Attributes:
        name: of the key.
        kind: what its value may be.
        meaning: one sentence for the reference.
        default: what stands in for it; None where nothing does, `REQUIRED` where it must be there.
    """

    name: str
    kind: Kind
    meaning: str
    default: Any = REQUIRED


class Rule(Protocol):
    """What keys of one table demand of each other."""

    @property
    def words(self) -> str:
        """The same as a sentence for the reference."""

    def check(self, given: Mapping[str, Any], path: str) -> None:
        """Refuse a table that breaks it; raises `UsageError`."""


@dataclass(frozen=True, slots=True)
class Needs:
    """`name` is there only beside `other`."""

    name: str
    other: str

    @property
    def words(self) -> str:
        return f"`{self.name}` needs `{self.other}`."

    def check(self, given: Mapping[str, Any], path: str) -> None:
        if self.name in given and self.other not in given:
            raise invalid(f"{path}.{self.name}", f"absent where there is no {self.other}")


@dataclass(frozen=True, slots=True)
class ExactlyOne:
    """One of two keys is there."""

    one: str
    other: str

    @property
    def words(self) -> str:
        return f"Either `{self.one}` or `{self.other}` must be there."

    def check(self, given: Mapping[str, Any], path: str) -> None:
        if (self.one in given) == (self.other in given):
            raise UsageError(
                Code.JOB_INVALID, f"{path}.{self.one} or {path}.{self.other}: exactly one of them must be there"
            )


def invalid(path: str, allowed: str, *given: Any) -> UsageError:
    """Return the error of a key whose value is not what belongs there.

    Args:
        path: of the key, such as ``params.steps``.
        allowed: what belongs there.
        given: what was there.
    """
    instead = f", not {_short(given[0])}" if given else ""
    return UsageError(Code.JOB_INVALID, f"{path} must be {allowed}{instead}")


def read(
    fields: Sequence[Field], values: Mapping[str, Any], path: str, *, rules: Sequence[Rule] = ()
) -> dict[str, Any]:
    """Check one table and return a value for every declared key.

    Args:
        fields: its keys.
        values: as parsed from TOML or JSON.
        path: the table's name, empty at the top level.
        rules: what the keys demand of each other.

    Raises:
        UsageError: `job-invalid`, naming the key.
    """
    known = [field.name for field in fields]
    unknown = sorted(str(name) for name in values if name not in known)
    found = {}
    for field in fields:
        if field.name in values:
            found[field.name] = _read(field.kind, values[field.name], _path(path, field.name))
        elif field.default is REQUIRED:
            raise _missing(field, path, unknown)
        elif isinstance(field.kind, Table) and field.default is not None:
            found[field.name] = field.kind.read(field.default, _path(path, field.name))
        else:
            found[field.name] = field.default
    if unknown:
        near = _near(unknown[0], known)
        raise UsageError(
            Code.JOB_INVALID,
            f"{_path(path, unknown[0])[:_SHOWN_CHARS]} is not known",
            hint=(f"did you mean {near!r}? " if near else "") + "known: " + ", ".join(sorted(known)),
        )
    for rule in rules:
        rule.check(values, path)
    return found


def _read(kind: Kind, value: Any, path: str, *, shown: bool = True) -> Any:
    try:
        return kind.read(value, path)
    except ValueError:
        raise (invalid(path, kind.allowed, value) if shown else invalid(path, kind.allowed)) from None


def _missing(field: Field, path: str, unknown: list[str]) -> UsageError:
    name = _path(path, field.name)
    near = _near(field.name, unknown)
    hint = f"{_path(path, near)!r} is not known: did you mean {name!r}?" if near else ""
    return UsageError(Code.JOB_INVALID, f"{name} is missing; it must be {field.kind.allowed}", hint=hint)


def _near(name: str, others: Collection[str]) -> str | None:
    import difflib  # only for a mistake: every start of a worker compiles what it imports

    return next(iter(difflib.get_close_matches(name.lower().replace("-", "_"), others, n=1)), None)


def _path(table: str, key: str) -> str:
    return f"{table}.{key}" if table else key


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."
