"""What TRL's SFTTrainer makes of a data set, as a list that `lora`'s own examples are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glasshouse.workloads.lora.encoding import Examples

__all__ = ["Rows", "encoded_by_trl", "labelled"]

Rows = list[tuple[list[int], list[int]]]
"""Ids and labels of each example."""


def encoded_by_trl(
    data: Any, tokenizer: Any, folder: Path, *, completion_only_loss: bool = True, **options: Any
) -> Rows:
    """Return the examples that TRL would train on, of a data set of `datasets`; `options` are those of `SFTConfig`."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from trl import SFTConfig, SFTTrainer

    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer) + 8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
    )
    asked = {"completion_only_loss": completion_only_loss} if "prompt" in data.column_names else {}
    config = SFTConfig(output_dir=str(folder), report_to="none", use_cpu=True, bf16=False, **asked, **options)
    trainer = SFTTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer)
    return [(list(row["input_ids"]), list(row["labels"])) for row in trainer.train_dataset]


def labelled(examples: Examples) -> Rows:
    """Return examples of ours in that form."""
    rows = (examples.example(index) for index in range(len(examples)))
    return [(list(ids), [i if one else -100 for i, one in zip(ids, counted, strict=True)]) for ids, counted in rows]
