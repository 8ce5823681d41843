"""From records to token ids, and which of them count in the loss: as TRL's SFTTrainer, but for what is refused.

Source: trl 1.16, `SFTTrainer._prepare_dataset`, which is what the tests compare with.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any, Protocol

from glasshouse.errors import UsageError
from glasshouse.workloads.job_keys import job_invalid
from glasshouse.workloads.lora.data_forms import Record, Text
from glasshouse.workloads.lora.lora_params import LoraParams

_NO_TEMPLATE = "put one beside the model as chat_template.jinja, or give texts as prompt and completion"
_NO_FILES = "pack a model that has one (inputs:FOLDER), or give texts as prompt and completion"
_NO_CHAT = "completion_only_loss, which is on unless you turn it off, leaves the prompt out of the loss"
_MARKERS = (
    "mark the assistant's turns in the model's chat_template.jinja with {% generation %} … {% endgeneration %}, or set "
    "assistant_only_loss = false"
)


class Tokenizer(Protocol):
    """What is asked of a tokenizer; those of transformers have it."""

    eos_token: str | None
    eos_token_id: int | None
    pad_token_id: int | None
    chat_template: Any

    def __call__(self, text: str) -> Any:
        """Return the ``input_ids`` of a text, with the special tokens that the model begins and ends with."""
        ...

    def apply_chat_template(self, messages: list[dict[str, Any]], /, **options: Any) -> Any:
        """Return the ``input_ids`` of a chat, and ``assistant_masks`` where they are asked for."""
        ...


class ByteTokenizer:
    """The tokenizer of `config:` models: 0 pads, 1 ends, byte b of the text's UTF-8 is b + 2."""

    eos_token: str | None = "</s>"  # noqa: S105 - as a text
    eos_token_id: int | None = 1
    pad_token_id: int | None = 0
    chat_template: Any = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        content = text.removesuffix("</s>")
        return {"input_ids": [byte + 2 for byte in content.encode("utf-8")] + [1] * (content != text)}

    def apply_chat_template(self, _messages: list[dict[str, Any]], /, **_options: Any) -> Any:
        """Refuse: raises ValueError."""
        raise ValueError("the built-in architectures have no chat template")


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """Turns records into tokens, by a model's own tokenizer."""

    tokenizer: Tokenizer
    completion_only_loss: bool
    assistant_only_loss: bool

    def encode(self, record: Record, where: str) -> tuple[list[int], list[bool]]:
        """Return the ids of a record, and which of them count in the loss.

        Raises:
            UsageError: `job-invalid`, naming `where`: the template or the tokenizer refuses it, or it has no turn of
                an assistant's where only those count.
        """
        if self.assistant_only_loss and not record.is_chat:
            raise job_invalid(f"{where} is no chat, and assistant_only_loss is set", hint=_NO_CHAT)
        if not record.is_chat and self.tokenizer.eos_token is None:
            raise job_invalid(
                f"{where} is a text, and the model's tokenizer has no token that ends one",
                hint="name one as eos_token in the model's tokenizer_config.json",
            )
        try:
            ids, counted = self._encoded(record, where)
        except (KeyboardInterrupt, MemoryError, UsageError):
            raise
        except BaseException as error:  # a panic of the tokenizer's parser is no Exception; a template raises anything
            reason = (str(error) or type(error).__name__).splitlines()[0]
            if record.is_chat and not self.tokenizer.chat_template:
                hint = _NO_TEMPLATE if not isinstance(self.tokenizer, ByteTokenizer) else _NO_FILES
                raise job_invalid(f"{where} is a chat, and the model has no chat template", hint=hint) from None
            what = "tokenizer, or its chat template," if record.is_chat else "tokenizer"
            raise job_invalid(
                f"{where}: the model's {what} fails on it: {reason}",
                hint="mend that record, or take it out; where it is every record, look at the model's files",
            ) from None
        if not ids:
            raise job_invalid(f"{where}: the model's tokenizer makes no token of it")
        return ids, counted

    def _encoded(self, record: Record, where: str) -> tuple[list[int], list[bool]]:
        completion, prompt = record.completion, record.prompt
        if isinstance(completion, str):
            end = self.tokenizer.eos_token or ""
            completion = completion if completion.endswith(end) else completion + end
        whole: Any = completion if prompt is None else prompt + completion  # type: ignore[operator]  # both of a kind
        masks = self.assistant_only_loss and record.is_chat
        encoded = self._tokens(record, whole, **({"return_assistant_tokens_mask": True} if masks else {}))
        ids = list(encoded["input_ids"])
        counted = [bool(one) for one in encoded["assistant_masks"]] if masks else [True] * len(ids)
        if masks and not any(counted):
            roles = {str(message.get("role")) for message in whole}
            if "assistant" not in roles:
                raise job_invalid(
                    f"{where} has no turn of the role assistant, only {', '.join(sorted(roles))}, and "
                    "assistant_only_loss is set",
                    hint="take the record out, or call its roles as the model's template does",
                )
            raise job_invalid(f"{where}: assistant_only_loss is set, and no token is an assistant's", hint=_MARKERS)
        if prompt is not None and self.completion_only_loss:
            # Where the two part is where the completion begins: a template may write a prompt otherwise when it ends
            # there, and tokens may merge over the boundary.
            asked = self._tokens(record, prompt, **({"add_generation_prompt": True} if record.is_chat else {}))
            pairs = zip(asked["input_ids"], ids, strict=False)
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            counted[:shared] = [False] * shared
        return ids, counted

    def _tokens(self, record: Record, text: Text, **options: Any) -> Any:
        """Tokenise once: what a template wrote and is tokenised again would have its first token twice."""
        if isinstance(text, str):
            return self.tokenizer(text)
        # Given in words of TRL's: the template's own arguments, then what is asked of it.
        return self.tokenizer.apply_chat_template(
            text, tokenize=True, return_dict=True, tools=record.tools, **record.template, **options
        )


