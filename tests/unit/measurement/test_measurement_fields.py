"""Reading a closed object: every accessor takes what it should, once, and refuses the rest without repeating it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from glasshouse.errors import Code, FormatError
from glasshouse.wire.canonical import MAX_INTEGER
from glasshouse_bench.strict_fields import Fields

SECRET = "a value that must not be repeated"


def refused(read: Callable[[Fields], object], value: Any) -> None:
    with pytest.raises(FormatError) as caught:
        read(Fields({"f": value}, "doc"))
    assert caught.value.code is Code.SCHEMA
    assert SECRET not in caught.value.message


READERS: dict[str, tuple[Callable[[Fields], object], list[Any], list[Any]]] = {
    "text": (lambda f: f.text("f", max_chars=5), ["", "hello", "ü" * 5], ["toolong", "a\x00b", 1, None, [], True]),
    "pattern": (lambda f: f.text("f", pattern=re.compile("a+")), ["a", "aaa"], ["", "b", "ab", "a\n", SECRET]),
    "identifier": (
        lambda f: f.identifier("f"),
        ["a", "A-1.b_c"],
        ["", "-a", ".a", "a b", "a/b", "é", "x" * 129, SECRET],
    ),
    "decimal": (
        lambda f: f.decimal("f"),
        ["0", "-1.5", "0.000001", "1e-07", "1.5e+30"],
        ["", "nan", "inf", "1.", ".5", "01", "+1", "1e5", "0x1", "1,5", "١", 1, 0.5],
    ),
    "choice": (lambda f: f.choice("f", ["one", "two"]), ["one", "two"], ["", "three", "ONE", 1, None, ["one"], SECRET]),
    "integer": (
        lambda f: f.integer("f", low=1, high=10),
        [1, 10],
        [0, 11, -1, True, "1", None, 1.0, MAX_INTEGER + 1],
    ),
    "flag": (lambda f: f.flag("f"), [True, False], [0, 1, "true", None]),
    "octets": (
        lambda f: f.octets("f", length=3),
        ["AAAA", "-_-_"],
        ["AAA", "AAAAA", "+/+/", "AAA=", "AA", "", 1, None],
    ),
    "digest": (
        lambda f: f.digest("f", length=2),
        ["00ff", "abcd"],
        ["00FF", "0f", "00fff", "0x00", "zzzz", " 00ff", "00ff\n", 0, None, SECRET],
    ),
    "items": (lambda f: f.items("f", max_items=2), [[], [1, None]], [[1, 2, 3], "ab", {}, None]),
    "texts": (lambda f: f.texts("f", max_items=2, max_chars=2), [[], ["ab", ""]], [["abc"], [1], ["a\x00"], ["a"] * 3]),
    "child": (lambda f: f.child("f"), [{}, {"a": 1}], [[], None, "x", 1]),
}


@pytest.mark.parametrize("name", READERS)
def test_an_accessor_takes_what_it_is_for(name: str) -> None:
    read, good, bad = READERS[name]
    for value in good:
        fields = Fields({"f": value}, "doc")
        read(fields)
        fields.end()
    for value in bad:
        refused(read, value)


@pytest.mark.parametrize("name", READERS)
def test_a_field_is_there_once(name: str) -> None:
    read, good, _ = READERS[name]
    fields = Fields({"f": good[-1]}, "doc")
    read(fields)
    with pytest.raises(FormatError, match=r"doc\.f is missing"):
        read(fields)
    with pytest.raises(FormatError, match=r"doc\.f is missing"):
        read(Fields({}, "doc"))


def test_what_nobody_asked_for_is_refused() -> None:
    fields = Fields({"a": 1, "b": SECRET}, "doc")
    fields.integer("a")
    with pytest.raises(FormatError, match="unknown field 'b'") as caught:
        fields.end()
    assert SECRET not in caught.value.message


@pytest.mark.parametrize("value", [[], None, "x", 1, True])
def test_only_an_object_has_fields(value: Any) -> None:
    with pytest.raises(FormatError, match="not an object"):
        Fields(value, "doc")


def test_a_null_is_taken_and_anything_else_left() -> None:
    fields = Fields({"a": None, "b": 0, "c": False}, "doc")
    assert fields.null("a")
    assert not fields.null("a")
    assert not fields.null("b")
    assert not fields.null("c")
    assert not fields.null("absent")
    assert fields.has("b")
    fields.integer("b")
    fields.flag("c")
    fields.end()


def test_the_document_that_was_given_is_left_alone() -> None:
    document = {"a": 1}
    Fields(document, "doc").integer("a")
    assert document == {"a": 1}
