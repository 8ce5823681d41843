"""Canonical JSON: the examples of RFC 8785, and everything that is not the one valid encoding."""

from __future__ import annotations

import json
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Any

import pytest

from glasshouse.errors import Code, FormatError
from glasshouse.wire import canonical
from glasshouse.wire.canonical import MAX_DEPTH, MAX_INTEGER, Json, decode, encode


def refusal(data: bytes, *, max_bytes: int = 1000) -> Code:
    with pytest.raises(FormatError) as caught:
        decode(data, max_bytes=max_bytes)
    return caught.value.code


@pytest.mark.parametrize("data", [b"[0,0,0,0]", b"[[[[]]]]", b'{"a":{},"b":[]}', b'",[{,[{"'])
def test_elements_are_counted_wherever_they_stand_and_before_anything_is_parsed(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """124 KB of commas took 74 ms to parse, twelve times a second: nobody else was served."""
    elements = sum(data.count(mark) for mark in b",[{")
    assert encode(decode(data, max_bytes=100, max_elements=elements)) == data
    monkeypatch.setattr(canonical, "_DECODER", None)
    with pytest.raises(FormatError) as caught:
        decode(data, max_bytes=100, max_elements=elements - 1)
    assert caught.value.code is Code.SCHEMA


@pytest.mark.parametrize("data", ['{"é":0}'.encode(), '["é"]'.encode(), b"\xff"])
def test_what_strangers_send_is_ascii_or_is_not_parsed(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand keys of other text were put in order one by one: 4 ms before anything was known of their sender."""
    monkeypatch.setattr(canonical, "_DECODER", None)
    with pytest.raises(FormatError, match="not ASCII") as caught:
        decode(data, max_bytes=100, max_elements=100)
    assert caught.value.code is Code.SCHEMA


@pytest.mark.parametrize("data", [rb'{"\u00e9":0}', rb'["\u00e9"]', rb'["\ud800"]', rb'{"a":0,"\u0062":1}'])
def test_text_that_is_escaped_for_nothing_is_not_canonical(data: bytes) -> None:
    for limit in (None, 100):
        with pytest.raises(FormatError):
            decode(data, max_bytes=100, max_elements=limit)


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1, 5000])
@pytest.mark.parametrize(("start", "end"), [(b"[", b"]"), (b'{"a":', b"}")], ids=["arrays", "objects"])
def test_depth_is_bounded_whether_or_not_elements_are_counted(depth: int, start: bytes, end: bytes) -> None:
    data = start * depth + b"0" + end * depth
    if depth <= MAX_DEPTH:
        assert encode(decode(data, max_bytes=100, max_elements=1000)) == data
        return
    for limit in (None, 10_000):
        with pytest.raises(FormatError):
            decode(data, max_bytes=40_000, max_elements=limit)


def test_the_sorting_example_of_rfc_8785_section_3_2_3() -> None:
    value = {
        "\u20ac": "Euro Sign",
        "\r": "Carriage Return",
        "\ufb33": "Hebrew Letter Dalet With Dagesh",
        "1": "One",
        "\U0001f600": "Emoji: Grinning Face",
        "\u0080": "Control",
        "\u00f6": "Latin Small Letter O With Diaeresis",
    }
    expected = (
        '{"\\r":"Carriage Return","1":"One","\u0080":"Control","ö":"Latin Small Letter O With Diaeresis",'
        '"€":"Euro Sign","\U0001f600":"Emoji: Grinning Face","\ufb33":"Hebrew Letter Dalet With Dagesh"}'
    ).encode()
    assert encode(value) == expected
    assert decode(expected, max_bytes=1000) == value


def test_the_string_example_of_rfc_8785_section_3_2_2() -> None:
    text = "\u20ac$\u000f\u000aA'\u0042\u0022\u005c\\\"/"
    assert encode(text) == '"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"'.encode()
    assert decode(encode(text), max_bytes=100) == text


def test_the_literals_example_of_rfc_8785() -> None:
    assert encode({"literals": [None, True, False]}) == b'{"literals":[null,true,false]}'


def test_control_characters_are_escaped_in_the_shortest_way() -> None:
    assert encode("\b\t\n\f\r\x00\x1f\x7f") == b'"\\b\\t\\n\\f\\r\\u0000\\u001f\x7f"'


@pytest.mark.parametrize("number", [0, 1, -1, MAX_INTEGER, -MAX_INTEGER])
def test_whole_numbers_up_to_two_to_the_53(number: int) -> None:
    assert decode(encode(number), max_bytes=100) == number


@pytest.mark.parametrize(
    "value", [MAX_INTEGER + 1, -MAX_INTEGER - 1, 0.5, float("nan"), b"x", {1: 2}, "\ud800", {"\udfff": 1}]
)
def test_what_has_no_canonical_form_is_not_encoded(value: object) -> None:
    with pytest.raises(FormatError) as caught:
        encode(value)
    assert caught.value.code is Code.SCHEMA


@pytest.mark.parametrize(
    "data",
    [
        b" 1",
        b"1 ",
        b"1\n",
        b'{"a":1, "b":2}',
        b'{"b":1,"a":2}',
        b'{"\\u0061":1}',
        b'"\\u00e9"',
        b'"\\/"',
        b'"\\u000A"',
        b"-0",
        b'{"\xef\xac\xb3":1,"\xf0\x9f\x98\x80":2}',  # sorted by code points, not by UTF-16 units
    ],
)
def test_another_spelling_of_the_same_value_is_refused(data: bytes) -> None:
    assert refusal(data) is Code.NOT_CANONICAL


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"nul",
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"1.0",
        b"1e3",
        b"1E400",
        b"9007199254740992",
        b"1" * 400,
        b'{"a":1,"a":1}',
        b'"\\ud800"',
        b"\xff",
        b"\xef\xbb\xbf1",
        b"'a'",
        b"01",
        b"+1",
        b"[1,]",
        b"1 2",
        b"\x00",
    ],
)
def test_what_is_not_our_json_is_refused(data: bytes) -> None:
    assert refusal(data) is Code.SCHEMA


def test_the_size_is_looked_at_before_anything_else() -> None:
    assert refusal(b"\xff" * 11, max_bytes=10) is Code.TOO_LARGE
    assert decode(b'"12345678"', max_bytes=10) == "12345678"


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def test_depth_is_bounded_and_a_bomb_of_brackets_is_only_refused() -> None:
    assert decode(nested(MAX_DEPTH + 1), max_bytes=100)
    assert refusal(nested(MAX_DEPTH + 2)) is Code.SCHEMA
    assert refusal(nested(100_000), max_bytes=1 << 20) is Code.SCHEMA
    assert refusal(b'{"a":' * 100_000, max_bytes=1 << 20) is Code.SCHEMA


def test_buffers_of_every_kind_are_read() -> None:
    for data in (b"[1]", bytearray(b"[1]"), memoryview(b"[1]")):
        assert decode(data, max_bytes=10) == [1]


def test_tuples_are_arrays_and_booleans_are_not_numbers() -> None:
    assert encode((1, True, False)) == b"[1,true,false]"


class Word(StrEnum):
    ONE = "b"


@pytest.mark.parametrize(
    "value",
    [
        {"b": [1, (2, True, None)], "a": {}},
        {"\u00e9": 1, "z": "\u00fc", "a": [{}, []]},
        {Word.ONE: Word.ONE, "a": MappingProxyType({"d": 1, "c": (Word.ONE,)})},
        {"b": IntEnum("Number", "TWO").TWO, "a": MAX_INTEGER},
    ],
)
def test_plain_values_and_unusual_ones_are_written_by_the_same_rules(value: Json) -> None:
    careful = json.dumps(canonical._ordered(value, 0), ensure_ascii=False, separators=(",", ":")).encode()
    assert encode(value) == careful
    assert encode(decode(careful, max_bytes=1000)) == careful


@pytest.mark.parametrize(
    "value",
    [{1: "a"}, {None: "a"}, {"a": {True: 1}}, [1.0], {"a": float("nan")}, {"a": MAX_INTEGER + 1}, [b"x"]],
)
def test_what_has_no_canonical_form_is_refused_however_deep_it_lies(value: Any) -> None:
    with pytest.raises(FormatError):
        encode(value)
    with pytest.raises(FormatError):
        encode({"beside": "\u00e9", "it": value})


@pytest.mark.parametrize("leaf", [0, "text", [], {}, [0], {"a": 0}])
def test_the_depth_is_counted_the_same_for_every_kind_of_leaf(leaf: Json) -> None:
    def nested(levels: int) -> Json:
        value = leaf
        for level in range(levels):
            value = [value] if level % 2 else {"a": value}
        return value

    own = 1 if leaf in ([0], {"a": 0}) else 0
    assert decode(encode(nested(MAX_DEPTH - own)), max_bytes=1000) == nested(MAX_DEPTH - own)
    with pytest.raises(FormatError):
        encode(nested(MAX_DEPTH - own + 1))
