"""The parameters of `lora`: the names and meanings of transformers' `TrainingArguments` and peft's `LoraConfig`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Self

from glasshouse.workloads.job_keys import (
    FLAG,
    Rule,
    at_most_one,
    choice,
    either,
    integer,
    invalid,
    job_invalid,
    needs,
    number,
    text,
    texts,
)
from glasshouse.workloads.lora.known_elsewhere import NOT_HERE
from glasshouse.workloads.lora.model_files import QWEN2
from glasshouse.workloads.params import COUNT, NAME, SECONDS, DeviceParams

_HUB = "[A-Za-z0-9][A-Za-z0-9._-]*"
_MODEL = text(
    rf"config:(?:{'|'.join(map(re.escape, QWEN2))})|inputs:[^\x00]+|{_HUB}(?:/{_HUB})?",
    "one of " + ", ".join(f"config:{known}" for known in QWEN2) + ", or inputs:FOLDER, or a hub id",
)
ALL_LINEAR = "all-linear"
OF_ADAPTER = ("r", "lora_alpha", "lora_dropout", "target_modules", "use_dora", "use_rslora")
"""What peft's file of an adapter says too."""
_ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt")
_DECAYING = ("cosine", "linear")
_OF_BITSANDBYTES = ("adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit")
_OPTIMIZERS = ("adafactor", "adamw_torch", "adamw_torch_fused", "sgd", *_OF_BITSANDBYTES)
_OF_EVALUATION = ("early_stopping_patience", "eval_steps", "load_best_model_at_end")
# What each is about, first what it has to be "steps" for.
_STRATEGIES = {
    "save_strategy": ("save_steps",),
    "eval_strategy": ("eval_steps", "early_stopping_patience", "load_best_model_at_end"),
}
_MOST_OTHERS = 5  # outputs beside checkpoints of two files, and those of the last step
_WHEN = choice("no", "steps", "epoch")


def _ends(given: Mapping[str, Any]) -> bool:
    """Return whether the number of steps follows from the parameters and the data."""
    return "max_steps" in given or "num_train_epochs" in given or not ("seconds" in given or "slots" in given)


def _has_horizon(given: Mapping[str, Any], path: str) -> None:
    schedule = given.get("lr_scheduler_type")
    if schedule in _DECAYING and not _ends(given):
        raise job_invalid(
            f"{path}.lr_scheduler_type = {schedule!r} goes down towards the last step, and a job that only the clock "
            "ends has no such step",
            hint="name max_steps beside it, the step at which it would be down, or take constant_with_warmup",
        )


def _has_share(given: Mapping[str, Any], path: str) -> None:
    steps = given.get("warmup_steps")
    if isinstance(steps, float | str) and 0 < float(steps) < 1 and not _ends(given):
        raise job_invalid(
            f"{path}.warmup_steps is a share of the steps, and a job that only the clock ends has no number of them",
            hint="name max_steps beside it, or a whole number of warmup_steps",
        )


_ENDS = {
    "anyOf": [
        {"required": ["max_steps"]},
        {"required": ["num_train_epochs"]},
        {"not": {"anyOf": [{"required": ["seconds"]}, {"required": ["slots"]}]}},
    ]
}
_HORIZON = Rule(
    "A `lr_scheduler_type` that goes down needs `max_steps` or `num_train_epochs` where there is `seconds`.",
    {
        "if": {"properties": {"lr_scheduler_type": {"enum": list(_DECAYING)}}, "required": ["lr_scheduler_type"]},
        "then": _ENDS,
    },
    _has_horizon,
)
_SHARE = Rule(
    "A `warmup_steps` below 1 needs them too.",
    {
        "if": {
            "properties": {"warmup_steps": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}},
            "required": ["warmup_steps"],
        },
        "then": _ENDS,
    },
    _has_share,
)


