"""The adapter of a `lora` job: on its base, and as files in peft's own format (no pickle)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import (
    LoraConfig,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from safetensors.torch import save

from glasshouse.workloads.job_keys import job_invalid
from glasshouse.workloads.lora.lora_params import OF_ADAPTER, LoraParams

_HALVES = (torch.bfloat16, torch.float16)


def attach(model: Any, params: LoraParams, before: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None) -> Any:
    """Freeze `model` and put an adapter on its target modules.

    Adapter weights are float32: updates of the usual size vanish when they are added to weights in bfloat16.

    Args:
        before: of an adapter to go on from, its settings by the names of `lora_params.OF_ADAPTER`, and its weights.

    Raises:
        UsageError: `job-invalid`: the model has none of the target modules, or the weights are of another base.
    """
    model.name_or_path = model.config.name_or_path = params.base_name  # peft reads it there, not from its own argument
    settings, weights = before or ({name: getattr(params, name) for name in OF_ADAPTER}, {})
    targets = settings["target_modules"]
    config = LoraConfig(
        **{**settings, "target_modules": targets if isinstance(targets, str) else list(targets)},
        task_type="CAUSAL_LM",
        base_model_name_or_path=params.base_name,
    )
    try:
        model = get_peft_model(model, config, autocast_adapter_dtype=True)
    except ValueError as error:
        raise job_invalid(f"params.target_modules: the model has no linear layers named {targets}") from error
    if weights:
        own = get_peft_model_state_dict(model, save_embedding_layers=False)
        wrong = sorted(own.keys() ^ weights.keys()) or [
            name
            for name in own
            if own[name].shape != weights[name].shape or weights[name].dtype not in (torch.float32, *_HALVES)
        ]
        if wrong:
            raise job_invalid(
                f"params.adapter is of another base: {wrong[0]} is not there, or of another shape or type"
            )
        set_peft_model_state_dict(model, dict(weights))
    return model


def is_finite(model: Any) -> bool:
    """Return whether every weight of the adapter is a finite number."""
    return bool(torch.stack([one.detach().isfinite().all() for one in _trained(model).values()]).all())


def copied(model: Any) -> dict[str, torch.Tensor]:
    """Return a copy of the adapter, in host memory."""
    return {name: one.detach().to("cpu", copy=True) for name, one in _trained(model).items()}


def put_back(model: Any, kept: dict[str, torch.Tensor]) -> None:
    """Put a copy in the place of the adapter."""
    for name, one in _trained(model).items():
        one.detach().copy_(kept[name])


def _trained(model: Any) -> dict[str, Any]:
    return {name: one for name, one in model.named_parameters() if one.requires_grad}


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
