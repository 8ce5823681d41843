"""The parameters of `lora`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Annotated, Any, Self

from glasshouse.workloads.job_keys import FLAG, choice, integer, number, text, texts
from glasshouse.workloads.lora.model_files import QWEN2
from glasshouse.workloads.params import COUNT, NAME, SECONDS, DeviceParams

_HUB = "[A-Za-z0-9][A-Za-z0-9._-]*"
_MODEL = text(
    rf"config:(?:{'|'.join(map(re.escape, QWEN2))})|inputs:[^\x00]+|{_HUB}(?:/{_HUB})?",
    "one of " + ", ".join(f"config:{known}" for known in QWEN2) + ", or inputs:FOLDER, or a hub id",
)


@dataclass(frozen=True, kw_only=True)
class LoraParams(DeviceParams):
    """Parameters of `lora`."""

    TARGET = ("steps", 100)

    model: Annotated[str, _MODEL, "`config:NAME` (random weights), `inputs:FOLDER` (a packed model) or a hub id."]
    revision: Annotated[str | None, NAME, "Of a hub id; name a commit, so that it cannot change under you."] = None
    base_name: Annotated[
        str | None,
        NAME,
        "What the adapter's file calls its base, for peft: a hub id, or a folder beside them; by default the hub "
        "id, the last part of the packed folder's name, or the architecture's name.",
    ] = None
    data: Annotated[
        str,
        NAME,
        "Input with one JSON object a line, a table (`.parquet`), or a folder of tables or of a saved data set: "
        "`messages`; or `prompt` and `completion`; or `text`; or `instruction`, "
        "`output` and perhaps `input`.",
    ] = "train.jsonl"
    rank: Annotated[int, integer(1, 4096), "Of the adapter."] = 4
    alpha: Annotated[int, integer(1, 65536), "Updates are scaled by alpha / rank."] = 8
    dropout: Annotated[float, number(0.0, 0.9), "Of the adapter's input."] = 0.0
    target_modules: Annotated[
        tuple[str, ...],
        texts(NAME, "module names", min_items=1, distinct=True),
        "Names of the linear layers that get an adapter.",
    ] = ("q_proj", "v_proj")
    dtype: Annotated[
        str, choice("float32", "bfloat16"), "Of the base weights; the adapter itself is trained in float32."
    ] = "bfloat16"
    learning_rate: Annotated[float, number(1e-9, 10.0), "Of AdamW, constant after the warm-up."] = 2e-4
    weight_decay: Annotated[float, number(0.0, 1.0), "Of AdamW."] = 0.0
    warmup_steps: Annotated[int, integer(0, 10**9), "Steps of linear warm-up."] = 0
    batch_size: Annotated[int, integer(1, 65536), "Examples in a step."] = 4
    max_length: Annotated[
        int, integer(8, 1 << 20), "Tokens of an example; longer ones are cut, those left with nothing to learn skipped."
    ] = 512
    completion_only_loss: Annotated[
        bool, FLAG, "Of records with a prompt, only the tokens after it count in the loss."
    ] = True
    assistant_only_loss: Annotated[
        bool, FLAG, "Of chats, only the assistant's turns count in the loss; the chat template has to mark them."
    ] = False
    gradient_clip: Annotated[float, number(0.0, 1e6), "Largest norm of the gradient; 0 turns clipping off."] = 1.0
    steps: Annotated[int | None, COUNT, "When to stop; 100 where neither this nor `seconds` is given."] = None
    seconds: Annotated[float | None, SECONDS, "When to stop, if that comes first."] = None
    checkpoint_every: Annotated[int, integer(0, 10**9), "Steps between checkpoints; 0 for none."] = 0
    fail_on_nonfinite: Annotated[bool, FLAG, "End with `nonfinite-loss` when the loss is no finite number."] = True
    gradient_checkpointing: Annotated[bool, FLAG, "Trade time for memory."] = False

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        found = super().read(values)
        scheme, _, rest = found.model.partition(":")
        # The last part alone: `models/x` would name another model on the hub.
        name = PurePosixPath(rest).name if scheme in ("config", "inputs") else found.model
        return replace(found, base_name=found.base_name or name)
