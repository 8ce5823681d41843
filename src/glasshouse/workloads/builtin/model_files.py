"""Models by their files, without a framework: what of a packed folder is its model, and built-in architectures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from glasshouse.errors import Code, UsageError

__all__ = ["LINEAR", "QWEN2", "SIDE_FILES", "weight_files"]

SIDE_FILES = (".json", ".txt", ".model", ".jinja")
"""Endings of what belongs to a model beside its weights."""
_MAX_INDEX_BYTES = 64 << 20
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")

# Dimensions: the models' own ``config.json`` as published for Qwen2.5-0.5B and Qwen2.5-7B.
_SHARED: dict[str, Any] = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
}

QWEN2: dict[str, dict[str, Any]] = {
    # Small enough for a laptop's CPU. The wider initialisation gives the frozen random layers
    # something to say, so that an adapter alone can learn from data.
    "qwen2-tiny": _SHARED
    | {
        "vocab_size": 264,
        "hidden_size": 128,
        "intermediate_size": 344,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
    },
    "qwen2.5-0.5b": _SHARED
    | {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": _SHARED
    | {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
    },
}

LINEAR = ("down_proj", "gate_proj", "k_proj", "lm_head", "o_proj", "q_proj", "up_proj", "v_proj")
"""Names of their linear layers."""


def weight_files(open_file: Callable[[str], BinaryIO], prefix: str, names: list[str]) -> list[str]:
    """Return the names of a model's weights, in the order in which they are read.

    Args:
        open_file: opens one of `names`.
        prefix: of the model's folder, with a slash at its end.
        names: everything in it.

    Raises:
        UsageError: `file-missing` where there are none, or not all that its index names; `job-invalid` for an index
            that is none.
    """
    index = prefix + "model.safetensors.index.json"
    if index in names:
        with open_file(index) as stream:
            wanted = [prefix + shard for shard in _shards(stream, index)]
    else:
        wanted = [name for name in names if _WEIGHTS.fullmatch(PurePosixPath(name).name)]
    missing = [name for name in wanted if name not in names]
    if missing or not wanted:
        raise UsageError(
            Code.FILE_MISSING,
            f"the package holds no weights named {missing[0] if missing else prefix + 'model.safetensors'!r}",
            hint="add the model's folder to [inputs]; weights as torch pickles are not loaded",
        )
    return wanted


def _shards(stream: BinaryIO, index: str) -> list[str]:
    try:
        shards = set(json.loads(stream.read(_MAX_INDEX_BYTES))["weight_map"].values())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UsageError(Code.JOB_INVALID, f"{index} is no index of weights") from None
    return sorted(map(str, shards))
