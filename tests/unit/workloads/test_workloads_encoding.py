"""Ids and labels of `lora`'s examples are those of TRL's SFTTrainer, token by token; what has none is named."""

from __future__ import annotations

import io
import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import UsageError
from glasshouse.workloads.lora import data_check
from glasshouse.workloads.lora.data_check import check_data
from glasshouse.workloads.lora.data_forms import read_records
from glasshouse.workloads.lora.encoding import Examples, encode_records, padding
from glasshouse.workloads.lora.lora_params import LoraParams
from simulators import hub_tokenizers
from tools.plain_files import Packed
from tools.trl_encoding import encoded_by_trl, labelled

pytest.importorskip("transformers")

TOOLS = [{"type": "function", "function": {"name": "dose", "parameters": {"type": "object", "properties": {}}}}]
RECORDS = 60


def words(draw: random.Random, most: int = 12) -> str:
    found = " ".join(draw.choices(hub_tokenizers.TEXT.split(), k=draw.randint(1, most)))
    return found + draw.choice(["", ".", "\n", " ", "  ?", "é"])


def turns(draw: random.Random, count: int) -> list[dict[str, Any]]:
    return [{"role": "assistant" if turn % 2 else "user", "content": words(draw)} for turn in range(count)]


def records(form: str, draw: random.Random) -> list[dict[str, Any]]:
    def one() -> dict[str, Any]:
        if form == "messages":
            return {"messages": turns(draw, 2 * draw.randint(1, 3))}
        if form == "messages with tools":
            called = {"role": "assistant", "content": None, "tool_calls": [{"name": "dose", "arguments": {"mg": 5}}]}
            return {"messages": [*turns(draw, 1), called], "tools": TOOLS}
        if form == "messages after a system's":
            return {"messages": [{"role": "system", "content": words(draw)}, *turns(draw, 2)]}
        if form == "a prompt that only asks":
            chat = turns(draw, 3)
            return {"prompt": chat[:2], "completion": chat[2:] if draw.random() < 0.5 else [chat[1]]}
        if form == "messages with template arguments":
            return {
                "messages": turns(draw, 2),
                "chat_template_kwargs": {"enable_thinking": draw.random() < 0.5, "ward": words(draw, 2)},
            }
        if form == "prompt and completion, chats":
            chat = turns(draw, 2 * draw.randint(1, 3))
            return {"prompt": chat[:-1], "completion": chat[-1:]}
        if form == "prompt and completion, chats with template arguments":
            chat = turns(draw, 2)
            return {
                "prompt": chat[:1],
                "completion": chat[1:],
                "chat_template_kwargs": {"enable_thinking": draw.random() < 0.5, "ward": words(draw, 2)},
            }
        if form == "prompt and completion":
            # Some meet within a word, so that tokens merge over the boundary.
            return {"prompt": words(draw).rstrip() + draw.choice(["", " "]), "completion": words(draw)}
        end = draw.choice(["", "", "<|im_end|>", "<|eot_id|>"])  # some end a text themselves
        return {"text": words(draw, 40) + end}

    return [one() for _ in range(RECORDS)]


TEXTS = ("prompt and completion", "text")
CHATS = (
    "messages",
    "messages with tools",
    "messages with template arguments",
    "prompt and completion, chats",
    "prompt and completion, chats with template arguments",
)
CASES = [
    *((kind, form, False, only) for kind in hub_tokenizers.KINDS for form in TEXTS for only in (True, False)),
    *(
        (kind, form, False, only)
        for kind in ("llama", "qwen", "gemma")
        for form in CHATS
        for only in (True, False)
        if kind == "qwen" or "tools" not in form
    ),
    *((kind, form, True, True) for kind in ("llama", "gemma") for form in CHATS if "tools" not in form),
    *((kind, "messages after a system's", kind == "llama", True) for kind in ("llama", "qwen")),
    ("llama", "a prompt that only asks", True, True),
]


def ours(given: list[dict[str, Any]], tokenizer: Any, *, max_length: int = 1 << 20, **options: Any) -> Examples:
    params = LoraParams.read({"model": "config:qwen2-tiny", "max_length": max_length, **options})
    data = "".join(json.dumps(record) + "\n" for record in given).encode()
    return encode_records(read_records(lambda _: io.BytesIO(data), ["t"], "t"), "t", tokenizer, params)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "form", "assistant", "completion"), CASES)
