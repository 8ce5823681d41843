"""What a job's files must be for its workload to run, looked at before anything is rented.

Nothing here needs a framework: what only a framework can tell is checked where there is one, and named where there is
none. Laws: what is refused here would end the run after the key was released; nothing of the owner's is executed.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.package.safetensors import Layout
from glasshouse.workloads.builtin import csv_tables as tables
from glasshouse.workloads.builtin import instructions as tokens
from glasshouse.workloads.builtin.model_files import LINEAR, SIDE_FILES, weight_files
from glasshouse.workloads.params import LoraParams, MlpParams, Params, ScriptParams

__all__ = ["File", "examine"]

_MAX_CONFIG_BYTES = 1 << 20
_MAX_TOKENIZER_BYTES = 256 << 20
_MAX_SOURCE_BYTES = 4 << 20  # a parser's tree takes some forty times as much
_MOST_LAYERS = 100_000  # transformers makes a list as long as the number of layers that a configuration says
_MOST_NAMED = 12


class File(Protocol):
    """A file that is to be packed.

    Attributes:
        bytes: how long it is.
    """

    @property
    def bytes(self) -> int: ...

    @property
    def open(self) -> Callable[[], BinaryIO]: ...


def examine(params: Params, files: Mapping[str, File]) -> list[str]:
    """Check a job's files against its parameters; return what could not be checked here, and what will be passed over.

    Args:
        params: checked.
        files: what will be packed, by its names in the package.

    Raises:
        UsageError: `job-invalid` or `file-missing`, naming file, line and key, and what to do.
    """
    match params:
        case ScriptParams():
            return _script(params, files)
        case MlpParams(data=str(data)):
            with files[data].open() as stream:
                tables.read_csv(stream, label=params.label, name=data)
            return []
        case LoraParams():
            return [*_model(params, files), *_records(params, files)]
    return []


# ---- scripts


def _script(params: ScriptParams, files: Mapping[str, File]) -> list[str]:
    _outputs(params, files)
    notes = [note for requirement in params.requirements if (note := _requirement(requirement))]
    main = params.script or _file_of(str(params.module), files)
    if main is None:
        notes.append(f"the module {params.module!r} is not among the [inputs]: the rented machine must have it")
    for name in sorted(files):
        if (name.endswith(".py") or name == main) and files[name].bytes > _MAX_SOURCE_BYTES:
            notes.append(f"{name} is {files[name].bytes} bytes long and was not compiled here")
        elif name.endswith(".py") or name == main:
            try:
                _compile(name, files[name])
            except SyntaxError as error:
                where = f"{name} line {error.lineno or 1}: {error.msg}"
                version = f"Python {sys.version_info.major}.{sys.version_info.minor}"
                if name == main:
                    raise UsageError(
                        Code.JOB_INVALID, f"{where}; it is not valid {version}", hint="mend it, then seal again"
                    ) from None
                notes.append(f"{where}; a run that imports it fails under {version}")
    return notes


def _outputs(params: ScriptParams, files: Mapping[str, File]) -> None:
    """Refuse inputs that would come back as outputs, or lie where a folder of outputs is made."""
    for folder in params.outputs:
        for name in files:
            if f"{name}/".startswith(f"{folder}/") or f"{folder}/".startswith(f"{name}/"):
                raise UsageError(
                    Code.JOB_INVALID,
                    f"the input {name!r} lies where the outputs of {folder!r} do",
                    hint='call it otherwise, or name other folders with outputs = ["…"] in [params]',
                )


def _file_of(module: str, files: Mapping[str, File]) -> str | None:
    path = module.replace(".", "/")
    return next((name for name in (f"{path}.py", f"{path}/__main__.py") if name in files), None)


def _compile(name: str, file: File) -> None:
    with file.open() as stream, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about odd escapes in the script
        try:
            compile(stream.read(), name, "exec", dont_inherit=True)
        except (ValueError, RecursionError, MemoryError) as error:  # a zero byte; nesting that no parser bears
            raise SyntaxError(str(error) or type(error).__name__) from None


def _requirement(text: str) -> str:
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ImportError:
        return f"the requirement {text!r} was not checked: the distribution 'packaging' is not installed here"
    try:
        Requirement(text)
    except InvalidRequirement as error:
        raise UsageError(
            Code.JOB_INVALID,
            f"params.requirements: {text!r} is no requirement: {str(error).splitlines()[0]}",
            hint="write it as name, or name>=1.2,<2",
        ) from None
    return ""


# ---- adapters


def _records(params: LoraParams, files: Mapping[str, File]) -> list[str]:
    encode, note = _encoder(params, files)
    with files[params.data].open() as lines:
        skipped = tokens.check_records(tokens.lines_of(lines), encode, max_length=params.max_length, name=params.data)
    notes = [note] if note else []
    if skipped:
        notes.append(
            f"{params.data}: {skipped} records are passed over, for before their answer begins they have max_length = "
            f"{params.max_length} tokens already"
        )
    return notes


def _encoder(params: LoraParams, files: Mapping[str, File]) -> tuple[Callable[[str], list[int]] | None, str]:
    """Return what turns text into tokens as the run will; None where this machine cannot, and a note of that."""
    if params.model.startswith("config:"):
        return tokens.ByteTokenizer().encode, ""
    unchecked = f"the lengths of {params.data}'s records were not checked against max_length: "
    name = f"{_folder(params)}/tokenizer.json"
    if name not in files or files[name].bytes > _MAX_TOKENIZER_BYTES:
        return None, unchecked + f"the model has no {name}"
    if importlib.util.find_spec("tokenizers") is None:
        return None, unchecked + "the distribution 'tokenizers' is not installed here"
    from tokenizers import Tokenizer

    with files[name].open() as stream:
        data = stream.read()
    try:
        found = Tokenizer.from_buffer(data)
    except Exception as error:  # what its parser raises has no type of its own
        raise UsageError(Code.JOB_INVALID, f"{name} is no tokenizer: {str(error).splitlines()[0]}") from None

    def encode(text: str) -> list[int]:
        try:
            return list(found.encode(text, add_special_tokens=False).ids)
        except (KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:  # a panic of its parser is no Exception
            raise ValueError(str(error).splitlines()[0]) from None

    return encode, ""


def _model(params: LoraParams, files: Mapping[str, File]) -> list[str]:
    if params.model.startswith("config:"):
        _targets(params, set(LINEAR), params.model)
        return []
    folder = _folder(params)
    prefix = f"{folder}/"
    names = [name for name in files if name.startswith(prefix)]
    notes = _config(folder, names, files)
    layers: set[str] = set()
    for name in weight_files(lambda name: files[name].open(), prefix, names):
        layers |= _layers(name, files[name])
    _targets(params, layers | {"lm_head"}, folder)  # which may share the embedding's weights, and has none of its own
    return notes


def _folder(params: LoraParams) -> str:
    return params.model.removeprefix("inputs:").strip("/")


def _config(folder: str, names: list[str], files: Mapping[str, File]) -> list[str]:
    name = f"{folder}/config.json"
    if name not in names:
        raise UsageError(
            Code.FILE_MISSING, f"the folder {folder!r} of params.model has no config.json, so it is no model"
        )
    try:
        with files[name].open() as stream:
            config = json.loads(stream.read(_MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise UsageError(Code.JOB_INVALID, f"{name} is not JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UsageError(Code.JOB_INVALID, f"{name} has no model_type, so it is no model that transformers can load")
    for key, value in config.items():
        if "layer" in key and isinstance(value, int) and value > _MOST_LAYERS:
            raise UsageError(Code.JOB_INVALID, f"{name}: {key} is {value}, more than any model has")
    if importlib.util.find_spec("transformers") is None:
        return [f"{name} was read and not tried: transformers is not installed here"]
    _try(folder, [one for one in names if one.endswith(SIDE_FILES)], files)
    return []


def _try(folder: str, names: list[str], files: Mapping[str, File]) -> None:
    """Have transformers read a model's configuration, as the run will."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch, "config.json")
        with files[f"{folder}/config.json"].open() as stream:
            target.write_bytes(stream.read(_MAX_CONFIG_BYTES))
        try:
            found = AutoConfig.from_pretrained(scratch, trust_remote_code=False)
        except Exception as error:  # each architecture checks its own settings in its own way
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UsageError(
                Code.JOB_INVALID, f"{folder}/config.json is no model that transformers can load: {why}"
            ) from None
    if found.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UsageError(
            Code.JOB_INVALID, f"{folder}/config.json: a model of the type {found.model_type!r} writes no text"
        )


