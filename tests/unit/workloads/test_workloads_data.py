"""From records and tables to numbers; wrong lines are named."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glasshouse.errors import Code, UsageError
from glasshouse.workloads.builtin.mlp import read_csv
from glasshouse.workloads.lora.data_forms import Record, read_records
from glasshouse.workloads.lora.encoding import ByteTokenizer, Examples, encode_records
from glasshouse.workloads.lora.lora_params import LoraParams

FORMS = "one JSON object, or each row of a table one record, with messages; or prompt and completion; or text; or instr"


CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def lines(*given: object) -> list[bytes]:
    return [json.dumps(record).encode() + b"\n" for record in given]


def read(*given: object) -> list[Record]:
    return [record for _, record in placed(lines(*given))]


def placed(given: list[bytes]) -> Iterator[tuple[str, Record]]:
    return read_records(lambda _: io.BytesIO(b"".join(given)), ["t"], "t")


def encoded(given: list[bytes], **params: Any) -> Examples:
    return encode_records(placed(given), "t", ByteTokenizer(), LoraParams.read({"model": "config:qwen2-tiny"} | params))


def text_of(ids: Iterable[int]) -> str:
    """Return what ids of the byte tokenizer stand for, without its special tokens."""
    return bytes(i - 2 for i in ids if i >= 2).decode()


def test_every_form_becomes_what_is_asked_and_what_is_learnt() -> None:
    chat = CHAT
    call = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    assert read({"messages": chat, "source": "ward"}) == [Record(None, chat)]
    assert read({"messages": call, "tools": '[{"name": "f"}]'}) == [Record(None, call, [{"name": "f"}])]
    assert read({"messages": chat, "chat_template_kwargs": {"x": 1}}) == [Record(None, chat, None, {"x": 1})]
    assert read({"prompt": chat[:1], "completion": chat[1:]}) == [Record(chat[:1], chat[1:])]
    assert read({"prompt": "a", "completion": "b"}) == [Record("a", "b")]
    assert read({"text": "a"}) == [Record(None, "a")]


def test_an_instruction_becomes_a_prompt_and_a_completion() -> None:
    found = encoded(
        lines({"instruction": "Add.", "input": "1 2", "output": "3"}, {"instruction": "Hi", "output": "ho"})
    )
    ids, counted = found.example(0)
    prompt = counted.index(1)
    assert text_of(ids[:prompt]) == "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n"
    assert text_of(ids[prompt:]) == "3"
    assert all(counted[prompt:])
    assert ids[-1] == ByteTokenizer.eos_token_id
    ids, _ = found.example(1)
    assert text_of(ids) == "### Instruction:\nHi\n\n### Response:\nho"
    assert len(found) == 2


def test_long_answers_are_cut_and_what_would_teach_nothing_is_left_out_and_counted() -> None:
    given = lines({"instruction": "a", "output": "b" * 500}, {"instruction": "a" * 500, "output": "b"})
    found = encoded(given, max_length=64)
    assert (len(found), found.cut, found.masked) == (1, 2, 1)
    ids, counted = found.example(0)
    assert len(ids) == len(counted) == 64
    assert str(found) == "1 examples of 64 tokens, 30 of which count in the loss; 2 cut at max_length, 1 skipped"
    whole = encoded(given, max_length=64, completion_only_loss=False)
    assert (len(whole), whole.masked, all(whole.example(1)[1])) == (2, 0, True)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (b"{", "line 2 is not"),
        (b"[1]", "line 2 is not"),
        (b'{"instruction": "x"}', "line 2 has no 'output', only: instruction"),
        (b'{"prompt": "x", "completion": "y"}', "line 2 has no 'instruction', 'output', only: completion, prompt"),
        (b'{"text": "x", "instruction": "x", "output": "y"}', "line 2 fits more than one form: text; instruction and"),
        (b"{}", "line 2 has no 'instruction', 'output', only: nothing"),
        (b"[" * 100_000, "line 2 is not"),
        (b'{"instruction": "x", "output": "\\ud800"}', "line 2 holds half a character"),
        (b'{"instruction": "x", "output": ""}', "line 2 needs"),
        (b'{"instruction": 3, "output": "y"}', "line 2 needs"),
        (b"\xff\xfe", "line 2 is not"),
    ],
)
def test_a_bad_record_is_named_by_its_line(second: bytes, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        encoded([*lines({"instruction": "a", "output": "b"}), second])
    assert refused.value.code is Code.JOB_INVALID


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"messages": []}, "t line 1: messages must be a text, or a list of messages that is not empty"),
        ({"messages": "hello"}, "t line 1: messages must be a list of objects with role and content, and is a text"),
        ({"messages": [{"content": "x"}]}, "t line 1: messages[0] must be an object with role and content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "t line 1: messages[0].content must be text",
        ),
        ({"messages": [{"role": "user", "content": None}]}, "t line 1: messages[0].content must be text"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": "{"}, "t line 1: tools is a text that is not JSON"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": 3}, "t line 1: tools must be a list"),
        ({"prompt": "x", "completion": [{"role": "user", "content": "x"}]}, "two texts or two lists of messages"),
        ({"text": ["x"]}, "t line 1: text must be a text"),
        ({"prompt": "x"}, "t line 1 has none of the forms of a record, only: prompt"),
        ({"messages": CHAT, "tools": "[" * 100_000}, "t line 1: tools is a text that is not JSON"),
        ({"messages": CHAT, "images": ["a.png"]}, "t line 1 has 'images': only text is trained on"),
        ({"messages": CHAT, "chat_template_kwargs": {"chat_template": "x"}}, "may not have 'chat_template'"),
        ({"messages": CHAT, "chat_template_kwargs": {"padding": "max_length"}}, "may not have 'padding'"),
        ({"messages": CHAT, "chat_template_kwargs": {"return_tensors": "pt"}}, "may not have 'return_tensors'"),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": None}]},
            "t line 1: messages[0].content must be text",
        ),
    ],
)
def test_a_record_that_is_not_of_its_form_is_refused_with_the_place(record: object, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        read(record)
    assert words in refused.value.message


@pytest.mark.parametrize(
    ("record", "hint"),
    [
        ({"conversations": [{"from": "human", "value": "x"}]}, "rename `conversations` to `messages`"),
        ({"prompt": "x", "chosen": "y", "rejected": "z"}, "preferences are not what this workload trains on"),
        ({"input_ids": [1, 2]}, "give `text` or `messages`"),
        ({"question": "x", "answer": "y"}, FORMS),
    ],
)
def test_data_of_other_trainers_is_told_what_to_become(record: object, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        read(record)
    assert hint in refused.value.hint


@pytest.mark.parametrize(
    ("content", "why", "hint"),
    [
        ([], "it is empty", "one JSON object"),
        ([b"\n", b"  \n"], "it is empty", "one JSON object"),
        (
            lines({"instruction": "a" * 99, "output": "b"}, {"instruction": "a" * 80, "output": "b"}),
            "all are too long (2 of them); max_length is 50 tokens, and the shortest has 113 before",
            "beyond 113",
        ),
    ],
)
def test_data_with_nothing_to_train_on_is_refused_with_the_reason(content: list[bytes], why: str, hint: str) -> None:
    with pytest.raises(UsageError, match="t has no usable record: ") as refused:
        encoded(content, max_length=50)
    assert why in refused.value.message
    assert hint in refused.value.hint


@given(st.text())
def test_the_byte_tokenizer_loses_nothing(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer(text + "</s>")["input_ids"]
    assert text_of(ids) == text
    assert ids[-1] == tokenizer.eos_token_id
    assert all(1 < i < 258 for i in ids[:-1])


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
