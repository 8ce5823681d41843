"""The base model of a `lora` job with its tokenizer, and its adapter as files in peft's own format (no pickle)."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen2Config
from transformers.utils import logging as transformers_logging

from glasshouse.errors import Code, PlatformError, UsageError
from glasshouse.task.handle import Task
from glasshouse.workloads.builtin import weights
from glasshouse.workloads.job_keys import job_invalid
from glasshouse.workloads.lora.encoding import ByteTokenizer, Tokenizer
from glasshouse.workloads.lora.lora_params import LoraParams
from glasshouse.workloads.lora.model_files import QWEN2, SIDE_FILES, weight_files
from glasshouse.workloads.process import environment

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def base_model(task: Task, params: LoraParams, device: torch.device) -> tuple[Any, Tokenizer]:
    """Return the model on `device`, not frozen yet, and its tokenizer.

    Raises:
        PlatformError: `model-not-found` for a hub id that cannot be had here.
        UsageError: `file-missing` or `job-invalid` for a folder in the package that is no model.
    """
    transformers_logging.disable_progress_bar()  # a bar in a log is noise
    dtype = _DTYPES[params.dtype]
    # Kernels of the default attention add in any order on a GPU.
    attention = {"attn_implementation": "eager"} if params.deterministic and device.type == "cuda" else {}
    scheme, _, rest = params.model.partition(":")
    if scheme == "config":
        return random_model(rest, dtype, device, **attention), ByteTokenizer()
    if scheme == "inputs":
        model, tokenizer = _packed_model(task, rest.strip("/"), dtype, device, attention)
    else:
        model, tokenizer = _hub_model(params, dtype, attention)
    if not tokenizer("".join(map(chr, range(33, 127))), add_special_tokens=False)["input_ids"]:  # printable, and none
        raise job_invalid("the model's tokenizer has no vocabulary: is tokenizer.json missing?")
    return model.to(device), tokenizer


def random_model(name: str, dtype: torch.dtype, device: torch.device, **options: Any) -> Any:
    """Make an architecture of `QWEN2` with random weights, where it is to live; also on `meta`."""
    with torch.device(device):
        return AutoModelForCausalLM.from_config(Qwen2Config(**QWEN2[name]), dtype=dtype, **options)


def _packed_model(
    task: Task, folder: str, dtype: torch.dtype, device: torch.device, options: dict[str, Any]
) -> tuple[Any, Any]:
    """Load a model from the package: weights go straight into the tensors that it will use, on its device."""
    prefix = folder + "/"
    names = [name for name in task.inputs if name.startswith(prefix)]
    names_of_weights = weight_files(task.open, prefix, names)
    side_files = [name for name in names if name.endswith(SIDE_FILES)]
    task.lay_out(side_files, task.workspace / "model")
    directory = task.workspace / "model" / folder
    if prefix + "config.json" not in names:
        raise UsageError(Code.FILE_MISSING, f"the package's folder {folder!r} has no config.json, so it is no model")
    try:
        config = AutoConfig.from_pretrained(str(directory), trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
        with torch.device("meta"):
            kind = type(AutoModelForCausalLM.from_config(config))
    except (OSError, ValueError, KeyError) as error:
        raise job_invalid(f"the package's folder {folder!r} is no model that transformers can load") from error
    state: dict[str, Any] = {}
    opener = weights.opener(device)
    for name in names_of_weights:
        state |= task.tensors(name, torch, opener=opener)
    # Left to itself, transformers would bring every tensor to host memory first.
    where = {"": device}
    model = kind.from_pretrained(None, config=config, state_dict=state, dtype=dtype, device_map=where, **options)
    return model, tokenizer


def _hub_model(params: LoraParams, dtype: torch.dtype, options: dict[str, str]) -> tuple[Any, Any]:
    try:
        # Code that comes with a model is never run: it would be trusted with the data.
        source: dict[str, Any] = {"trust_remote_code": False}
        if params.revision:
            source["revision"] = params.revision
        tokenizer = AutoTokenizer.from_pretrained(params.model, **source)
        model = AutoModelForCausalLM.from_pretrained(
            params.model, dtype=dtype, use_safetensors=True, **source, **options
        )
    except (OSError, ValueError) as error:  # every failure of the hub's client is one of these
        raise _not_found(params) from error
    return model, tokenizer


def _not_found(params: LoraParams) -> PlatformError:
    name = PurePosixPath(params.model).name
    packed = f'download it, add its folder to [inputs] as "{name}" and set model = "inputs:{name}"'
    at = f"{params.model!r}" + (f" at {params.revision!r}" if params.revision else "")
    if environment.egress_open():
        return PlatformError(
            Code.MODEL_NOT_FOUND,
            f"the model {at} could not be had: it does not exist, is not public, or the hub cannot be reached",
            hint=f"check the id, or pack the model: {packed}",
        )
    return PlatformError(
        Code.MODEL_NOT_FOUND,
        f"the model {at} is a hub id, and this job's policy lets the worker reach no network",
        hint=f"pack the model: {packed}; or list the hub's peers in the policy's egress",
    )


def attach(model: Any, params: LoraParams) -> Any:
    """Freeze `model` and put an adapter on its target modules; raises `UsageError` where it has none of them.

    Adapter weights are float32: updates of the usual size vanish when they are added to weights in bfloat16.
    """
    model.name_or_path = model.config.name_or_path = params.base_name  # peft reads it there, not from its own argument
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
        raise job_invalid(
            f"params.target_modules: the model has no linear layers named {params.target_modules}"
        ) from error


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
