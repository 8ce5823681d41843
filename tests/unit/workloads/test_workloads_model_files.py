"""What sealing finds in a model's files is what the run finds in the model: layers by name, and positions."""

from __future__ import annotations

import json
import struct
import warnings
from functools import cache
from typing import Any

import pytest
import torch

from glasshouse.errors import UsageError
from glasshouse.workloads.lora.data_check import check_data
from glasshouse.workloads.lora.lora_params import LoraParams
from glasshouse.workloads.lora.model_files import LINEAR, check_model
from simulators import hub_tokenizers
from tools.plain_files import Packed

SIZES = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SHARED = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 4}
KINDS = {
    "gpt2": {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 32},
    "llama": SHARED | {"num_key_value_heads": 1},
    "gemma2": SHARED | {"num_key_value_heads": 1},  # whose output shares the embedding's weights, as GPT-2's does
}


@cache
def made(kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **KINDS[kind]))


def files(kind: str) -> dict[str, Packed]:
    """Return a model as it is packed: its configuration, and weights in safetensors."""
    header, at = {}, 0
    for name, tensor in made(kind).named_parameters():  # what is shared stands there once
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + 4 * tensor.numel()]}
        at += 4 * tensor.numel()
    text = json.dumps(header).encode()
    config = json.dumps({"model_type": kind, **SIZES, **KINDS[kind]}).encode()
    weights = struct.pack("<Q", len(text)) + text + bytes(at)
    return {"base/config.json": Packed(config), "base/model.safetensors": Packed(weights)}


def attached(kind: str, targets: list[str] | str) -> bool:
    """Return whether the run, too, finds layers of these names."""
    from glasshouse.workloads.lora import models

    params = LoraParams.read({"model": "inputs:base", "target_modules": targets})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft's, of weights that are shared and layers that lie the other way
            models.attach(made(kind), params)
    except UsageError:
        return False
    finally:
        made.cache_clear()  # which has an adapter now
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_sealing_takes_the_targets_that_the_run_takes(kind: str) -> None:
    """Layers of GPT-2's own kind and embeddings among them; a norm, a block or a name that is not there is none."""
    modules = {name.rpartition(".")[2] for name, _ in made(kind).named_modules() if name}
    packed, taken = files(kind), set()
    for name in modules - {"0"} | {"no_such_proj"}:
        try:
            check_model("inputs:base", (name,), packed)
            taken.add(name)
        except UsageError:
            pass
        assert (name in taken) == attached(kind, [name]), name
    names = {"c_attn", "c_fc", "c_proj", "lm_head", "wpe", "wte"} if kind == "gpt2" else {"embed_tokens", *LINEAR}
    assert taken == names
    assert check_model("inputs:base", "all-linear", packed) == []
    assert attached(kind, "all-linear")


def test_of_all_linear_layers_there_has_to_be_one() -> None:
    header = json.dumps({"norm.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    packed = files("llama") | {
        "base/model.safetensors": Packed(struct.pack("<Q", len(header)) + header + bytes(8)),
    }
    with pytest.raises(UsageError, match="has no linear layers"):
        check_model("inputs:base", "all-linear", packed)


def tried(config: dict[str, Any] | None, text: str, **params: Any) -> list[str]:
    """Check one record against a model of a configuration; None for a built-in one."""
    packed = {"train.jsonl": Packed(json.dumps({"text": text}).encode())}
    if config is not None:
        tokenizer = hub_tokenizers.tokenizer("gpt2").backend_tokenizer.to_str().encode()
        settings = b'{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}'
        packed |= {
            "base/config.json": Packed(json.dumps(config).encode()),
            "base/tokenizer.json": Packed(tokenizer),
            "base/tokenizer_config.json": Packed(settings),
        }
    model = "config:qwen2-tiny" if config is None else "inputs:base"
    return check_data(LoraParams.read({"model": model, "max_length": 1 << 16, **params}), packed)


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        (None, 4096),
        ({"model_type": "gpt2", "n_positions": 32}, 32),
        ({"model_type": "granite", "max_position_embeddings": 64}, 64),
        ({"model_type": "gemma3", "text_config": {"max_position_embeddings": 64}}, 64),
    ],
)
def test_an_example_that_is_longer_than_the_model_is_refused_with_the_mend(
    config: dict[str, Any] | None, positions: int
) -> None:
    with pytest.raises(UsageError, match=f"the model has {positions} positions") as refused:
        tried(config, "x" * 5000)
    assert f"set max_length = {positions} or less" in refused.value.hint
    assert tried(config, "x" * 5000, max_length=positions) == []
    assert tried(config, "x" * 8) == []


@pytest.mark.parametrize("config", [{"text_config": []}, {"n_positions": "many"}, {"model_type": "mamba"}])
def test_a_model_that_tells_no_number_of_positions_is_taken(config: dict[str, Any]) -> None:
    assert tried({"model_type": "granite"} | config, "x" * 5000) == []
