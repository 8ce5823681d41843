"""Everything that a job lists is looked at before anything is rented; what cannot be is named."""

from __future__ import annotations

import importlib.util
import io
import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from glasshouse.errors import Code, UsageError
from glasshouse.workloads.lora import data_check
from glasshouse.workloads.lora.model_files import LINEAR
from glasshouse.workloads.registry import examine, parse
from tools.plain_files import Packed


def looked(kind: str, params: dict[str, Any], files: dict[str, bytes]) -> list[str]:
    return examine(kind, parse(kind, params), {name: Packed(data) for name, data in files.items()})


def refused(kind: str, params: dict[str, Any], files: dict[str, bytes]) -> UsageError:
    with pytest.raises(UsageError) as found:
        looked(kind, params, files)
    return found.value


def lines(*records: Any) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def tensors(*named: tuple[str, tuple[int, ...]]) -> bytes:
    header, at = {}, 0
    for name, shape in named:
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


GOOD = {"instruction": "Who?", "output": "Nobody."}
TINY = {"model": "config:qwen2-tiny", "data": "train.jsonl"}


# ---- scripts


def test_a_script_that_does_not_parse_is_refused_with_its_line() -> None:
    error = refused("script", {"script": "train.py"}, {"train.py": b"x = 1\ndef\n"})
    assert error.code is Code.JOB_INVALID
    assert error.message.startswith("train.py line 2: invalid syntax; it is not valid Python 3.")
    for source in (b"\xff", b"x\x00y", b"return 1", b"(" * 500):
        assert "train.py line 1" in refused("script", {"script": "train.py"}, {"train.py": source}).message


def test_a_module_is_found_and_compiled_as_a_script_is() -> None:
    assert "pkg/train.py line 1" in refused("script", {"module": "pkg.train"}, {"pkg/train.py": b"def"}).message
    assert "pkg/__main__.py line 1" in refused("script", {"module": "pkg"}, {"pkg/__main__.py": b"def"}).message
    assert looked("script", {"module": "pkg.train"}, {"other.py": b""}) == [
        "the module 'pkg.train' is not among the [inputs]: the rented machine must have it"
    ]


def test_a_helper_that_does_not_parse_is_a_note_for_it_may_never_be_imported() -> None:
    notes = looked("script", {"script": "train.py"}, {"train.py": b"", "old/two.py": b"print 'x'"})
    assert len(notes) == 1
    assert notes[0].startswith("old/two.py line 1: ")


def test_a_script_is_compiled_and_not_run() -> None:
    assert looked("script", {"script": "train.py"}, {"train.py": b"raise SystemExit(1)"}) == []


@pytest.mark.parametrize("name", ["results/old.csv", "results", "data"])
def test_an_input_in_the_place_of_an_output_folder_is_refused(name: str) -> None:
    params = {"script": "train.py", "outputs": ["results/", "data/made"]}
    error = refused("script", params, {"train.py": b"", name: b""})
    assert repr(name) in error.message
    assert "outputs = " in error.hint
    assert looked("script", params, {"train.py": b"", "results.csv": b"", "data/in.csv": b""}) == []


def test_a_source_of_megabytes_is_named_and_not_compiled() -> None:
    notes = looked("script", {"script": "train.py"}, {"train.py": b"", "table.py": b"x = 1\n" * (1 << 20)})
    assert notes == ["table.py is 6291456 bytes long and was not compiled here"]


def test_a_requirement_that_no_installer_takes_is_refused() -> None:
    params = {"script": "train.py", "requirements": ["torch>=2", "numpy>=one.two"]}
    error = refused("script", params, {"train.py": b""})
    assert "params.requirements: 'numpy>=one.two' is no requirement" in error.message
    assert "name>=1.2,<2" in error.hint


# ---- tables


def test_a_table_is_read_to_its_last_line() -> None:
    good = b"x,y\n" + b"1,0\n2,1\n" * 100
    assert looked("mlp", {"data": "a.csv"}, {"a.csv": good}) == []
    error = refused("mlp", {"data": "a.csv"}, {"a.csv": good + b"one,1\n"})
    assert error.message == "a.csv line 202 column 'x' is not a finite number"
    assert looked("mlp", {}, {"other": b""}) == []


# ---- records


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"instruction": "a"', "is not a JSON object"),
        (b"[1]", "is not a JSON object"),
        (b'{"instruction": "a", "answer": "b"}', "has no 'output', only: answer, instruction"),
        (b'{"instruction": "a", "output": 3}', "needs the texts instruction and output"),
        (b'{"instruction": "a", "output": "\\ud800"}', "half a character"),
    ],
)
def test_a_record_that_is_wrong_is_named_by_its_line_and_keys(line: bytes, words: str) -> None:
    error = refused("lora", TINY, {"train.jsonl": lines(GOOD) + b"\n" + line})
    assert error.code is Code.JOB_INVALID
    assert error.message.startswith("train.jsonl line 3 ")
    assert words in error.message


