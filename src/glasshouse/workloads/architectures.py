"""Architectures with random weights: published dimensions of Qwen2.5, and a tiny one of the same kind.

Sources: the models' own ``config.json`` as published for Qwen2.5-0.5B and Qwen2.5-7B.
"""

from __future__ import annotations

from typing import Any

__all__ = ["LINEAR", "QWEN2"]

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
