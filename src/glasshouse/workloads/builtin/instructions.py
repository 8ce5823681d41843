"""From instruction records to token ids.

A record is one JSON object a line: ``instruction``, optional ``input``, ``output``. It becomes

    ### Instruction:\\n{instruction}\\n\\n### Input:\\n{input}\\n\\n### Response:\\n{output}<end>

without the Input part where there is none. Only the tokens of output and end count in the loss,
unless the job has ``answers_only = false``.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, Protocol

from glasshouse.workloads.job_keys import job_invalid

_MAX_LINE_BYTES = 16 << 20
_MAX_KEYS_CHARS = 200
_FORM = 'each line is one JSON object: {"instruction": "...", "output": "..."}, with "input" where there is one'


class Tokenizer(Protocol):
    """Text to ids, without special tokens of its own."""

    pad_id: int
    end_id: int

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ...


class ByteTokenizer(Tokenizer):
    """The tokenizer of `config:` models: 0 pads, 1 ends, byte b of the text's UTF-8 is b + 2."""

    pad_id = 0
    end_id = 1

    def encode(self, text: str) -> list[int]:
        return [byte + 2 for byte in text.encode("utf-8")]


class HubTokenizer(Tokenizer):
    """A tokenizer that came with its model."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        if tokenizer.eos_token_id is None:
            raise job_invalid("the model's tokenizer has no token that ends a text")
        self.end_id = int(tokenizer.eos_token_id)
        if not self.encode("".join(map(chr, range(33, 127)))):  # every printable character, and it has none
            raise job_invalid("the model's tokenizer has no vocabulary: is tokenizer.json missing?")
        self.pad_id = self.end_id if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)

    def encode(self, text: str) -> list[int]:
        return [int(i) for i in self._tokenizer(text, add_special_tokens=False)["input_ids"]]


@dataclass(kw_only=True, slots=True)
class Examples:
    """Token ids of many examples behind each other: four bytes a token, however large the text was."""

    ids: array[int] = field(default_factory=lambda: array("i"))
    ends: array[int] = field(default_factory=lambda: array("q"))  # of each example, in `ids`
    answers: array[int] = field(default_factory=lambda: array("q"))  # where each one's answer begins in `ids`
    skipped: int = 0  # records whose answer did not fit

    def __len__(self) -> int:
        return len(self.ends)

    def example(self, index: int) -> tuple[array[int], int]:
        """Return the ids of an example, and how many of them are its prompt."""
        start = self.ends[index - 1] if index else 0
        return self.ids[start : self.ends[index]], self.answers[index] - start


def lines_of(stream: BinaryIO) -> Iterator[bytes]:
    """Yield a file's lines; of one that is longer than any record, pieces: the first of them is refused."""
    return iter(partial(stream.readline, _MAX_LINE_BYTES + 1), b"")


def encode_records(lines: Iterable[bytes], tokenizer: Tokenizer, *, max_length: int, name: str) -> Examples:
    """Return records as token ids; raises as `check_records`."""
    found = Examples()

    def take(prompt: list[int], answer: str) -> None:
        found.answers.append(len(found.ids) + len(prompt))
        found.ids.extend((prompt + tokenizer.encode(answer) + [tokenizer.end_id])[:max_length])
        found.ends.append(len(found.ids))

    found.skipped = check_records(lines, tokenizer.encode, max_length=max_length, name=name, take=take)
    return found


def check_records(
    lines: Iterable[bytes],
    encode: Callable[[str], list[int]] | None,
    *,
    max_length: int,
    name: str,
    take: Callable[[list[int], str], None] = lambda _prompt, _answer: None,
) -> int:
    """Check every record's form (blank lines are passed over), and that one at least is short enough to train on.

    Args:
        encode: turns text into tokens as the run will, or raises ValueError; None leaves lengths unchecked.
        take: gets the prompt's tokens and the answer of each record that is short enough.

    Returns:
        How many records are passed over, because no token of their answer would be left.

    Raises:
        UsageError: `job-invalid`, naming the line, or why no record is left to train on.
    """
    records = skipped = shortest = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{name} line {number}"
        prompt, answer = _texts(line, where)
        records += 1
        if encode is None:
            continue
        try:
            ids = encode(prompt)
        except ValueError as error:
            raise job_invalid(
                f"{where}: the model's tokenizer gives up on it: {error}", hint="take that record out"
            ) from None
        if len(ids) < max_length:
            take(ids, answer)
        else:
            skipped += 1
            shortest = min(len(ids), shortest or len(ids))
    if not records:
        raise job_invalid(f"{name} has no usable record: it is empty", hint=_FORM)
    if skipped == records:
        raise job_invalid(
            f"{name} has no usable record: all are too long ({skipped} of them); max_length is {max_length} "
            f"tokens, and the shortest has {shortest} before its answer begins",
            hint=f"raise max_length in [params] beyond {shortest}, with room for the answer",
        )
    return skipped


def _texts(line: bytes, where: str) -> tuple[str, str]:
    if len(line) > _MAX_LINE_BYTES:
        raise job_invalid(f"{where} is longer than {_MAX_LINE_BYTES} bytes", hint=_FORM)
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise job_invalid(f"{where} is not a JSON object", hint=_FORM)
    for key in ("instruction", "output"):
        if key not in record:
            keys = ", ".join(sorted(record))[:_MAX_KEYS_CHARS]
            raise job_invalid(f"{where} has no {key!r}, only: {keys or 'nothing'}", hint=_FORM)
    parts = {key: record.get(key, "") for key in ("instruction", "input", "output")}
    if not all(isinstance(part, str) for part in parts.values()) or not parts["instruction"] or not parts["output"]:
        raise job_invalid(f"{where} needs the texts instruction and output, and may have input", hint=_FORM)
    if any("\ud800" <= sign <= "\udfff" for part in parts.values() for sign in part):
        raise job_invalid(f"{where} holds half a character (a lone surrogate)")
    middle = f"### Input:\n{parts['input']}\n\n" if parts["input"] else ""
    return f"### Instruction:\n{parts['instruction']}\n\n{middle}### Response:\n", parts["output"]
