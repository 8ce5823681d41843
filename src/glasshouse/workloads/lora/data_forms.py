"""The records that `lora` trains on, in the forms that TRL takes; checked without a framework.

========================  ====================================================================================
``messages``              a chat: objects with ``role`` and ``content``; ``tools`` and ``chat_template_kwargs``
                          for the model's template where it takes them
``prompt, completion``    two texts, or two chats that follow each other, with the same additions
``text``                  one text
``instruction, output``   and ``input`` where there is one: two texts, in the form of `instruction_texts`
========================  ====================================================================================

A file has one JSON object a line, or is a table (Parquet, or a folder that `datasets` saved) with one record a row.

Laws: an input has records of one form, that of its first; a record brings data to the model's chat template, never a
template or an option of the tokenizer's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, BinaryIO, NamedTuple, TypeAlias

from glasshouse.errors import Code, RunError, UsageError
from glasshouse.workloads.job_keys import job_invalid
from glasshouse.workloads.requirements import lacking

Text: TypeAlias = "str | list[dict[str, Any]]"
"""A text, or the messages of a chat."""

_PYARROW, _OTHERWISE = "pyarrow>=19", "write the records as JSON, one object a line"
_TABLES = (".parquet", ".arrow")
_PART = re.compile(r"(?P<set>.*?)[-_.]?[0-9]*(-of-(?P<of>[0-9]{1,9}))?(?P<kind>\.jsonl|\.parquet|\.arrow)")

_MAX_LINE_BYTES = 16 << 20
_MOST_NAMED = 5
_MAX_KEYS_CHARS = 200
_FORMS = (("messages",), ("prompt", "completion"), ("text",), ("instruction", "output"))
_COLUMNS = frozenset(key for form in _FORMS for key in form) | {"input", "tools", "chat_template_kwargs"}
_HINT = "each line is one JSON object, or each row of a table one record, with " + "; or ".join(
    " and ".join(form) for form in _FORMS
)
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


def read_records(open_file: Callable[[str], BinaryIO], names: Iterable[str], data: str) -> Iterator[tuple[str, Record]]:
    """Yield each record of an input and where it stands, such as ``train.jsonl line 3``.

    Raises:
        RunError: `requirement-missing`: what the input is read with is not installed.
        UsageError: as `data_files` and `records`.
    """
    names = list(names)
    if missing := lacking(needed(names, data)):
        raise RunError(
            Code.REQUIREMENT_MISSING,
            f"this machine lacks what {data} is read with: " + "; ".join(missing),
            hint=f"choose an image that has it, or {_OTHERWISE} and seal the job again",
        )

    def each() -> Iterator[tuple[str, dict[str, Any]]]:
        for name in data_files(names, data):
            with open_file(name) as stream:
                if not name.endswith(_TABLES):
                    yield from json_lines(stream, name)
                    continue
                from glasshouse.workloads.lora import tables  # which loads pyarrow

                yield from tables.rows(stream, name, _COLUMNS)

    return records(each(), data)


def data_files(names: Iterable[str], data: str) -> list[str]:
    """Return the files that an input of records stands for, in order: itself, or the parts of one set in a folder.

    ``chats`` is what `datasets` saved there, or the one set whose parts lie there; ``chats/train`` is that folder, or
    the parts ``chats/train-00000-of-00002.parquet`` and so on.

    Raises:
        UsageError: `file-missing` where there is none, or a part is missing; `job-invalid` for several sets.
    """
    names = sorted(names)
    if data in names:
        return [data]
    data = data.rstrip("/")
    # What `datasets` has derived from a saved folder lies beside its parts.
    parts = [(name, found) for name in names if (found := _PART.fullmatch(name)) and "/cache-" not in name]
    chosen = [one for one in parts if one[1]["set"] == data] or [
        one for one in parts if one[0].rpartition("/")[0] == data
    ]
    sets = {found["set"] + found["kind"] for _, found in chosen}
    if len(sets) > 1:
        raise job_invalid(
            f"{data!r} has more than one set of records: {_some(sets)}",
            hint=f"name one of them, such as {min(found['set'] for _, found in chosen)!r}",
        )
    if not chosen:
        inside = {name.rpartition("/")[0] for name, _ in parts if name.startswith(f"{data}/")}
        raise UsageError(
            Code.FILE_MISSING,
            f"[params] names the records {data!r}, a folder of several"
            if inside
            else f"[params] names the records {data!r}, which are not among the [inputs]: "
            + _some([name for name, _ in parts] or names),
            hint=f"name one of its folders: {_some(inside)}" if inside else "add it to [inputs], or name one of those",
        )
    of = {int(found["of"] or len(chosen)) for _, found in chosen}
    if of != {len(chosen)}:
        raise UsageError(Code.FILE_MISSING, f"{data!r} has {len(chosen)} of its {max(of)} parts")
    return [name for name, _ in chosen]


def needed(names: Iterable[str], data: str) -> dict[str, str]:
    """Return what reading an input requires, and what would do instead; raises as `data_files`."""
    tables = any(name.endswith(_TABLES) for name in data_files(names, data))
    return {_PYARROW: _OTHERWISE} if tables else {}


def json_lines(stream: BinaryIO, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the object on each line of a file that is not blank, and where it stands; raises `UsageError`."""
    # Of a line that is longer than any record, pieces are read: the first of them is refused.
    for number, line in enumerate(iter(partial(stream.readline, _MAX_LINE_BYTES + 1), b""), start=1):
        if line.strip():
            where = f"{name} line {number}"
            yield where, _object(line, where)


def records(objects: Iterable[tuple[str, dict[str, Any]]], name: str) -> Iterator[tuple[str, Record]]:
    """Yield the record that each object is, and where it stands.

    Raises:
        UsageError: `job-invalid`, naming the place, or that there is none.
    """
    first = None
    for where, values in objects:
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise job_invalid(f"{where} holds half a character (a lone surrogate)") from None
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
    return values


def _some(names: Iterable[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:_MOST_NAMED]) + (" ..." if len(shown) > _MOST_NAMED else "")


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


def _kind(value: Any) -> str:
    return (
        "null"
        if value is None
        else "a list of parts, not their text"
        if isinstance(value, list)
        else f"a {type(value).__name__}"
    )


def _text(value: Any, where: str, *, chat: bool) -> Text:
    if isinstance(value, str):
        return value
    if chat and isinstance(value, list) and value:
        for number, message in enumerate(value):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise job_invalid(f"{where}[{number}] must be an object with role and content")
            content = message.get("content")
            if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
                raise job_invalid(f"{where}[{number}].content must be text, and is {_kind(content)}")
        return value
    raise job_invalid(f"{where} must be {'a text, or a list of messages that is not empty' if chat else 'a text'}")
