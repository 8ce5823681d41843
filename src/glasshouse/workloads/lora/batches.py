"""Examples as batches of tensors: padded, or packed into rows in which no example sees another."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import DataCollatorWithFlattening

from glasshouse.workloads.lora.encoding import Examples

_IGNORED = -100  # the label that the loss passes over

Row = list[dict[str, list[int]]]
"""Examples that share a row, each with its `input_ids` and `labels`."""


class Rows(Dataset[Row]):  # type: ignore[misc]  # torch is not typed here
    """Some examples, as rows.

    Args:
        chosen: the numbers of the examples in each row.
    """

    def __init__(self, examples: Examples, chosen: Sequence[Sequence[int]]) -> None:
        self._examples, self._chosen = examples, chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> Row:
        return [self._example(number) for number in self._chosen[index]]

    def _example(self, number: int) -> dict[str, list[int]]:
        ids, counted = self._examples.example(number)
        labels = [token if counts else _IGNORED for token, counts in zip(ids, counted, strict=True)]
        return {"input_ids": ids.tolist(), "labels": labels}


def packed(lengths: Sequence[int], numbers: Sequence[int], room: int) -> list[list[int]]:
    """Return rows of examples whose lengths add up to at most `room`: the longest first, each where it fits best.

    Source: TRL's `packing_strategy="bfd"` (best fit, decreasing).
    """
    rows: list[list[int]] = []
    left: list[tuple[int, int]] = []  # the room in each row that has any, and its number, ascending
    for number in sorted(numbers, key=lambda one: -lengths[one]):
        at = bisect_left(left, (lengths[number], -1))
        if at == len(left):
            rows.append([])
            space, row = room, len(rows) - 1
        else:
            space, row = left.pop(at)
        rows[row].append(number)
        if space > lengths[number]:
            insort(left, (space - lengths[number], row))
    return rows


def collator(pad_id: int, *, packing: bool) -> Callable[[Sequence[Row]], dict[str, Any]]:
    """Return what makes a batch of rows: of shape (1, tokens) where they are packed, else (examples, longest)."""
    if packing:
        flatten = DataCollatorWithFlattening()
        return lambda rows: flatten([example for row in rows for example in row])

    def pad(rows: Sequence[Row]) -> dict[str, Any]:
        examples = [example for row in rows for example in row]
        longest = max(len(example["input_ids"]) for example in examples)

        def padded(name: str, filling: int) -> torch.Tensor:
            return torch.tensor([one[name] + [filling] * (longest - len(one[name])) for one in examples])

        mask = [[1] * len(one["input_ids"]) + [0] * (longest - len(one["input_ids"])) for one in examples]
        return {
            "input_ids": padded("input_ids", pad_id),
            "labels": padded("labels", _IGNORED),
            "attention_mask": torch.tensor(mask),
        }

    return pad


def leaks(model: Any) -> bool:
    """Return whether an example's logits depend on the one that is packed before it, as they do in some models."""
    collate = collator(0, packing=True)
    found = []
    model.eval()
    for first in ([1, 2, 3], [3, 3, 3]):
        rows = [[{"input_ids": ids, "labels": ids} for ids in (first, [2, 1, 3, 1])]]
        batch = {name: tensor.to(model.device) for name, tensor in collate(rows).items() if name != "labels"}
        with torch.no_grad():
            found.append(model(**batch, use_cache=False).logits[0, len(first) :])
    one, other = found
    # Models that are packed for differ by rounding, up to 0.02 of the largest (experts, 8 bits); leaks by half of it.
    return not bool((one - other).abs().max() <= 0.1 * one.abs().max())
