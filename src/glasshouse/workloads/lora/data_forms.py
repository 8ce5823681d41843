"""The records that `lora` trains on, one JSON object a line, in the forms that TRL takes; checked without a framework.

========================  ====================================================================================
``messages``              a chat: objects with ``role`` and ``content``; ``tools`` and ``chat_template_kwargs``
                          for the model's template where it takes them
``prompt, completion``    two texts, or two chats that follow each other, with the same additions
``text``                  one text
``instruction, output``   and ``input`` where there is one: two texts, in the form of `instruction_texts`
========================  ====================================================================================

Laws: a file has records of one form, that of its first; a record brings data to the model's chat template, never a
template or an option of the tokenizer's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, BinaryIO, NamedTuple, TypeAlias

from glasshouse.errors import UsageError
from glasshouse.workloads.job_keys import job_invalid

Text: TypeAlias = "str | list[dict[str, Any]]"
"""A text, or the messages of a chat."""

_MAX_LINE_BYTES = 16 << 20
_MAX_KEYS_CHARS = 200
_FORMS = (("messages",), ("prompt", "completion"), ("text",), ("instruction", "output"))
_HINT = "each line is one JSON object with " + "; or ".join(" and ".join(form) for form in _FORMS)
# What a chat template's own arguments may not be called: those of `apply_chat_template` that are not data.
_TAKEN = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages",
        "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs",
        "tools", "truncation",
    }
)  # fmt: skip
_NOT_TEXT = ("audio", "audios", "image", "images", "videos")
_ELSEWHERE = {
    "conversations": "rename `conversations` to `messages`, `from` to `role` and `value` to `content`",
    "chosen": "preferences are not what this workload trains on; `prompt` and `completion` are",
    "input_ids": "tokens are made in the run, by the model's own tokenizer: give `text` or `messages`",
}


class Record(NamedTuple):
    """What one example says."""

    prompt: Text | None  # None where nothing is asked: a text, or a whole chat
    completion: Text
    tools: list[Any] | None = None
    template: Mapping[str, Any] = {}  # further arguments of the chat template

    @property
    def is_chat(self) -> bool:
        """Whether the model's chat template writes it out."""
        return not isinstance(self.completion, str)


def lines_of(stream: BinaryIO) -> Iterator[bytes]:
    """Yield a file's lines; of one that is longer than any record, pieces: the first of them is refused."""
    return iter(partial(stream.readline, _MAX_LINE_BYTES + 1), b"")


def records(lines: Iterable[bytes], name: str) -> Iterator[tuple[str, Record]]:
    """Yield each record and where it stands, such as ``train.jsonl line 3``; blank lines are passed over.

    Raises:
        UsageError: `job-invalid`, naming the line, or that there is none.
    """
    first = None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{name} line {number}"
        values = _object(line, where)
        forms = [form for form in _FORMS if all(key in values for key in form)]
        if len(forms) > 1:
            both = "; ".join(" and ".join(form) for form in forms)
            raise job_invalid(
                f"{where} fits more than one form: {both}", hint="take out the keys that are not to be trained on"
            )
        first = first or (forms[0] if forms else None)
        if forms != [first]:
            raise _without_form(values, where, first)
        if named := [key for key in _NOT_TEXT if key in values]:
            raise job_invalid(f"{where} has {named[0]!r}: only text is trained on")
        yield where, _record(forms[0], values, where)
    if first is None:
        raise job_invalid(f"{name} has no usable record: it is empty", hint=_HINT)


def instruction_texts(instruction: str, given: str, output: str) -> tuple[str, str]:
    """Return the prompt and the completion of the instruction form."""
    middle = f"### Input:\n{given}\n\n" if given else ""
    return f"### Instruction:\n{instruction}\n\n{middle}### Response:\n", output


def _object(line: bytes, where: str) -> dict[str, Any]:
    if len(line) > _MAX_LINE_BYTES:
        raise job_invalid(f"{where} is longer than {_MAX_LINE_BYTES} bytes", hint=_HINT)
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise job_invalid(f"{where} is not a JSON object", hint=_HINT)
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise job_invalid(f"{where} holds half a character (a lone surrogate)") from None
    return values


def _without_form(values: Mapping[str, Any], where: str, first: tuple[str, ...] | None) -> UsageError:
    keys = ", ".join(sorted(values))[:_MAX_KEYS_CHARS] or "nothing"
    if first is None:
        known = next((hint for key, hint in _ELSEWHERE.items() if key in values), _HINT)
        return job_invalid(f"{where} has none of the forms of a record, only: {keys}", hint=known)
    missing = ", ".join(repr(key) for key in first if key not in values)
    return job_invalid(
        f"{where} has no {missing}, only: {keys}" if missing else f"{where} is of another form than the first: {keys}",
        hint=f"the first record has {' and '.join(first)}; a file has records of one form",
    )


def _record(form: tuple[str, ...], values: Mapping[str, Any], where: str) -> Record:
    if form[0] == "instruction":
        parts = [values["instruction"], values.get("input", ""), values["output"]]
        if not all(isinstance(part, str) for part in parts) or not parts[0] or not parts[2]:
            raise job_invalid(f"{where} needs the texts instruction and output, and may have input", hint=_HINT)
        return Record(*instruction_texts(*parts))
    found = [_text(values[key], f"{where}: {key}", chat=form[0] != "text") for key in form]
    if len(found) == 2 and isinstance(found[0], str) != isinstance(found[1], str):
        raise job_invalid(f"{where}: prompt and completion are two texts or two lists of messages, not one of each")
    if form[0] == "messages" and isinstance(found[0], str):
        raise job_invalid(f"{where}: messages must be a list of objects with role and content, and is a text")
    prompt, completion = found if len(found) == 2 else (None, found[0])
    tools, template = values.get("tools"), values.get("chat_template_kwargs") or {}
    if isinstance(tools, str):  # as data sets carry them
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise job_invalid(f"{where}: tools is a text that is not JSON") from None
    if not (tools is None or isinstance(tools, list)) or not isinstance(template, dict):
        raise job_invalid(f"{where}: tools must be a list, and chat_template_kwargs an object")
    if taken := sorted(_TAKEN & template.keys()):
        raise job_invalid(f"{where}: chat_template_kwargs may not have {taken[0]!r}: it is no data of a template's")
    return Record(prompt, completion, tools, template)


def _text(value: Any, where: str, *, chat: bool) -> Text:
    if isinstance(value, str):
        return value
    if chat and isinstance(value, list) and value:
        for number, message in enumerate(value):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise job_invalid(f"{where}[{number}] must be an object with role and content")
            content = message.get("content")
            if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
                raise job_invalid(f"{where}[{number}].content must be text; images and other parts are not trained on")
        return value
    raise job_invalid(f"{where} must be {'a text, or a list of messages that is not empty' if chat else 'a text'}")