@dataclass(frozen=True, kw_only=True)
class LoraParams(DeviceParams):
    """Parameters of `lora`."""

    TARGET = ("num_train_epochs", 3.0)
    ENDS = ("max_steps", "num_train_epochs", "seconds", "slots")
    ELSEWHERE: ClassVar[Mapping[str, str]] = NOT_HERE
    RULES = (
        _HORIZON,
        _SHARE,
        at_most_one("max_steps", "num_train_epochs"),
        at_most_one("eval_data", "eval_split"),
        at_most_one("load_in_4bit", "load_in_8bit"),
        at_most_one("adapter", *OF_ADAPTER),
        *(needs(name, "eval_data", "eval_split") for name in _OF_EVALUATION),
        *DeviceParams.RULES,
    )

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
    eval_data: Annotated[str | None, NAME, "Input with records to evaluate on, which are not trained on."] = None
    eval_split: Annotated[
        float | None, number(0.001, 0.9), "Share of the records of `data`, chosen by the seed, to evaluate on instead."
    ] = None

    # The adapter, as peft's LoraConfig names it.
    r: Annotated[int, integer(1, 4096), "Rank of the adapter."] = 4
    lora_alpha: Annotated[int, integer(1, 65536), "Updates are scaled by lora_alpha / r."] = 8
    lora_dropout: Annotated[float, number(0.0, 0.9), "Of the adapter's input."] = 0.0
    target_modules: Annotated[
        str | tuple[str, ...],
        either(choice(ALL_LINEAR), texts(NAME, "module names", min_items=1, distinct=True)),
        'Names of the linear layers that get an adapter, or "all-linear": all but the output\'s.',
    ] = ("q_proj", "v_proj")
    use_dora: Annotated[bool, FLAG, "Train the length of each weight's columns too (DoRA)."] = False
    use_rslora: Annotated[bool, FLAG, "Scale by lora_alpha / √r instead."] = False
    adapter: Annotated[
        str | None,
        NAME,
        "Input folder with an adapter of this model, as peft saves it, to go on from; what is above is its own then.",
    ] = None

    # The base.
    dtype: Annotated[
        str, choice("float32", "bfloat16"), "Of the base weights; the adapter itself is trained in float32."
    ] = "bfloat16"
    load_in_4bit: Annotated[bool, FLAG, "Hold the base in 4 bits a weight; needs bitsandbytes on the machine."] = False
    load_in_8bit: Annotated[bool, FLAG, "Hold the base in 8 bits a weight; needs bitsandbytes on the machine."] = False
    bnb_4bit_quant_type: Annotated[str, choice("nf4", "fp4"), "With `load_in_4bit`."] = "nf4"
    bnb_4bit_use_double_quant: Annotated[bool, FLAG, "With `load_in_4bit`: the scales in 8 bits too."] = False

    # The examples, as TRL's SFTConfig names it.
    max_length: Annotated[
        int, integer(8, 1 << 20), "Tokens of an example; longer ones are cut, those left with nothing to learn skipped."
    ] = 512
    packing: Annotated[
        bool,
        FLAG,
        "Fill rows of max_length tokens with whole examples, which do not see each other, and pad nothing; a batch of "
        "several rows is one long row, so take few, and accumulate.",
    ] = False
    completion_only_loss: Annotated[
        bool, FLAG, "Of records with a prompt, only the tokens after it count in the loss."
    ] = True
    assistant_only_loss: Annotated[
        bool, FLAG, "Of chats, only the assistant's turns count in the loss; the chat template has to mark them."
    ] = False

    # The training, as transformers' TrainingArguments names it.
    max_steps: Annotated[int | None, COUNT, "Steps of the optimiser after which to stop."] = None
    num_train_epochs: Annotated[
        float | None, number(0.001, 1e6), "Or how often to go through the data; 3 where the job has no other end."
    ] = None
    seconds: Annotated[
        float | None, SECONDS, "When to stop, if that comes first; a last evaluation comes after it."
    ] = None
    per_device_train_batch_size: Annotated[int, integer(1, 65536), "Examples in a batch, of each rank."] = 4
    gradient_accumulation_steps: Annotated[int, integer(1, 65536), "Batches in a step."] = 1
    learning_rate: Annotated[float, number(1e-9, 10.0), "The highest of the schedule."] = 2e-4
    lr_scheduler_type: Annotated[
        str, choice(*_ENDLESS, *_DECAYING), "Where the learning rate goes after the warm-up."
    ] = "constant_with_warmup"
    warmup_steps: Annotated[float, number(0, 1e9), "Steps of linear warm-up; below 1, their share of all steps."] = 0.0
    optim: Annotated[str, choice(*_OPTIMIZERS), "The optimiser; those of 8 bits and paged ones need bitsandbytes."] = (
        "adamw_torch_fused"
    )
    weight_decay: Annotated[float, number(0.0, 1.0), "Of the optimiser."] = 0.0
    adam_beta1: Annotated[float, number(0.0, 0.999999), "Of AdamW."] = 0.9
    adam_beta2: Annotated[float, number(0.0, 0.999999), "Of AdamW."] = 0.999
    adam_epsilon: Annotated[float, number(0.0, 1.0), "Of AdamW."] = 1e-8
    max_grad_norm: Annotated[float, number(0.0, 1e6), "Largest norm of the gradient; 0 turns clipping off."] = 1.0
    gradient_checkpointing: Annotated[bool, FLAG, "Trade time for memory."] = False
    fail_on_nonfinite: Annotated[
        bool, FLAG, "End with `nonfinite-loss` when loss, gradient or adapter is no finite number."
    ] = True
    logging_steps: Annotated[int, COUNT, "Steps between two lines of the log."] = 10
    save_strategy: Annotated[
        str | None, _WHEN, "When to save a checkpoint of the adapter; at `save_steps` where that is given, else no."
    ] = None
    save_steps: Annotated[int | None, COUNT, "Steps between checkpoints; 500 where they go by steps."] = None
    eval_strategy: Annotated[
        str | None,
        _WHEN,
        "When to evaluate; at `eval_steps` where that is given, else after each epoch where there is something to "
        "evaluate on.",
    ] = None
    eval_steps: Annotated[int | None, COUNT, "Steps between evaluations; 500 where they go by steps."] = None
    per_device_eval_batch_size: Annotated[int, integer(1, 65536), "Examples in a batch of an evaluation."] = 8
    load_best_model_at_end: Annotated[bool, FLAG, "Return the adapter of the best evaluation, not the last one."] = (
        False
    )
    early_stopping_patience: Annotated[
        int | None, COUNT, "Stop after so many evaluations in a row without a better loss."
    ] = None
    early_stopping_threshold: Annotated[float, number(0.0, 1e6), "By how much a loss has to be better."] = 0.0

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        found = super().read(values)
        scheme, _, rest = found.model.partition(":")
        # The last part alone: `models/x` would name another model on the hub.
        name = PurePosixPath(rest).name if scheme in ("config", "inputs") else found.model
        evaluated = "epoch" if found.evaluates else "no"
        found = replace(
            found,
            base_name=found.base_name or name,
            save_strategy=found.save_strategy or ("steps" if found.save_steps else "no"),
            save_steps=found.save_steps or 500,
            eval_strategy=found.eval_strategy or ("steps" if found.eval_steps else evaluated),
            eval_steps=found.eval_steps or 500,
        )
        for strategy, needed in _STRATEGIES.items():
            if getattr(found, strategy) == "no":
                without = [name for name in needed if values.get(name)]
            else:
                without = [name for name in needed[:1] if values.get(name) and getattr(found, strategy) != "steps"]
            if without:
                raise invalid(f"params.{without[0]}", f"absent where {strategy} is {getattr(found, strategy)!r}")
        if found.eval_strategy != "no" and not found.evaluates:
            raise job_invalid(
                f"params.eval_strategy is {found.eval_strategy!r}, and there is nothing to evaluate on",
                hint="name eval_data, an input with other records, or eval_split, a share of data",
            )
        return found

    def held_out(self, count: int) -> int:
        """Return how many of `count` examples `eval_split` holds out; raises `UsageError` where none is left."""
        held = max(1, round(count * (self.eval_split or 0)))
        if held >= count:
            raise job_invalid(f"params.eval_split = {self.eval_split} of {count} examples leaves none to train on")
        return held

    def check_checkpoints(self, steps: int | None) -> None:
        """Refuse more checkpoints than outputs may come back; raises `UsageError` (`job-invalid`)."""
        epochs = self.num_train_epochs or 0
        if self.save_strategy == "epoch" and 2 * epochs + _MOST_OTHERS > self.max_outputs:
            raise job_invalid(
                f"params.num_train_epochs = {epochs:g}, each saved, are more checkpoints, of two files each, than the "
                f"{self.max_outputs} outputs that may come back",
                hint='set save_strategy = "steps" and save_steps',
            )
        if (
            self.save_strategy == "steps"
            and steps
            and 2 * (steps // (self.save_steps or 1)) + _MOST_OTHERS > self.max_outputs
        ):
            raise job_invalid(
                f"params.save_steps = {self.save_steps}: of {steps} steps that are more checkpoints, of two files "
                f"each, than the {self.max_outputs} outputs that may come back",
                hint=f"set save_steps to {2 * steps // max(1, self.max_outputs - _MOST_OTHERS) + 1} or more",
            )

    @property
    def evaluates(self) -> bool:
        """Whether there is something to evaluate on."""
        return self.eval_data is not None or self.eval_split is not None

    @property
    def in_few_bits(self) -> bool:
        """Whether the base is held in 4 or 8 bits a weight."""
        return self.load_in_4bit or self.load_in_8bit

    @property
    def without_gradients(self) -> str:
        """What bitsandbytes (0.50) does not train on a CPU; empty where it does.

        With AVX-512, once a model was evaluated, layers in 4 bits pass on no gradient; in 8 bits, DoRA finds no scale.
        """
        if self.load_in_8bit and self.use_dora:
            return "use_dora with load_in_8bit"
        return "load_in_4bit" if self.load_in_4bit else ""

    @property
    def held_in(self) -> str:
        """In what the base is held, for people."""
        bits = "4 bits, " if self.load_in_4bit else "8 bits, " if self.load_in_8bit else ""
        return bits + self.dtype

    @property
    def distributions(self) -> Mapping[str, str]:
        """What the machine has to have beside the frameworks, and what would do instead."""
        if self.in_few_bits or self.optim in _OF_BITSANDBYTES:
            return {"bitsandbytes>=0.46": "take load_in_4bit, load_in_8bit and the optim of 8 bits out of [params]"}
        return {}
