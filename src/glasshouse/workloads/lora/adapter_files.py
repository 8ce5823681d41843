"""An adapter that a job goes on from, by its files in the package; checked without a framework.

Law: what `read` returns is all that distinguishes the adapter from one that `lora` makes itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from glasshouse.errors import Code, UsageError
from glasshouse.workloads.job_keys import declared, job_invalid, read
from glasshouse.workloads.lora.lora_params import OF_ADAPTER, LoraParams
from glasshouse.workloads.lora.model_files import folder_of, matrices, weight_files
from glasshouse.workloads.params import PlainFile

_MAX_CONFIG_BYTES = 1 << 20
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Of peft's file: what names and dates it, and what is of its beginning alone.
_WITHOUT_EFFECT = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode", "runtime_config"),
        *("loftq_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "revision"),
        "task_type",
    }
)
# How its weights began: not those that change the base's too, which peft does again when it loads them.
_BEGINNINGS = (None, True, False, "gaussian", "orthogonal", "eva")
_SIDES = {"lora_A": 1, "lora_B": 0}  # each with the side of its layer's matrix that it has too


def settings(open_file: Callable[[str], BinaryIO], names: Collection[str], params: LoraParams) -> dict[str, Any]:
    """Return the settings of the adapter in a folder, by the names of `OF_ADAPTER`.

    Raises:
        UsageError: `file-missing`, or `job-invalid` for one of another kind or of another base.
    """
    folder = str(params.adapter).rstrip("/")
    if not any(name.startswith(f"{folder}/") for name in names):
        raise job_invalid(
            f"params.adapter names the folder {folder!r}, which is not among the [inputs]",
            hint="name it as it is called there, without inputs: before it",
        )
    inside = sorted(name.removesuffix(f"/{CONFIG}") for name in names if name.startswith(f"{folder}/"))
    inside = [name for name in inside if f"{name}/{CONFIG}" in names]
    for name in (CONFIG, WEIGHTS):
        if f"{folder}/{name}" not in names:
            raise UsageError(
                Code.FILE_MISSING,
                f"params.adapter: the folder {folder!r} has no {name}",
                hint=f"name one of its folders: {', '.join(inside[:5])}"
                if inside
                else "add the folder that peft saved to [inputs]; adapters as torch pickles are not loaded",
            )
    where = f"{folder}/{CONFIG}"
    try:
        with open_file(where) as stream:
            given = dict(json.loads(stream.read(_MAX_CONFIG_BYTES)))
    except (ValueError, TypeError, RecursionError):
        raise job_invalid(f"{where} is not a JSON object") from None
    if given.get("init_lora_weights") in _BEGINNINGS:
        given.pop("init_lora_weights", None)
    others = {name for name, value in given.items() if name not in (*OF_ADAPTER, *_WITHOUT_EFFECT) and value}
    if given.get("peft_type") != "LORA" or given.get("bias", "none") != "none" or others:
        kind = f"peft_type {given.get('peft_type')!r}, bias {given.get('bias')!r}"
        what = ", ".join(sorted(others)) or kind
        raise job_invalid(f"{where} is of a kind that lora does not train: {what}")
    base = given.get("base_model_name_or_path")
    if not isinstance(base, str) or PurePosixPath(base).name != PurePosixPath(str(params.base_name)).name:
        raise job_invalid(
            f"{where} is of the base {base!r}, and the job's model is called {params.base_name!r}",
            hint=f"pack that model; if it is that one, set base_name = {json.dumps(base)}",
        )
    fields = [field for field in declared(LoraParams) if field.name in OF_ADAPTER]
    return read(fields, {name: given[name] for name in OF_ADAPTER if name in given}, where)


def check_adapter(params: LoraParams, files: Mapping[str, PlainFile]) -> None:
    """Check that an adapter belongs to a job's model: by name, layers and sizes; raises as `settings`."""
    settings(lambda name: files[name].open(), files.keys(), params)
    name, prefix = f"{str(params.adapter).rstrip('/')}/{WEIGHTS}", f"{folder_of(params.model)}/"
    adapted = matrices([name], files)
    if not params.model.startswith("inputs:"):
        return
    inside = [one for one in files if one.startswith(prefix)]
    layers = matrices(weight_files(lambda one: files[one].open(), prefix, inside), files)
    for tensor, shape in adapted.items():
        path, _, side = tensor.removeprefix("base_model.model.").rpartition(".")
        if side not in _SIDES:
            continue
        layer = _layer(path, layers)
        if shape[_SIDES[side]] not in layer:
            about = f"whose weights have the shape {layer} here" if layer else "which the model does not have"
            raise job_invalid(
                f"{name} is of another base: it adapts {path}, {about}",
                hint="pack the model that the adapter was trained on",
            )


def _layer(path: str, layers: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of a layer; files name it from within the model, some without its first parts."""
    while path and path not in layers:
        path = path.partition(".")[2]
    return layers.get(path, ())