@dataclass(kw_only=True, slots=True)
class Examples:
    """Encoded records behind each other: five bytes a token, however large the text was.

    Attributes:
        cut: records that were longer than `max_length`.
        masked: records that are left out, because none of their tokens would count in the loss.
        untried: records of which only the form was looked at.
    """

    ids: array[int] = field(default_factory=lambda: array("i"))
    counted: bytearray = field(default_factory=bytearray)  # 1 for each of `ids` that counts in the loss
    ends: array[int] = field(default_factory=lambda: array("q"))  # of each example, in `ids`
    cut: int = 0
    masked: int = 0
    untried: int = 0

    def __len__(self) -> int:
        return len(self.ends)

    def __str__(self) -> str:
        """Return what a log says of them."""
        return (
            f"{len(self):,} examples of {len(self.ids):,} tokens, {sum(self.counted):,} of which count in the loss; "
            f"{self.cut:,} cut at max_length, {self.masked:,} skipped"
        )

    @property
    def longest(self) -> int:
        """How many tokens the longest has."""
        return max((end - start for start, end in pairwise([0, *self.ends])), default=0)

    def example(self, index: int) -> tuple[array[int], bytearray]:
        """Return the ids of an example, and a 1 for each that counts in the loss."""
        start = self.ends[index - 1] if index else 0
        return self.ids[start : self.ends[index]], self.counted[start : self.ends[index]]


def encode_records(
    records: Iterable[tuple[str, Record]],
    name: str,
    tokenizer: Tokenizer,
    params: LoraParams,
    *,
    within_s: float = math.inf,
) -> Examples:
    """Encode the records of an input.

    Args:
        records: with where each stands, as `read_records` yields them.
        name: the input's.
        within_s: when to leave it at the form of further ones.

    Raises:
        UsageError: `job-invalid`: as `Encoder.encode`, or why no record is left to train on.
    """
    encoder = Encoder(
        tokenizer=tokenizer,
        completion_only_loss=params.completion_only_loss,
        assistant_only_loss=params.assistant_only_loss,
    )
    examples, shortest, deadline_s = Examples(), 0, time.monotonic() + within_s
    for where, record in records:
        if time.monotonic() > deadline_s:
            examples.untried += 1
            continue
        ids, counted = encoder.encode(record, where)
        examples.cut += len(ids) > params.max_length
        if True in counted[1 : params.max_length]:  # nothing stands before the first to predict it
            examples.ids.extend(ids[: params.max_length])
            examples.counted.extend(counted[: params.max_length])
            examples.ends.append(len(examples.ids))
        else:
            examples.masked += 1
            if True in counted[1:]:
                shortest = min(counted.index(True, 1), shortest or len(counted))
    if not len(examples) and not examples.untried:
        if not shortest:
            raise job_invalid(
                f"{name} has no usable record: no token of the {examples.masked} counts in the loss",
                hint="of a record, what comes after its prompt counts, or what the assistant says in it",
            )
        raise job_invalid(
            f"{name} has no usable record: all are too long ({examples.masked} of them); max_length is "
            f"{params.max_length} tokens, and the shortest has {shortest} before the first that counts in the loss",
            hint=f"raise max_length in [params] beyond {shortest}, with room for what is to be learnt",
        )
    return examples


def check_ids(examples: Examples, known: int, name: str) -> None:
    """Refuse tokens of a file's records that a model, with `known` embeddings, has none for; raises `UsageError`."""
    most = max(examples.ids, default=0)
    if most >= known:
        raise job_invalid(
            f"the tokenizer gives the token {most} to a record of {name}, and the model has {known} of them",
            hint="pack the tokenizer that belongs to the model, or a model whose embeddings were resized for it",
        )


def check_lengths(examples: Examples, config: Mapping[str, Any], name: str) -> None:
    """Refuse examples of an input that are longer than a model, by its (text's) configuration, has positions."""
    known = config.get("max_position_embeddings", config.get("n_positions"))
    if type(known) is int and examples.longest > known:
        raise job_invalid(
            f"{name} has an example of {examples.longest} tokens, and the model has {known} positions",
            hint=f"set max_length = {known} or less in [params]: longer records are cut there",
        )


def padding(tokenizer: Tokenizer) -> int:
    """Return the id that fills up a batch; neither attention nor loss sees it."""
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(one for one in known if one is not None)
