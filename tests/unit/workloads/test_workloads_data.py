"""From records and tables to numbers; wrong lines are named."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glasshouse.errors import Code, UsageError
from glasshouse.workloads.builtin.instructions import ByteTokenizer, encode_records
from glasshouse.workloads.builtin.mlp import read_csv


def lines(*records: object) -> list[bytes]:
    return [json.dumps(record).encode() + b"\n" for record in records]


def text_of(ids: Iterable[int]) -> str:
    """Return what ids of the byte tokenizer stand for, without its special tokens."""
    return bytes(i - 2 for i in ids if i >= 2).decode()


def test_a_record_becomes_a_prompt_and_an_answer() -> None:
    tokenizer = ByteTokenizer()
    found = encode_records(
        lines({"instruction": "Add.", "input": "1 2", "output": "3"}, {"instruction": "Hi", "output": "ho"}),
        tokenizer,
        max_length=100,
        name="t",
    )
    ids, prompt = found.example(0)
    assert text_of(ids[:prompt]) == "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n"
    assert text_of(ids[prompt:]) == "3"
    assert ids[-1] == tokenizer.end_id
    ids, prompt = found.example(1)
    assert text_of(ids) == "### Instruction:\nHi\n\n### Response:\nho"
    assert len(found) == 2


def test_long_answers_are_cut_and_answers_that_do_not_fit_are_skipped() -> None:
    found = encode_records(
        lines({"instruction": "a", "output": "b" * 500}, {"instruction": "a" * 500, "output": "b"}),
        ByteTokenizer(),
        max_length=64,
        name="t",
    )
    assert (len(found), found.skipped) == (1, 1)
    ids, prompt = found.example(0)
    assert len(ids) == 64 > prompt


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (b"{", "line 2 is not"),
        (b"[1]", "line 2 is not"),
        (b'{"instruction": "x"}', "line 2 has no 'output', only: instruction"),
        (b'{"prompt": "x", "completion": "y"}', "line 2 has no 'instruction', only: completion, prompt"),
        (b"{}", "line 2 has no 'instruction', only: nothing"),
        (b"[" * 100_000, "line 2 is not"),
        (b'{"instruction": "x", "output": "\\ud800"}', "line 2 holds half a character"),
        (b'{"instruction": "x", "output": ""}', "line 2 needs"),
        (b'{"instruction": 3, "output": "y"}', "line 2 needs"),
        (b"\xff\xfe", "line 2 is not"),
    ],
)
def test_a_bad_record_is_named_by_its_line(second: bytes, says: str) -> None:
    with pytest.raises(UsageError, match=says) as refused:
        encode_records([*lines({"instruction": "a", "output": "b"}), second], ByteTokenizer(), max_length=99, name="t")
    assert refused.value.code is Code.JOB_INVALID


@pytest.mark.parametrize(
    ("content", "why", "hint"),
    [
        ([], "it is empty", "one JSON object"),
        ([b"\n", b"  \n"], "it is empty", "one JSON object"),
        (
            lines({"instruction": "a" * 99, "output": "b"}, {"instruction": "a" * 80, "output": "b"}),
            "all are too long (2 of them); max_length is 50 tokens, and the shortest has 113 before its answer begins",
            "beyond 113",
        ),
    ],
)
def test_data_with_nothing_to_train_on_is_refused_with_the_reason(content: list[bytes], why: str, hint: str) -> None:
    with pytest.raises(UsageError, match="t has no usable record: ") as refused:
        encode_records(content, ByteTokenizer(), max_length=50, name="t")
    assert why in refused.value.message
    assert hint in refused.value.hint


@given(st.text())
def test_the_byte_tokenizer_loses_nothing(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert text_of(ids) == text
    assert all(tokenizer.end_id < i < 258 for i in ids)


def test_a_table_is_read_with_its_classes() -> None:
    table = read_csv(io.BytesIO(b"x,kind,y\n1,b,2\n3,a,4.5\n\n-1e3,b,0\n"), label="kind", name="t")
    assert list(table.features) == [1, 2, 3, 4.5, -1000, 0]
    assert (table.width, table.classes, list(table.labels)) == (2, ("a", "b"), [1, 0, 1])


def test_the_last_column_is_the_label_where_none_is_named() -> None:
    assert read_csv(io.BytesIO(b"x,y\n1,no\n2,yes\n"), label=None, name="t").classes == ("no", "yes")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no usable row: it is empty"),
        (b"x,y\n", "no usable row: there is nothing below its header"),
        (b"only\n1\n", "header"),
        (b"x,y\n1,a\n", "fewer than two"),
        (b"x,y\n1,a\n2\n", "line 3 has 1 columns"),
        (b"x,y\n1,a\nz,b\n", "line 3 column 'x'"),
        (b"x,y\n1,a\nnan,b\n", "line 3 column 'x'"),
        (b"x,y\n1,\xff\n", "UTF-8"),
    ],
)
def test_a_bad_table_is_refused_with_the_place(content: bytes, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read_csv(io.BytesIO(content), label=None, name="t")


def test_a_label_that_is_no_column_is_named() -> None:
    with pytest.raises(UsageError, match="diagnosis"):
        read_csv(io.BytesIO(b"x,y\n1,a\n"), label="diagnosis", name="t")
