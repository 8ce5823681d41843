"""Adapters on published models have as many parameters as their dimensions give, by arithmetic without a framework."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from glasshouse.workloads.builtin import training
from glasshouse.workloads.lora.lora_params import LoraParams

# peft still calls what transformers has renamed; and turns a setting of GPT-2's kind of layer by itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),
]

# Of each model's own config.json, as published.
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3-8B": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "Gemma-2-2B": {
        "model_type": "gemma2",
        "vocab_size": 256_000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
    },
    "Gemma-2-9B": {
        "model_type": "gemma2",
        "vocab_size": 256_000,
        "hidden_size": 3584,
        "intermediate_size": 14_336,
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
    },
    "GPT-2": {
        "model_type": "gpt2",
        "vocab_size": 50_257,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
    },
}


def on_meta(name: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[name]), dtype=torch.bfloat16)


def widths(of: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield what goes into each linear layer of one block, and what comes out."""
    if of["model_type"] == "gpt2":
        hidden = of["n_embd"]
        yield from [(hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden)]
        return
    hidden, inner = of["hidden_size"], of["intermediate_size"]
    head = of.get("head_dim", hidden // of["num_attention_heads"])
    queries, keys = of["num_attention_heads"] * head, of["num_key_value_heads"] * head
    yield from [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    yield from [(hidden, inner), (hidden, inner), (inner, hidden)]


def trainable(name: str, **params: Any) -> int:
    from glasshouse.workloads.lora import models

    found = LoraParams.read({"model": f"inputs:{name}", **params})
    return training.trainable(models.attach(on_meta(name), found))


@pytest.mark.parametrize(
    ("name", "rank", "published"),
    [("Llama-3-8B", 16, 41_943_040), ("Gemma-2-2B", 4, None), ("Gemma-2-9B", 16, None), ("GPT-2", 8, None)],
)
def test_all_linear_layers_get_an_adapter(name: str, rank: int, published: int | None) -> None:
    of = MODELS[name]
    blocks = of.get("num_hidden_layers", of.get("n_layer"))
    expected = blocks * sum(rank * (inputs + outputs) for inputs, outputs in widths(of))
    assert trainable(name, target_modules="all-linear", r=rank) == expected
    assert published in (None, expected)


def test_layers_by_name_have_the_numbers_that_peft_publishes() -> None:
    assert trainable("GPT-2", target_modules=["c_attn"], r=8) == 294_912
    assert trainable("Llama-3-8B", r=8) == 3_407_872