def test_records_that_are_all_too_long_or_missing_are_refused_and_some_are_noted() -> None:
    long = {"instruction": "x" * 600, "output": "y"}
    error = refused("lora", TINY, {"train.jsonl": lines(long, long)})
    assert "all are too long (2 of them); max_length is 512 tokens" in error.message
    assert "raise max_length" in error.hint
    assert "it is empty" in refused("lora", TINY, {"train.jsonl": b"\n"}).message
    notes = looked("lora", TINY, {"train.jsonl": lines(GOOD, long)})
    assert notes == ["train.jsonl: 1 records are passed over: none of their first 512 tokens counts in the loss"]
    assert looked("lora", TINY, {"train.jsonl": lines(GOOD)}) == []


def test_records_to_evaluate_on_are_looked_at_too() -> None:
    params = TINY | {"eval_data": "held.jsonl"}
    files = {"train.jsonl": lines(GOOD), "held.jsonl": lines(GOOD, {"instruction": "a"})}
    assert "held.jsonl line 2" in refused("lora", params, files).message
    assert "'held.jsonl', which are not among" in refused("lora", params, {"train.jsonl": lines(GOOD)}).message


class ByLine(io.BytesIO):
    """A file that must not be read by lines of any length."""

    def __next__(self) -> bytes:
        raise AssertionError("a line is read whatever its length")


def test_a_file_without_lines_is_not_read_whole() -> None:
    class Endless(Packed):
        @property
        def open(self) -> Callable[[], io.BytesIO]:
            return lambda: ByLine(self.data)

    data = b'[{"instruction": "a", "output": "b"}, ' * (1 << 19)
    with pytest.raises(UsageError, match=r"train\.jsonl line 1 is longer than 16777216 bytes") as found:
        examine("lora", parse("lora", TINY), {"train.jsonl": Endless(data)})
    assert "one JSON object" in found.value.hint


# ---- models


def test_a_target_that_the_architecture_lacks_is_told_what_it_has() -> None:
    error = refused("lora", TINY | {"target_modules": ["q_proj", "c_attn"]}, {"train.jsonl": lines(GOOD)})
    assert error.message == "params.target_modules: the model 'config:qwen2-tiny' has no layers named 'c_attn'"
    assert error.hint == "it has: " + ", ".join(sorted(LINEAR))


PACKED = TINY | {"model": "inputs:base/"}
CONFIG = {"model_type": "qwen2", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
WEIGHTS = tensors(
    ("model.embed.weight", (4, 8)),
    ("model.layers.0.attn.q_proj.weight", (8, 8)),
    ("model.layers.0.attn.v_proj.weight", (8, 8)),
    ("model.norm.weight", (8,)),
)


def packed(changed: Mapping[str, bytes | None] | None = None) -> dict[str, bytes]:
    """Return a job with a model; `changed` replaces files of the model, or takes them away."""
    files: dict[str, bytes | None] = {
        "train.jsonl": lines(GOOD),
        "base/config.json": json.dumps(CONFIG).encode(),
        "base/model.safetensors": WEIGHTS,
    }
    files |= {f"base/{name}": data for name, data in (changed or {}).items()}
    return {name: data for name, data in files.items() if data is not None}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"config.json": None}, "has no config.json"),
        ({"config.json": b"{"}, "base/config.json is not JSON"),
        ({"config.json": b"[]"}, "has no model_type"),
        (
            {"config.json": b'{"model_type": "clarinet"}'},
            "base/config.json is no model that transformers can load",
        ),
        ({"config.json": b'{"model_type": "vit"}'}, "a model of the type 'vit' writes no text"),
        (
            {"config.json": b'{"model_type": "qwen2", "hidden_size": "x"}'},
            "base/config.json is no model that transformers can load: Validation error for field 'hidden_size'",
        ),
        (
            {"config.json": b'{"model_type": "qwen2", "id2label": 5}'},
            "base/config.json is no model that transformers can load",
        ),
        (
            {"config.json": b'{"model_type": "qwen2", "num_hidden_layers": 100000000}'},
            "base/config.json: num_hidden_layers is 100000000, more than any model has",
        ),
        ({"model.safetensors": None}, "no weights named 'base/model.safetensors'"),
        ({"model.safetensors": b"12345678{"}, "base/model.safetensors is not valid safetensors"),
        ({"model.safetensors": tensors(("a.x_proj.weight", (2, 2)))}, "has no layers named 'q_proj', 'v_proj'"),
        ({"tokenizer.json": b"{}"}, "base has no tokenizer that transformers can load"),
    ],
)
def test_a_packed_model_that_cannot_be_loaded_is_refused(changed: dict[str, bytes | None], words: str) -> None:
    pytest.importorskip("transformers")
    assert words in refused("lora", PACKED, packed(changed)).message


