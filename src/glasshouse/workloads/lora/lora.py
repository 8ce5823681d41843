"""`lora`: a low-rank adapter on a causal language model, with transformers and peft."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from glasshouse.task.handle import Task
from glasshouse.workloads.lora.lora_params import LoraParams
from glasshouse.workloads.params import Example, PlainFile
from glasshouse.workloads.process.job_control import JobControl, Result

FRAMEWORKS = ("torch", "transformers", "peft", "safetensors")
EXAMPLE = Example(
    params={"model": "config:qwen2-tiny", "data": "train.jsonl", "steps": 20},
    files={
        "train.jsonl": "".join(
            json.dumps({"instruction": f"What comes after {n}?", "output": str(n + 1)}) + "\n" for n in range(1, 33)
        )
    },
)

Params = LoraParams

_IGNORED = -100  # the label that the loss passes over


def examine(params: LoraParams, files: Mapping[str, PlainFile]) -> list[str]:
    """Check model and records; raises as `registry.examine`."""
    from glasshouse.workloads.lora import encoding, model_files

    notes = model_files.check_model(params.model, params.target_modules, files)
    return notes + encoding.check_data(params, files)


def requirements(params: LoraParams, names: Iterable[str]) -> dict[str, str]:
    """Return what reading the data requires, and what would do instead."""
    from glasshouse.workloads.lora import data_forms

    return data_forms.needed(names, params.data)


def warm() -> None:
    """Import what every `lora` job needs, with the parts that the libraries would load at first use."""
    # An optimiser's first step loads torch._dynamo; transformers loads a model's code when it is named.
    for name in ("torch._dynamo", "safetensors.torch", "peft", "transformers"):
        importlib.import_module(name)
    import transformers

    _ = (transformers.AutoModelForCausalLM, transformers.AutoTokenizer, transformers.Qwen2ForCausalLM)


def run(task: Task, params: LoraParams, _control: JobControl) -> Result:
    """Train an adapter and save it.

    Raises:
        RunError: `nonfinite-loss`.
        PlatformError: `device-missing` or `model-not-found`.
        UsageError: for inputs that are missing or malformed.
    """
    import torch

    from glasshouse.workloads.builtin import training
    from glasshouse.workloads.lora import models
    from glasshouse.workloads.lora.data_forms import data_files, read_records
    from glasshouse.workloads.lora.encoding import check_ids, encode_records, padding

    # Addressed to peft's developers, not to the owner who reads the log.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    device = training.prepare(params)
    data_files(task.inputs, params.data)  # a missing input is reported before the model is loaded
    model, tokenizer = models.base_model(task, params, device)
    found = read_records(task.open, task.inputs, params.data)
    examples = encode_records(found, params.data, tokenizer, params)
    check_ids(examples, model.get_input_embeddings().num_embeddings, params.data)
    torch.manual_seed(params.seed)  # the adapter's start does not depend on how the base was made
    model.config.use_cache = False
    model = models.attach(model, params)
    if params.gradient_checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    training.log(
        f"lora: {training.trainable(model):,} trainable parameters on {params.model} ({params.dtype}); "
        f"{examples}; {training.describe(device)}"
    )
    if params.slots is not None:
        lengths = {len(examples.example(index)[0]) for index in range(len(examples))}
        task.tokens_per_step = params.batch_size * lengths.pop() if len(lengths) == 1 else None
    result = _train(task, params, model, _batches(torch, examples, padding(tokenizer), params, device), device)
    digest = task.save_bytes("adapter_model.safetensors", models.weights_bytes(model))
    task.save_bytes("adapter_config.json", models.config_bytes(model))
    training.log(f"lora: adapter_model.safetensors sha256 {digest}")
    return replace(result, trainable=training.trainable(model), digests={"adapter": digest})


def _train(task: Task, params: LoraParams, model: Any, batches: Iterator[dict[str, Any]], device: Any) -> Result:
    """Take the steps. Losses are checked one step late: a GPU is never waited for with nothing left to do."""
    import torch

    from glasshouse.workloads.builtin import training
    from glasshouse.workloads.lora import models
    from glasshouse.workloads.measurement.measured_steps import ranges

    phase = ranges(params.profile)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=params.learning_rate, weight_decay=params.weight_decay)
    before: Any = None

    def step(done: int) -> Any:
        nonlocal before
        if done <= params.warmup_steps:
            warming = done < params.warmup_steps
            for group in optimizer.param_groups:
                group["lr"] = (
                    params.learning_rate * (done + 1) / params.warmup_steps if warming else params.learning_rate
                )
        with phase("data"):
            batch = next(batches)
        with phase("forward"):
            loss = model(**batch).loss
        with phase("backward"):
            loss.backward()
        with phase("optimizer"):
            if params.gradient_clip:
                torch.nn.utils.clip_grad_norm_(trained, params.gradient_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        check(before, done)
        before = loss.detach()
        return before

    def after(done: int, loss: Any, _reported: bool) -> None:
        if params.checkpoint_every and done % params.checkpoint_every == 0:
            check(loss, done)
            with phase("checkpoint"):
                name = f"checkpoints/step-{done}/adapter_model.safetensors"
                task.checkpoint(name, models.weights_bytes(model))

    def check(loss: Any, done: int) -> None:
        if params.fail_on_nonfinite:
            hint = "lower learning_rate, or look at the data; fail_on_nonfinite = false goes on regardless"
            training.check_finite(loss, f"step {done}", hint)

    return training.loop(task, device, params, step=step, after=after, check=check)


def _batches(torch: Any, examples: Any, pad_id: int, params: LoraParams, device: Any) -> Iterator[dict[str, Any]]:
    """Yield batches for ever: every epoch in another order, which the seed alone decides."""
    order = torch.Generator().manual_seed(params.seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < params.batch_size:
            waiting += torch.randperm(len(examples), generator=order).tolist()
        chosen, waiting = waiting[: params.batch_size], waiting[params.batch_size :]
        rows = [examples.example(index) for index in chosen]
        shape = (len(rows), max(len(ids) for ids, _ in rows))
        ids = torch.full(shape, pad_id, dtype=torch.long)
        labels = torch.full(shape, _IGNORED, dtype=torch.long)
        mask = torch.zeros(shape, dtype=torch.long)
        for row, (tokens, counted) in enumerate(rows):
            values = torch.tensor(tokens, dtype=torch.long)
            ids[row, : len(tokens)] = values
            mask[row, : len(tokens)] = 1
            labels[row, : len(tokens)] = values.masked_fill(~torch.tensor(counted, dtype=torch.bool), _IGNORED)
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        yield {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
