"""Tables become the ids and labels that TRL makes of them when `datasets` loads the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from glasshouse.workloads.lora.data_forms import read_records
from glasshouse.workloads.lora.encoding import encode_records
from glasshouse.workloads.lora.lora_params import LoraParams
from simulators import hub_tokenizers
from tools.trl_encoding import Rows, encoded_by_trl, labelled

pytest.importorskip("trl")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # what TRL has to say of itself

ASKED = {"role": "user", "content": "What comes after 4711?"}
SAID = {"role": "assistant", "content": "It is 4712, as everyone knows."}
CALLED = {"role": "assistant", "content": None, "tool_calls": [{"name": "dose", "arguments": {"mg": 5, "at": "night"}}]}
OTHER = {"role": "assistant", "content": "", "tool_calls": [{"name": "ring", "arguments": {"room": 12}}]}
TOOLS = [{"type": "function", "function": {"name": "dose", "parameters": {"type": "object"}}}]
TEXTS = [{"prompt": f"{number} comes before", "completion": f" {number + 1}"} for number in range(5)]
ALIKE = [{"messages": [ASKED, CALLED], "tools": TOOLS}, {"messages": [ASKED, SAID]}]
MIXED = [*ALIKE, {"messages": [ASKED, OTHER, ASKED, SAID]}]


def saved(rows: list[dict[str, Any]], how: str, folder: Path) -> tuple[Any, str]:
    """Save rows by `datasets`, as people do; return what `datasets` loads from there, and the input's name."""
    from datasets import Dataset, DatasetDict, disable_progress_bars, load_dataset, load_from_disk

    disable_progress_bars()
    mixed = {"on_mixed_types": "use_json"} if how == "saved with JSON" else {}
    data = Dataset.from_list(rows, **mixed)
    cache = {"split": "train", "cache_dir": str(folder / "cache")}
    if how == "one file":
        data.to_parquet(folder / "in.parquet")
        return load_dataset("parquet", data_files=str(folder / "in.parquet"), **cache), "in.parquet"
    if how == "parts":
        (folder / "in").mkdir()
        for part in range(2):
            data.shard(2, part, contiguous=True).to_parquet(folder / f"in/train-{part:05}-of-00002.parquet")
        return load_dataset(str(folder / "in"), **cache), "in"
    DatasetDict(train=data, test=data).save_to_disk(folder / "in", num_shards={"train": 2, "test": 1})
    return load_from_disk(str(folder / "in"))["train"], "in/train"


def ours(folder: Path, data: str, tokenizer: Any, **options: Any) -> Rows:
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    found = read_records(lambda name: (folder / name).open("rb"), names, data)
    params = LoraParams.read({"model": "config:qwen2-tiny", "max_length": 1 << 20, **options})
    return labelled(encode_records(found, data, tokenizer, params))


@pytest.mark.parametrize(
    ("kind", "rows", "how", "options"),
    [
        ("qwen", ALIKE, "one file", {}),
        ("qwen", MIXED, "saved with JSON", {}),
        ("qwen", MIXED[::-1], "saved with JSON", {}),
        ("llama", [{"messages": [ASKED, SAID] * count} for count in (1, 3, 2)], "parts", {"assistant_only_loss": True}),
        ("gpt2", TEXTS, "parts", {}),
        ("gemma", [{"text": "a b c"}, {"text": "d\n"}], "saved", {}),
    ],
)
def test_ids_and_labels_of_tables_are_trls(
    kind: str, rows: list[dict[str, Any]], how: str, options: dict[str, bool], tmp_path: Path
) -> None:
    loaded, data = saved(rows, how, tmp_path)
    tokenizer = hub_tokenizers.tokenizer(kind)
    theirs = encoded_by_trl(loaded, hub_tokenizers.tokenizer(kind), tmp_path / "out", max_length=1 << 20, **options)
    assert len(theirs) == len(rows)
    assert ours(tmp_path, data, tokenizer, **options) == theirs


def test_members_that_a_table_fills_up_with_nulls_are_left_out_as_trl_tells_people_to(tmp_path: Path) -> None:
    """TRL itself writes them into the prompt: a call gets the arguments of every other call, each null."""
    from datasets import Dataset
    from trl.trainer.utils import remove_none_values

    loaded, data = saved(MIXED, "one file", tmp_path)
    tokenizer = hub_tokenizers.tokenizer("qwen")
    found = ours(tmp_path, data, tokenizer)
    cleaned = [remove_none_values(row) for row in loaded]
    for row in cleaned:
        for message in row["messages"]:
            message.setdefault("content", None)
    mended = Dataset.from_list(cleaned, on_mixed_types="use_json")
    assert found == encoded_by_trl(mended, tokenizer, tmp_path / "mended", max_length=1 << 20)
    assert found != encoded_by_trl(loaded, tokenizer, tmp_path / "raw", max_length=1 << 20)
    assert "null" not in tokenizer.decode(found[0][0])