def test_ids_and_labels_are_trls(kind: str, form: str, assistant: bool, completion: bool, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from datasets import load_dataset

    given = records(form, random.Random(f"{kind} {form}"))
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in given))
    short = 40 if any(word in form for word in ("arguments", "asks", "system")) else 24
    for max_length in (1 << 20, short):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what TRL and what it imports have to say of themselves
            theirs = encoded_by_trl(
                load_dataset("json", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache")),
                hub_tokenizers.tokenizer(kind),
                tmp_path,
                max_length=max_length,
                assistant_only_loss=assistant,
                completion_only_loss=completion,
            )
        found = ours(
            given,
            hub_tokenizers.tokenizer(kind),
            max_length=max_length,
            assistant_only_loss=assistant,
            completion_only_loss=completion,
        )
        assert labelled(found) == theirs
        assert found.masked == len(given) - len(theirs)
        assert bool(found.cut) is (max_length == short)


ASKED = [{"role": "user", "content": "What comes after 4711?"}]
CHAT = [*ASKED, {"role": "assistant", "content": "It is 4712."}]


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_no_example_begins_twice(kind: str) -> None:
    """A template that writes the first token, before a tokenizer that adds it, is tokenised once."""
    tokenizer = hub_tokenizers.tokenizer(kind)
    for record in ({"messages": CHAT}, {"text": "a"}, {"prompt": "a", "completion": "b"}):
        ids, _ = ours([record], tokenizer).example(0)
        assert list(ids).count(tokenizer.bos_token_id) == 1
        assert ids[0] == tokenizer.bos_token_id


def test_what_counts_is_what_is_to_be_said() -> None:
    tokenizer = hub_tokenizers.tokenizer("llama")
    found = ours([{"messages": CHAT * 2}], tokenizer, assistant_only_loss=True)
    ids, counted = found.example(0)
    assert tokenizer.decode([i for i, one in zip(ids, counted, strict=True) if one]) == "It is 4712.<|eot_id|>" * 2
    ids, counted = ours([{"prompt": ASKED, "completion": CHAT[1:]}], tokenizer).example(0)
    assert tokenizer.decode([i for i, one in zip(ids, counted, strict=True) if one]) == "It is 4712.<|eot_id|>"


@pytest.mark.parametrize(
    ("kind", "record", "options", "words", "hint"),
    [
        (
            "gpt2",
            {"messages": CHAT},
            {},
            "t line 1 is a chat, and the model has no chat template",
            "chat_template.jinja",
        ),
        ("qwen", {"messages": CHAT}, {"assistant_only_loss": True}, "no token is an assistant's", "{% generation %}"),
        (
            "llama",
            {"messages": ASKED},
            {"assistant_only_loss": True},
            "no turn of the role assistant, only user",
            "roles",
        ),
        ("llama", {"text": "a"}, {"assistant_only_loss": True}, "t line 1 is no chat", "completion_only_loss"),
        (
            "gemma",
            {"messages": CHAT[1:]},
            {},
            "chat template, fails on it: Roles must alternate",
            "mend that record",
        ),
        (
            "gemma",
            {"messages": [{"role": "system", "content": "x"}, *CHAT]},
            {},
            "t line 1: the model's tokenizer, or its chat template, fails on it: System role not supported",
            "mend that record",
        ),
    ],
)
def test_what_a_model_cannot_write_is_named_with_the_mend(
    kind: str, record: dict[str, Any], options: dict[str, bool], words: str, hint: str
) -> None:
    with pytest.raises(UsageError) as refused:
        ours([record], hub_tokenizers.tokenizer(kind), **options)
    assert words in refused.value.message
    assert hint in refused.value.hint


def test_a_tokenizer_that_ends_nothing_is_refused_for_texts_and_not_for_chats() -> None:
    tokenizer = hub_tokenizers.tokenizer("llama")
    tokenizer.eos_token = None
    with pytest.raises(UsageError, match="no token that ends one"):
        ours([{"text": "a"}], tokenizer)
    assert len(ours([{"messages": CHAT}], tokenizer)) == 1
    assert padding(tokenizer) == tokenizer.pad_token_id
    assert padding(hub_tokenizers.tokenizer("gpt2")) == hub_tokenizers.tokenizer("gpt2").eos_token_id


def test_where_nothing_is_to_be_learnt_no_record_is_kept_and_a_file_of_such_is_refused() -> None:
    tokenizer = hub_tokenizers.tokenizer("llama")
    nothing = {"prompt": CHAT, "completion": ASKED}
    options = {"assistant_only_loss": True}
    found = ours([nothing, {"prompt": ASKED, "completion": CHAT[1:]}], tokenizer, **options)
    assert (len(found), found.masked) == (1, 1)
    with pytest.raises(UsageError, match="no token of the 1 counts in the loss"):
        ours([nothing], tokenizer, **options)


def test_a_template_that_writes_nothing_is_named_as_such() -> None:
    tokenizer = hub_tokenizers.tokenizer("qwen")
    tokenizer.chat_template = "{# nothing #}"
    with pytest.raises(UsageError, match="makes no token of it"):
        ours([{"messages": CHAT}], tokenizer)


def packed(folder: Path, kind: str = "llama", *, vocabulary: int = 1000) -> dict[str, Packed]:
    """Return a model's folder as it is packed, but for its weights."""
    hub_tokenizers.tokenizer(kind).save_pretrained(folder)
    config = {"model_type": "qwen2", "vocab_size": vocabulary}
    files = {f"base/{path.name}": path.read_bytes() for path in folder.iterdir()}
    files |= {"base/config.json": json.dumps(config).encode(), "train.jsonl": json.dumps({"messages": CHAT}).encode()}
    return {name: Packed(data) for name, data in files.items()}


def test_at_sealing_records_are_tried_with_what_the_model_brings(tmp_path: Path) -> None:
    params = LoraParams.read({"model": "inputs:base"})
    files = packed(tmp_path)
    assert check_data(params, files) == []
    # Some releases of transformers open a file by the name that stands here, wherever it lies.
    settings = json.loads(files["base/tokenizer_config.json"].data)
    named = json.dumps(settings | {"vocab_file": "/etc/passwd", "tokenizer_file": "/etc/passwd"}).encode()
    assert check_data(params, files | {"base/tokenizer_config.json": Packed(named)}) == []
    dated = files["base/chat_template.jinja"].data + b"{{ strftime_now('%d') }}"
    [note] = check_data(params, files | {"base/chat_template.jinja": Packed(dated)})
    assert "tokens differ from day to day" in note


def test_a_token_that_the_model_has_no_embedding_for_is_refused_at_sealing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="and the model has 8 of them"):
        check_data(LoraParams.read({"model": "inputs:base"}), packed(tmp_path, vocabulary=8))


def test_records_that_were_not_tried_in_time_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_check, "_TRIED_S", -1.0)
    notes = check_data(LoraParams.read({"model": "inputs:base"}), packed(tmp_path))
    assert notes == ["train.jsonl: the last 1 records were read, and not tried with the tokenizer"]