ADAPTER = "base_model.model.model.layers.{layer}.attn.q_proj.lora_{side}.weight"
SETTINGS = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "base_model_name_or_path": "org/base"}


def adapted(*, layer: int = 0, wide: int = 8, tall: int = 8, **changes: Any) -> dict[str, bytes]:
    """Return a job that goes on from an adapter of rank 2."""
    weights = tensors(
        (ADAPTER.format(layer=layer, side="A"), (2, wide)), (ADAPTER.format(layer=layer, side="B"), (tall, 2))
    )
    config = json.dumps(SETTINGS | changes).encode()
    return packed() | {"before/adapter_config.json": config, "before/adapter_model.safetensors": weights}


def test_an_adapter_to_go_on_from_is_one_of_the_jobs_model() -> None:
    params = PACKED | {"adapter": "before/"}
    pytest.importorskip("transformers")
    assert [note for note in looked("lora", params, adapted()) if "adapter" in note] == []
    for files, words in (
        (adapted(layer=1), "of another base: it adapts model.layers.1.attn.q_proj, which the model does not have"),
        (adapted(wide=16), "whose weights have the shape (8, 8) here"),
        (adapted(tall=16), "whose weights have the shape (8, 8) here"),
        (adapted(base_model_name_or_path="org/7b"), "of the base 'org/7b', and the job's model is called 'base'"),
        (adapted(peft_type="IA3"), "of a kind that lora does not train"),
    ):
        assert words in refused("lora", params, files).message
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        files = {one: data for one, data in adapted().items() if not one.endswith(name)}
        assert f"the folder 'before' has no {name}" in refused("lora", params, files).message
    files = adapted() | {"before/adapter_config.json": b"[1]"}
    assert "before/adapter_config.json is not a JSON object" in refused("lora", params, files).message


def test_an_index_of_weights_names_files_that_are_there() -> None:
    index = json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}).encode()
    files = packed() | {"base/model.safetensors.index.json": index, "base/one.safetensors": WEIGHTS}
    assert "no weights named 'base/two.safetensors'" in refused("lora", PACKED, files).message
    for data in (b"[]", b" " * (64 << 20) + index):
        files["base/model.safetensors.index.json"] = data
        assert "is no index of weights" in refused("lora", PACKED, files).message


def test_a_good_packed_model_is_taken_and_what_was_not_checked_is_named() -> None:
    pytest.importorskip("transformers")
    notes = looked("lora", PACKED | {"target_modules": ["attn.q_proj", "lm_head"]}, packed())
    assert notes == [
        "the records of train.jsonl were read, and not tried with the model's tokenizer: the model has no "
        "base/tokenizer.json"
    ]


def test_where_no_framework_is_installed_what_needs_none_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner's machine need not have torch."""
    find = importlib.util.find_spec
    absent = {"torch", "transformers"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else find(name))
    monkeypatch.setattr(data_check, "lacking", lambda wanted: [f"{one} is not installed" for one in [*wanted][1:]])
    notes = looked("lora", PACKED, packed({"tokenizer.json": b"{}"}))
    assert notes == [
        "base/config.json was read and not tried: transformers is not installed here",
        "the records of train.jsonl were read, and not tried with the model's tokenizer: "
        "jinja2>=3.1.6 is not installed",
    ]
    assert "has no layers named" in refused("lora", PACKED | {"target_modules": ["c_attn"]}, packed()).message
    assert "line 1" in refused("lora", PACKED, packed() | {"train.jsonl": b"x"}).message


def test_the_layers_of_the_architectures_are_those_that_the_models_have() -> None:
    torch = pytest.importorskip("torch")
    from glasshouse.workloads.lora.models import random_model

    for name in ("qwen2-tiny", "qwen2.5-7b"):
        model = random_model(name, torch.float32, torch.device("meta"))
        linear = {path.rpartition(".")[2] for path, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
        assert linear == set(LINEAR)


def test_a_record_on_which_the_models_tokenizer_gives_up_is_named() -> None:
    pytest.importorskip("transformers")
    splitting = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    model = {"type": "BPE", "vocab": {"a": 0, "c": 1}, "merges": []}
    tokenizer = json.dumps({"version": "1.0", "added_tokens": [], "model": model, "pre_tokenizer": splitting}).encode()
    model_files = packed(
        {
            "tokenizer.json": tokenizer,
            "tokenizer_config.json": b'{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "c"}',
            # Of a kind whose tokenizer is what its file says.
            "config.json": json.dumps(CONFIG | {"model_type": "granite"}).encode(),
        }
    )
    records = lines(GOOD, {"instruction": "a" * 40 + "b", "output": "c"})
    error = refused("lora", PACKED, model_files | {"train.jsonl": records})
    assert error.message.startswith("train.jsonl line 2: the model's tokenizer fails on it: ")
