"""Models by their files, without a framework: the built-in architectures, and the checks of a packed model and data.

Law: what is refused here would end the run after the key was released; nothing of the owner's is executed.
"""

from __future__ import annotations

import importlib.util
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.task.tensors import tensor_spans
from glasshouse.workloads.job_keys import job_invalid
from glasshouse.workloads.params import PlainFile

SIDE_FILES = (".json", ".txt", ".model", ".jinja")
"""Endings of what belongs to a model beside its weights."""
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_MAX_INDEX_BYTES = 64 << 20
_MAX_CONFIG_BYTES = 1 << 20
_MOST_LAYERS = 100_000  # transformers makes a list as long as the number of layers that a configuration has
_MOST_NAMED = 12

# Dimensions: the models' own ``config.json`` as published for Qwen2.5-0.5B and Qwen2.5-7B.
_SHARED: dict[str, Any] = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
}

_DIMENSIONS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "tie_word_embeddings",
)
QWEN2: dict[str, dict[str, Any]] = {
    name: _SHARED | dict(zip(_DIMENSIONS, values, strict=True))
    for name, values in {
        "qwen2-tiny": (264, 128, 344, 4, 4, 2, 4096, True),  # small enough for a laptop's CPU
        "qwen2.5-0.5b": (151_936, 896, 4864, 24, 14, 2, 32_768, True),
        "qwen2.5-7b": (152_064, 3584, 18_944, 28, 28, 4, 131_072, False),
    }.items()
}
# Wider, so that an adapter alone, on frozen random layers, can learn from data.
QWEN2["qwen2-tiny"]["initializer_range"] = 0.1

LINEAR = ("down_proj", "gate_proj", "k_proj", "lm_head", "o_proj", "q_proj", "up_proj", "v_proj")
"""Names of their linear layers."""


def weight_files(open_file: Callable[[str], BinaryIO], prefix: str, names: list[str]) -> list[str]:
    """Return the names of a model's weights among those in its folder, `prefix`, in the order in which they are read.

    Raises:
        UsageError: `file-missing` where there are none, or not all in the index; `job-invalid` for a bad index.
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


def check_model(model: str, targets: str | tuple[str, ...], files: Mapping[str, PlainFile]) -> list[str]:
    """Check that a model loads and has the targets; return what was not checked; raises as `registry.examine`."""
    if model.startswith("config:"):
        _check_targets(targets, set(LINEAR), model)
        return []
    folder = folder_of(model)
    names = [name for name in files if name.startswith(f"{folder}/")]
    if not names:
        raise job_invalid(f"params.model names the folder {folder!r}, which is not among the [inputs]")
    notes = _check_config(folder, files)
    weights = matrices(weight_files(lambda name: files[name].open(), f"{folder}/", names), files)
    # The head may share the embedding's weights, and has none of its own.
    _check_targets(targets, {"lm_head", *weights}, folder)
    return notes


def matrices(names: Iterable[str], files: Mapping[str, PlainFile]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights in some files that are matrices, by their names without ``.weight``."""
    found: dict[str, tuple[int, ...]] = {}
    for name in names:
        with files[name].open() as stream:
            try:
                spans = tensor_spans(_Seekable(stream, files[name].bytes))
            except FormatError as error:
                raise job_invalid(f"{name} is not valid safetensors: {error.message}") from None
        found |= {
            span.name.removesuffix(".weight"): span.shape
            for span in spans
            if span.name.endswith(".weight") and len(span.shape) == 2
        }
    return found


def folder_of(model: str) -> str:
    """Return the folder of the package that a job's `inputs:FOLDER` names."""
    return model.removeprefix("inputs:").strip("/")


def _shards(stream: BinaryIO, index: str) -> list[str]:
    try:
        shards = set(json.loads(stream.read(_MAX_INDEX_BYTES))["weight_map"].values())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise job_invalid(f"{index} is no index of weights") from None
    return sorted(map(str, shards))


def _check_config(folder: str, files: Mapping[str, PlainFile]) -> list[str]:
    name = f"{folder}/config.json"
    if name not in files:
        raise UsageError(
            Code.FILE_MISSING, f"the folder {folder!r} of params.model has no config.json, so it is no model"
        )
    try:
        with files[name].open() as stream:
            config = json.loads(stream.read(_MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise job_invalid(f"{name} is not JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise job_invalid(f"{name} has no model_type, so it is no model that transformers can load")
    for key, value in config.items():
        if "layer" in key and isinstance(value, int) and value > _MOST_LAYERS:
            raise job_invalid(f"{name}: {key} is {value}, more than any model has")
    if importlib.util.find_spec("transformers") is None:
        return [f"{name} was read and not tried: transformers is not installed here"]
    _load_config(folder, config)
    return []


def _load_config(folder: str, config: dict[str, Any]) -> None:
    """Have transformers read a model's configuration, as the run will."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "config.json").write_text(json.dumps(config))
        try:
            found = AutoConfig.from_pretrained(scratch, trust_remote_code=False)
        except Exception as error:  # each architecture checks its own settings in its own way
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise job_invalid(f"{folder}/config.json is no model that transformers can load: {why}") from None
    if found.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise job_invalid(f"{folder}/config.json: a model of the type {found.model_type!r} writes no text")


def _check_targets(targets: str | tuple[str, ...], paths: set[str], where: str) -> None:
    if isinstance(targets, str):  # all linear layers but the output's
        if paths == {"lm_head"}:
            raise job_invalid(f"params.target_modules: the model {where!r} has no linear layers")
        return
    # A target is a layer's name or the end of its path, of which files leave out the first parts.
    ends = [f".{path}" for path in paths]
    missing = [
        target
        for target in targets
        if not any(f".{target}".endswith(end) or end.endswith(f".{target}") for end in ends)
    ]
    if missing:
        known = sorted({path.rpartition(".")[2] for path in paths})
        more = f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
        if "all-linear" in missing:
            raise job_invalid(
                'params.target_modules: "all-linear" stands for itself', hint='write target_modules = "all-linear"'
            )
        raise job_invalid(
            f"params.target_modules: the model {where!r} has no layers named {', '.join(map(repr, missing))}",
            hint=f"it has: {', '.join(known[:_MOST_NAMED])}{more}",
        )


class _Seekable:
    """A plain file as what tensors are read from."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream, self.size = stream, size

    def read_into(self, offset: int, destination: Any, /) -> int:
        self._stream.seek(offset)
        view = memoryview(destination)
        data = self._stream.read(len(view))
        view[: len(data)] = data
        return len(data)
