"""`lora`: a low-rank adapter on a causal language model, with transformers and peft."""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from glasshouse.task.handle import Task
from glasshouse.workloads.job_keys import job_invalid
from glasshouse.workloads.lora.lora_params import LoraParams
from glasshouse.workloads.params import Example, PlainFile
from glasshouse.workloads.process.job_control import JobControl, Result

if TYPE_CHECKING:
    from glasshouse.workloads.lora.encoding import Examples

FRAMEWORKS = ("torch", "transformers", "peft", "safetensors")
EXAMPLE = Example(
    params={"model": "config:qwen2-tiny", "data": "train.jsonl", "max_steps": 20},
    files={
        "train.jsonl": "".join(
            json.dumps({"instruction": f"What comes after {n}?", "output": str(n + 1)}) + "\n" for n in range(1, 33)
        )
    },
)

Params = LoraParams


def examine(params: LoraParams, files: Mapping[str, PlainFile]) -> list[str]:
    """Check model and records; raises as `registry.examine`."""
    from glasshouse.workloads.lora import adapter_files, data_check, model_files

    params.check_checkpoints(params.max_steps)
    if params.device == "cpu" and params.without_gradients:
        raise job_invalid(f"params.device is a CPU, on which bitsandbytes does not train {params.without_gradients}")
    targets = () if params.adapter is not None else params.target_modules
    notes = model_files.check_model(params.model, targets, files)
    if params.adapter is not None:
        adapter_files.check_adapter(params, files)
    return notes + data_check.check_data(params, files)


def requirements(params: LoraParams, names: Iterable[str]) -> dict[str, str]:
    """Return what reading the data and holding the model requires, and what would do instead."""
    from glasshouse.workloads.lora import data_forms

    names = list(names)
    found = dict(params.distributions)
    for data in filter(None, (params.data, params.eval_data)):
        found |= data_forms.needed(names, data)
    return found


def warm() -> None:
    """Import what every `lora` job needs, with the parts that the libraries would load at first use."""
    # Transformers imports it where it is installed, for seconds and much memory, and nothing here needs it.
    sys.modules.setdefault("datasets", None)  # type: ignore[arg-type]  # how Python's import has it
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it, and it tells what it could have
    # An optimiser's first step loads torch._dynamo; transformers loads a model's code when it is named.
    for name in ("torch._dynamo", "safetensors.torch", "peft", "transformers"):
        importlib.import_module(name)
    import transformers

    _ = (transformers.AutoModelForCausalLM, transformers.AutoTokenizer, transformers.Qwen2ForCausalLM)
    _ = transformers.Trainer


def prepare(_task: Task, _params: LoraParams) -> None:
    """Do nothing: every rank reads inputs for itself."""


def run(task: Task, params: LoraParams, _control: JobControl) -> Result:
    """Train an adapter and save it.

    Raises:
        RunError: `nonfinite-loss`.
        PlatformError: `device-missing` or `model-not-found`.
        UsageError: for inputs that are missing or malformed.
    """
    import torch

    from glasshouse.workloads.builtin import resumable_trainer, training
    from glasshouse.workloads.lora import adapter_files, batches, lora_trainer, models
    from glasshouse.workloads.lora.data_forms import data_files
    from glasshouse.workloads.lora.encoding import padding

    # Addressed to the developers of transformers and peft, not to the owner who reads the log.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    warnings.filterwarnings("ignore", "MatMul8bitLt: inputs will be cast")
    device = training.prepare(params)
    for name in filter(None, (params.data, params.eval_data)):
        data_files(task.inputs, name)  # a missing input is reported before the model is loaded
    model, tokenizer = models.base_model(task, params, device)
    examples = _examples(task, params.data, tokenizer, params, model)
    evaluated = None if params.eval_data is None else _examples(task, params.eval_data, tokenizer, params, model)
    torch.manual_seed(params.seed)  # the adapter's start does not depend on how the base was made
    model.config.use_cache = False
    if params.packing and batches.leaks(model):
        raise job_invalid(
            "params.packing: with this model, examples in one row would see each other", hint="set packing = false"
        )
    before = None
    if params.adapter is not None:
        settings = adapter_files.settings(task.open, task.inputs, params)
        before = settings, task.tensors(f"{params.adapter.rstrip('/')}/{adapter_files.WEIGHTS}", torch)
    model = models.attach(model, params, before)
    if params.gradient_checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained, held_out = _split(len(examples), params)
    lengths = [end - begin for begin, end in itertools.pairwise([0, *examples.ends])]
    rows = batches.packed(lengths, trained, params.max_length) if params.packing else [[number] for number in trained]
    # Of several ranks, each has all of the model and a part of each batch; the first one has the say.
    log = training.log if os.environ.get("RANK", "0") == "0" else (lambda _text: None)
    log(
        f"lora: {training.trainable(model):,} trainable parameters on {params.model} ({params.held_in}); {examples}"
        + (f", packed into {len(rows):,} rows" if params.packing else "")
        + (f"; {len(held_out):,} of them held out to evaluate on" if held_out else "")
        + (f"; evaluated on {len(evaluated):,} others" if evaluated is not None else "")
        + f"; {training.describe(device)}"
    )
    if params.slots is not None:
        examples_in_step = params.per_device_train_batch_size * params.gradient_accumulation_steps
        same = len(set(lengths)) == 1 and not params.packing and len(rows) % examples_in_step == 0
        task.tokens_per_step = examples_in_step * lengths[0] if same else None
    if evaluated is not None:
        tests = batches.Rows(evaluated, [[number] for number in range(len(evaluated))])
    else:
        tests = batches.Rows(examples, [[number] for number in held_out])
    trainer = lora_trainer.LoraTrainer(
        task,
        params,
        model,
        device,
        train_dataset=batches.Rows(examples, rows),
        eval_dataset=tests if params.evaluates else None,
        data_collator=batches.collator(padding(tokenizer), packing=params.packing),
    )
    result = replace(trainer.fit(), trainable=training.trainable(model))
    if not trainer.is_world_process_zero():
        return result
    digest, _ = (task.save_bytes(name, data) for name, data in models.files(model).items())
    if history := resumable_trainer.history(trainer):
        task.save_bytes("log_history.json", (json.dumps(history, indent=2) + "\n").encode())
    log(f"lora: adapter_model.safetensors sha256 {digest}")
    return replace(result, digests={"adapter": digest})


def _examples(task: Task, name: str, tokenizer: Any, params: LoraParams, model: Any) -> Examples:
    """Return the encoded records of an input, which the model has embeddings and positions for; raises `UsageError`."""
    from glasshouse.workloads.lora.data_forms import read_records
    from glasshouse.workloads.lora.encoding import check_ids, check_lengths, encode_records

    examples = encode_records(read_records(task.open, task.inputs, name), name, tokenizer, params)
    check_ids(examples, model.get_input_embeddings().num_embeddings, name)
    check_lengths(examples, model.config.get_text_config().to_dict(), name)
    return examples


def _split(count: int, params: LoraParams) -> tuple[list[int], list[int]]:
    """Return the numbers of the examples to train on, and of those held out; raises `UsageError`."""
    import torch

    if params.eval_split is None:
        return list(range(count)), []
    order = torch.randperm(count, generator=torch.Generator().manual_seed(params.seed)).tolist()
    held = params.held_out(count)
    return sorted(order[held:]), sorted(order[:held])
