"""Records tried at sealing, with what the model brings: its tokenizer, its chat template, its configuration."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from glasshouse.workloads.job_keys import job_invalid
from glasshouse.workloads.lora.data_forms import needed, read_records
from glasshouse.workloads.lora.encoding import ByteTokenizer, Examples, check_ids, check_lengths, encode_records
from glasshouse.workloads.lora.lora_params import LoraParams
from glasshouse.workloads.lora.model_files import QWEN2, SIDE_FILES, folder_of
from glasshouse.workloads.params import PlainFile
from glasshouse.workloads.requirements import lacking

_MAX_TOKENIZER_BYTES = 256 << 20
# What an owner waits for; a chat takes a template some milliseconds.
_TRIED_S = 20.0
# What reads a chat template in a sandbox that holds: escapes are known of older ones (as transformers says).
_READERS = ("transformers>=5", "jinja2>=3.1.6")
_TEMPLATES = "additional_chat_templates"
_CONFIG = "tokenizer_config.json"


def check_data(params: LoraParams, files: Mapping[str, PlainFile]) -> list[str]:
    """Check the inputs of records; return what could not be checked here and what is passed over.

    Raises:
        UsageError: as `read_records` and `encode_records`.
    """
    tokenizer, missing = _tokenizer(params, files)
    notes = []
    if "strftime_now" in str(getattr(tokenizer, "chat_template", None)):
        notes.append("the model's chat template writes the date into chats: tokens differ from day to day")
    for data in filter(None, (params.data, params.eval_data)):
        notes += _check_input(data, tokenizer, missing, params, files)
    return notes


def _check_input(
    data: str, tokenizer: Any, missing: str, params: LoraParams, files: Mapping[str, PlainFile]
) -> list[str]:
    if lacks := lacking(needed(files, data)):
        return [f"the records of {data} were not read: " + "; ".join(lacks)]
    found = read_records(lambda name: files[name].open(), files, data)
    if tokenizer is None:
        for _ in found:
            pass
        return [f"the records of {data} were read, and not tried with the model's tokenizer: {missing}"]
    examples, notes = encode_records(found, data, tokenizer, params, within_s=_TRIED_S), []
    _check_config(examples, data, params.model, files)
    if data == params.data and params.eval_split is not None and not examples.untried:
        params.held_out(len(examples))
    if examples.masked:
        notes.append(
            f"{data}: {examples.masked} records are passed over: none of their first {params.max_length} tokens "
            "counts in the loss"
        )
    if examples.untried:
        notes.append(f"{data}: the last {examples.untried} records were read, and not tried with the tokenizer")
    return notes


def _tokenizer(params: LoraParams, files: Mapping[str, PlainFile]) -> tuple[Any, str]:
    """Return the tokenizer that the run will have; None where this machine cannot, and why."""
    if params.model.startswith("config:"):
        return ByteTokenizer(), ""
    folder = folder_of(params.model)
    sides = {
        name.removeprefix(f"{folder}/"): file
        for name, file in files.items()
        if name.startswith(f"{folder}/") and _is_of_tokenizer(name.removeprefix(f"{folder}/"))
    }
    if "tokenizer.json" not in sides:
        return None, f"the model has no {folder}/tokenizer.json"
    if sum(file.bytes for file in sides.values()) > _MAX_TOKENIZER_BYTES:
        return None, f"its files have more than {_MAX_TOKENIZER_BYTES >> 20} MiB"
    if missing := lacking(_READERS):
        return None, "; ".join(missing)
    from transformers import AutoTokenizer
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()  # what it finds is said once, in words of ours
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / _TEMPLATES).mkdir()
        for name, file in sides.items():
            with file.open() as stream:
                Path(scratch, name).write_bytes(_without_files(stream.read()) if name == _CONFIG else stream.read())
        try:
            # A chat template is a program of the model's; transformers runs it in a sandbox of jinja's.
            return AutoTokenizer.from_pretrained(scratch, trust_remote_code=False), ""
        except Exception as error:  # what its parser raises has no type of its own
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise job_invalid(f"{folder} has no tokenizer that transformers can load: {reason}") from None
        finally:
            logging.set_verbosity(before)


def _is_of_tokenizer(name: str) -> bool:
    """Return whether a file of a model's folder, by its name there, is read with its tokenizer."""
    known = name.endswith(SIDE_FILES) and not name.endswith(".index.json")
    return known and ("/" not in name or PurePosixPath(name).parent == PurePosixPath(_TEMPLATES))


def _without_files(data: bytes) -> bytes:
    """Return a tokenizer's configuration without the names of files, which some releases open wherever they lie."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        return data
    if not isinstance(values, dict):
        return data
    return json.dumps({key: value for key, value in values.items() if not key.endswith("_file")}).encode()


def _check_config(found: Examples, data: str, model: str, files: Mapping[str, PlainFile]) -> None:
    """Refuse what the model, by its configuration, has neither embeddings nor positions for."""
    config: Any = QWEN2.get(model.removeprefix("config:"))
    if config is None:
        with files[f"{folder_of(model)}/config.json"].open() as stream:
            config = json.load(stream)  # an object, as `check_model` has seen
    # Of a model that also sees or hears, the part that writes has a configuration of its own.
    config = config.get("text_config", config)
    if not isinstance(config, dict):
        return
    check_lengths(found, config, data)
    if type(known := config.get("vocab_size")) is int:
        check_ids(found, known, data)
