"""A LoRA adapter as files in peft's own format: safetensors and JSON, no pickle."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save

from glasshouse.errors import Code, UsageError
from glasshouse.workloads.params import LoraParams

__all__ = ["attach", "config_bytes", "trainable", "weights_bytes"]


def attach(model: Any, params: LoraParams) -> Any:
    """Freeze `model` and put an adapter on its target modules; adapter weights are float32.

    Updates of the usual size vanish when they are added to weights in bfloat16, so only the frozen
    base is kept in it.

    Raises:
        UsageError: `job-invalid` when the model has no such modules.
    """
    model.name_or_path = model.config.name_or_path = params.base_name  # peft believes the model, not its own argument
    config = LoraConfig(
        r=params.rank,
        lora_alpha=params.alpha,
        lora_dropout=params.dropout,
        target_modules=list(params.target_modules),
        task_type="CAUSAL_LM",
        base_model_name_or_path=params.base_name,
    )
    try:
        return get_peft_model(model, config, autocast_adapter_dtype=True)
    except ValueError as error:
        raise UsageError(
            Code.JOB_INVALID, f"params.target_modules: the model has no linear layers named {params.target_modules}"
        ) from error


def trainable(model: Any) -> int:
    """Return the number of parameters that training changes."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def weights_bytes(model: Any) -> bytes:
    """Return ``adapter_model.safetensors``."""
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    data: bytes = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, {"format": "pt"})
    return data


def config_bytes(model: Any) -> bytes:
    """Return ``adapter_config.json``, the same bytes for the same adapter."""
    config = model.peft_config["default"]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        values = json.loads((Path(folder) / "adapter_config.json").read_text("utf-8"))
    for name, value in values.items():
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            values[name] = sorted(value)  # a set in peft: its order changes from process to process
    values["inference_mode"] = True
    return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()
