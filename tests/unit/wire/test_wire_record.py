"""Records: what a field declares is written, read back, and refused beyond its limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glasshouse.errors import Code, FormatError
from glasshouse.wire.canonical import MAX_INTEGER, decode, encode
from glasshouse.wire.record import (
    APART,
    LEFT_OUT,
    Decimal,
    Id,
    Identifier,
    Member,
    Record,
    Sha256,
    choice,
    fixed,
    integer,
    items,
    nullable,
    octets,
    one_of,
    raw,
    table,
    text,
)


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part(Record, name="part"):
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Thing(
    Record,
    name="thing",
    max_bytes=4096,
    constants={
        "version": 1,
        "done": False,
        "leaves_out": ["x"],
        "loss": {"unit": "nat", "base": {"e": 1}},
        "of": {"a": []},
    },
    derived={"label": "label", "length": "length", ("loss", "known"): "length"},
):
    id: Id
    name: Identifier
    title: Annotated[str, text(8)]
    kind: Annotated[str, choice(("a", "b"))]
    colour: Colour
    count: Annotated[int, integer(1, 9)]
    on: bool
    key: Annotated[bytes, octets(4)]
    blob: Annotated[bytes, octets(max_length=6)]
    sha256: Sha256 | None
    loss: Annotated[Decimal | None, Member("loss", "first")]
    last: Annotated[Decimal | None, Member("loss", "last")]
    part: Part
    parts: Annotated[tuple[Part, ...], items(2)]
    colours: Annotated[tuple[Colour, ...], items(2, min_items=1)]
    names: Annotated[tuple[str, ...], items(2, text(4))]
    sizes: Annotated[dict[str, int | None], table(2, text(3), integer(0, 5))]
    steps: Annotated[dict[str, int | None], table(2, choice(("a", "b")), nullable(integer()), min_items=2)]
    pairs: Annotated[tuple[tuple[str, Colour], ...], items(2, fixed(name=text(4), colour=choice(list(Colour))))]
    pair: Annotated[tuple[int, int] | None, fixed(low=integer(), high=integer())]
    marks: Annotated[Mapping[str, Colour], table(2, text(3))]
    hues: Annotated[Mapping[str, Colour], table(2, text(3))]
    free: Annotated[Any, raw()]
    extra: Annotated[Sha256 | None, LEFT_OUT] = None
    disk: Annotated[int, LEFT_OUT] = 7

    @property
    def label(self) -> str:
        return f"{self.kind}-{self.count}"

    @property
    def length(self) -> int:
        return len(self.parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Signed(Part, name="signed", max_bytes=64):
    envelope: Annotated[bytes, APART]


def thing(**changes: Any) -> Thing:
    given: dict[str, Any] = {
        "id": "ab" * 16,
        "name": "x-1",
        "title": "größe",
        "kind": "a",
        "colour": Colour.BLUE,
        "count": 3,
        "on": True,
        "key": b"1234",
        "blob": b"\x00\xff",
        "sha256": None,
        "loss": "0.5",
        "last": None,
        "part": Part(size=1),
        "parts": (Part(size=2), Part(size=3)),
        "colours": (Colour.RED,),
        "names": ("a", "b"),
        "sizes": {"a": 1},
        "steps": {"a": 1, "b": None},
        "pairs": (("x", Colour.RED), ("y", Colour.BLUE)),
        "pair": (1, 2),
        "marks": {"a": Colour.RED},
        "hues": {"a": Colour.RED},
        "free": [{"any": None}],
    }
    return Thing(**{**given, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sha256": b"\x01" * 32, "extra": b"\x02" * 32, "disk": 8},
        {"parts": (), "names": (), "sizes": {}, "loss": None, "pairs": (), "pair": None, "free": None},
    ],
    ids=["as it is", "all there", "empty"],
)
def test_what_is_written_is_read_back(changes: dict[str, Any]) -> None:
    one = thing(**changes)
    assert Thing.from_json(one.to_json()) == one
    assert Thing.parse(one.encode()) == one
    assert Thing.parse(one.encode()).encode() == one.encode()


def test_what_stands_where() -> None:
    written = thing(extra=b"\x02" * 32).to_json()
    assert written["loss"] == {"first": "0.5", "last": None, "unit": "nat", "base": {"e": 1}, "known": 2}
    assert written["length"] == 2
    assert written["of"] == {"a": []}
    assert (written["version"], written["done"]) == (1, False)
    assert written["extra"] == "02" * 32
    assert "disk" not in written
    assert written["part"] == {"size": 1}
    assert written["colour"] == "blue"
    assert type(written["colour"]) is str
    assert "extra" not in thing().to_json()
    assert written["pairs"] == [{"name": "x", "colour": "red"}, {"name": "y", "colour": "blue"}]
    assert written["pair"] == {"low": 1, "high": 2}
    assert written["label"] == "a-3"


def test_what_stands_apart_is_no_member_and_is_given_by_name() -> None:
    one = Signed(size=1, envelope=b"x")
    assert one.encode() == b'{"size":1}'
    assert Signed.parse(one.encode(), envelope=b"x") == one
    with pytest.raises(FormatError, match="signed has an unknown field 'envelope'"):
        Signed.from_json({"size": 1, "envelope": "x"}, envelope=b"x")


LOSS: dict[str, Any] = thing().to_json()["loss"]  # type: ignore[assignment]  # an object

# Beside each change, what the error says of it; `...` takes a member out.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"id": "AB" * 16}, "thing.id"),
    ({"id": "ab" * 15}, "thing.id"),
    ({"id": None}, "thing.id"),
    ({"name": "-x"}, "thing.name"),
    ({"title": "123456789"}, "thing.title"),
    ({"title": "a\x00"}, "thing.title"),
    ({"kind": "c"}, "thing.kind"),
    ({"kind": ["a"]}, "thing.kind"),
    ({"colour": "green"}, "thing.colour"),
    ({"colour": {}}, "thing.colour"),
    ({"count": 0}, "thing.count"),
    ({"count": 10}, "thing.count"),
    ({"count": True}, "thing.count"),
    ({"count": "3"}, "thing.count"),
    ({"on": 1}, "thing.on"),
    ({"key": "MTIz"}, "thing.key"),
    ({"key": "MTIzNDU"}, "thing.key"),
    ({"key": "MTIzNB"}, "base64url"),  # other spare bits
    ({"blob": "AAAAAAAAAA"}, "thing.blob"),
    ({"sha256": "00"}, "thing.sha256"),
    ({"loss": {**LOSS, "last": ...}}, "thing.loss.last is missing"),
    ({"loss": {**LOSS, "more": 1}}, "thing.loss has an unknown field 'more'"),
    ({"loss": {**LOSS, "unit": "bit"}}, "thing.loss.unit is not 'nat'"),
    ({"loss": {**LOSS, "unit": ...}}, "thing.loss.unit is not 'nat'"),
    ({"loss": {**LOSS, "base": {"e": True}}}, "thing.loss.base"),
    ({"of": {"a": {}}}, "thing.of"),
    ({"length": 1}, "thing.length is not what follows from the rest"),
    ({"length": "2"}, "thing.length"),
    ({"parts": []}, "what follows from the rest"),
    ({"loss": {**LOSS, "known": True}}, "thing.loss.known"),
    ({"loss": {**LOSS, "known": ...}}, "thing.loss.known is missing"),
    ({"hues": {"a": "green"}}, "thing.hues.a"),
    ({"loss": None}, "thing.loss is not an object"),
    ({"part": {"size": -1}}, "thing.part.size"),
    ({"part": []}, "thing.part is not an object"),
    ({"parts": [{"size": 1}] * 3}, "thing.parts"),
    ({"parts": [{"size": 1, "x": 1}]}, "thing.parts has an unknown field 'x'"),
    ({"parts": {}}, "thing.parts"),
    ({"colours": []}, "thing.colours"),
    ({"names": [1]}, "thing.names"),
    ({"sizes": {"a": 6}}, "thing.sizes.a"),
    ({"sizes": {"abcd": 1}}, "thing.sizes"),
    ({"sizes": {"a": 1, "b": 1, "c": 1}}, "thing.sizes"),
    ({"steps": {"a": 1}}, "thing.steps"),
    ({"steps": {"a": 1, "c": 1}}, "thing.steps"),
    ({"steps": {"a": 1, "b": -1}}, "thing.steps.b"),
    ({"pairs": [{"name": "x"}]}, "thing.pairs.colour is missing"),
    ({"pairs": [{"name": "x", "colour": "red", "more": 1}]}, "thing.pairs has an unknown field 'more'"),
    ({"pairs": [{"name": "x", "colour": "green"}]}, "thing.pairs.colour"),
    ({"pairs": [["x", "red"]]}, "thing.pairs is not an object"),
    ({"pair": {"low": 1, "high": None}}, "thing.pair.high"),
    ({"label": "a-4"}, "thing.label"),
    ({"label": None}, "thing.label"),
    ({"leaves_out": []}, "thing.leaves_out"),
    ({"leaves_out": ["x", "x"]}, "thing.leaves_out"),
    ({"marks": {"a": "green"}}, "thing.marks.a"),
    ({"extra": None}, "thing.extra"),
    ({"disk": None}, "thing.disk"),
    ({"version": 2}, "thing.version"),
    ({"version": True}, "thing.version"),
    ({"done": 0}, "thing.done"),
    ({"more": 1}, "thing has an unknown field 'more'"),
]


@pytest.mark.parametrize(("change", "words"), WRONG, ids=[f"{number}" for number in range(len(WRONG))])
def test_what_a_field_does_not_allow_is_refused_by_its_name(change: dict[str, Any], words: str) -> None:
    if "loss" in change and change["loss"] is not None:
        change = {"loss": {name: value for name, value in change["loss"].items() if value is not ...}}
    with pytest.raises(FormatError) as refused:
        Thing.from_json({**thing().to_json(), **change})
    assert refused.value.code is Code.SCHEMA
    assert words in refused.value.message


@pytest.mark.parametrize("name", sorted(thing().to_json()))
def test_no_member_may_be_missing(name: str) -> None:
    written = thing().to_json()
    del written[name]
    with pytest.raises(FormatError, match=rf"thing\.{name}"):
        Thing.from_json(written)


@pytest.mark.parametrize("value", [None, [], "x", 1, True])
def test_what_is_no_object_is_refused(value: Any) -> None:
    with pytest.raises(FormatError, match="thing is not an object"):
        Thing.from_json(value)


def test_an_error_shows_no_value() -> None:
    secret = "hunter2" * 40
    for name in ("id", "name", "title", "kind", "colour", "key", "blob", "names"):
        with pytest.raises(FormatError) as refused:
            Thing.from_json({**thing().to_json(), name: secret})
        assert "hunter2" not in refused.value.message


@dataclass(frozen=True, kw_only=True, slots=True)
class Square(Record, constants={"shape": "square"}):
    side: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Circle(Record, constants={"shape": "circle"}):
    radius: int


def test_one_of_several_records_is_told_by_a_constant_member() -> None:
    shape = one_of("shape", Square, Circle)
    for one in (Square(side=1), Circle(radius=2)):
        assert shape.read(shape.write(one), "shape") == one
    for wrong, words in (
        ({"shape": "line"}, "figure.shape is not one of circle, square"),
        ({"shape": ["square"]}, "figure.shape"),
        ({"side": 1}, "figure.shape"),
        ({"shape": "square", "radius": 1}, "figure.side is missing"),
        (["square"], "figure is not an object"),
    ):
        with pytest.raises(FormatError) as refused:
            shape.read(wrong, "figure")
        assert refused.value.code is Code.SCHEMA
        assert words in refused.value.message


def test_bytes_beyond_the_limit_and_another_form_are_refused() -> None:
    with pytest.raises(FormatError) as long:
        Thing.parse(b" " * 4097)
    with pytest.raises(FormatError) as other:
        Thing.parse(thing().encode().replace(b'"version":1', b'"version": 1'))
    assert (long.value.code, other.value.code) == (Code.TOO_LARGE, Code.NOT_CANONICAL)


def test_a_field_that_does_not_say_how_it_is_written_is_found_at_the_first_use() -> None:
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Bare(Record, name="bare"):
        words: str

    with pytest.raises(TypeError, match=r"Bare\.words"):
        Bare(words="").to_json()


@given(
    st.builds(
        thing,
        title=st.text(max_size=8).filter(lambda value: "\x00" not in value and value.isprintable()),
        count=st.integers(1, 9),
        key=st.binary(min_size=4, max_size=4),
        blob=st.binary(max_size=6),
        sha256=st.none() | st.binary(min_size=32, max_size=32),
        parts=st.lists(st.builds(Part, size=st.integers(0, MAX_INTEGER)), max_size=2).map(tuple),
        extra=st.none() | st.binary(min_size=32, max_size=32),
    )
)
def test_the_laws_hold_for_any_values(one: Thing) -> None:
    assert Thing.parse(one.encode()) == one
    assert encode(decode(one.encode(), max_bytes=4096)) == one.encode()