def _layers(name: str, file: File) -> set[str]:
    """Return the names, without their place, of the modules in a file whose weights are matrices."""
    with file.open() as stream:
        try:
            spans = Layout.parse(_Plain(stream, file.bytes)).tensors
        except FormatError as error:
            raise UsageError(Code.JOB_INVALID, f"{name} is not valid safetensors: {error.message}") from None
    return {_module(span.name) for span in spans if span.name.endswith(".weight") and len(span.shape) == 2}


def _module(tensor: str) -> str:
    return tensor.removesuffix(".weight").rpartition(".")[2]


def _targets(params: LoraParams, layers: set[str], where: str) -> None:
    # A target is a layer's name, or the end of its path.
    missing = [target for target in params.target_modules if target.rpartition(".")[2] not in layers]
    if missing:
        known = sorted(layers)
        more = f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
        raise UsageError(
            Code.JOB_INVALID,
            f"params.target_modules: the model {where!r} has no layers named {', '.join(map(repr, missing))}",
            hint=f"it has: {', '.join(known[:_MOST_NAMED])}{more}",
        )


class _Plain:
    """A plain file behind the names that a `Layout` is read by."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream, self.size = stream, size

    def read_into(self, offset: int, destination: Any, /) -> int:
        self._stream.seek(offset)
        view = memoryview(destination)
        data = self._stream.read(len(view))
        view[: len(data)] = data
        return len(data)
