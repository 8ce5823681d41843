"""The model of a `lora` job: its base with the tokenizer, and the adapter, also as files in peft's form (no pickle)."""

from __future__ import annotations

import importlib.util
import json
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import save
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, Qwen2Config
from transformers.utils import logging as transformers_logging

from glasshouse.errors import Code, PlatformError, RunError, UsageError
from glasshouse.task.handle import Task
from glasshouse.workloads.builtin import weights
from glasshouse.workloads.job_keys import job_invalid
from glasshouse.workloads.lora.adapter_files import CONFIG, WEIGHTS
from glasshouse.workloads.lora.encoding import ByteTokenizer, Tokenizer
from glasshouse.workloads.lora.lora_params import OF_ADAPTER, LoraParams
from glasshouse.workloads.lora.model_files import QWEN2, SIDE_FILES, weight_files
from glasshouse.workloads.process import environment

_HALVES = (torch.bfloat16, torch.float16)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def base_model(task: Task, params: LoraParams, device: torch.device) -> tuple[Any, Tokenizer]:
    """Return the model on `device`, not frozen yet, and its tokenizer.

    Raises:
        PlatformError: `model-not-found` for a hub id that cannot be had here.
        UsageError: `file-missing` or `job-invalid` for a folder in the package that is no model.
    """
    transformers_logging.disable_progress_bar()  # a bar in a log is noise
    dtype = _DTYPES[params.dtype]
    if device.type == "cpu" and params.without_gradients:
        raise PlatformError(
            Code.DEVICE_MISSING,
            f"there is no GPU here, and bitsandbytes trains no job with {params.without_gradients} on a CPU",
            hint="rent a machine with a GPU, or take load_in_4bit, or use_dora, out of [params]",
        )
    # Kernels of the default attention add in any order on a GPU.
    options: dict[str, Any] = {"attn_implementation": "eager"} if params.deterministic and device.type == "cuda" else {}
    quantised = {"quantization_config": _quantisation(params, dtype)} if params.in_few_bits else {}
    scheme, _, rest = params.model.partition(":")
    if scheme == "config":
        model = random_model(rest, dtype, device, **options)
        if quantised:  # which is done to weights as they are loaded
            model = _loaded(type(model), model.config, model.state_dict(), dtype, device, options | quantised)
        return model, ByteTokenizer()
    if scheme == "inputs":
        model, tokenizer = _packed_model(task, rest.strip("/"), dtype, device, options | quantised)
    else:
        model, tokenizer = _hub_model(params, dtype, {"device_map": {"": device}} | options | quantised)
    if not tokenizer("".join(map(chr, range(33, 127))), add_special_tokens=False)["input_ids"]:  # printable, and none
        raise job_invalid("the model's tokenizer has no vocabulary: is tokenizer.json missing?")
    return model, tokenizer


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
    laid_out = task.workspace / f"model-{secrets.token_hex(4)}"  # of this rank: they share a workspace
    task.lay_out(side_files, laid_out)
    directory = laid_out / folder
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
    return _loaded(kind, config, state, dtype, device, options), tokenizer


def _loaded(kind: Any, config: Any, state: Any, dtype: torch.dtype, device: torch.device, options: Any) -> Any:
    """Make a model of weights that are there."""
    # Left to itself, transformers would bring every tensor to host memory first.
    where = {"": device}
    return kind.from_pretrained(None, config=config, state_dict=state, dtype=dtype, device_map=where, **options)


def _quantisation(params: LoraParams, dtype: torch.dtype) -> BitsAndBytesConfig:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise RunError(
            Code.REQUIREMENT_MISSING,
            "the job loads its model in fewer bits, and this machine lacks the distribution bitsandbytes",
            hint="choose an image that has it, or take load_in_4bit and load_in_8bit out of [params]",
        )
    return BitsAndBytesConfig(
        load_in_4bit=params.load_in_4bit,
        load_in_8bit=params.load_in_8bit,
        bnb_4bit_quant_type=params.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=params.bnb_4bit_use_double_quant,
        bnb_4bit_compute_dtype=dtype,
    )


def _hub_model(params: LoraParams, dtype: torch.dtype, options: dict[str, Any]) -> tuple[Any, Any]:
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
        hint=f"pack the model: {packed}",
    )


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
    if before is not None:  # also for weights that are none
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


def files(model: Any) -> dict[str, bytes]:
    """Return the adapter's files, the same bytes for the same adapter: first its weights, then its settings."""
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    weights = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, {"format": "pt"})
    return {WEIGHTS: weights, CONFIG: _config(model)}


def _config(model: Any) -> bytes:
    config = model.peft_config["default"]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        values = json.loads((Path(folder) / CONFIG).read_text("utf-8"))
    for name, value in values.items():
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            values[name] = sorted(value)  # a set in peft: its order changes from process to process
    values["inference_mode"] = True
    return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()
