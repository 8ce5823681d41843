"""`lora`: a low-rank adapter on a causal language model, with transformers and peft."""

from __future__ import annotations

import importlib
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from glasshouse.errors import Code, RunError
from glasshouse.task.handle import Task
from glasshouse.task.result import Result, decimal
from glasshouse.workloads.params import LoraParams

__all__ = ["run", "warm"]

_IGNORED = -100  # the label that the loss passes over


def warm() -> None:
    """Import what every `lora` job needs, with the parts that the libraries would load at first use."""
    # An optimiser's first step loads torch._dynamo; transformers loads a model's code when it is named.
    for name in ("torch._dynamo", "safetensors.torch", "peft", "transformers"):
        importlib.import_module(name)
    import transformers

    _ = (transformers.AutoModelForCausalLM, transformers.AutoTokenizer, transformers.Qwen2ForCausalLM)


def run(task: Task, params: LoraParams, _on_stop: Callable[[Callable[[], None]], None]) -> Result:
    """Train an adapter and save it.

    Raises:
        RunError: `nonfinite-loss`.
        PlatformError: `device-missing` or `model-not-found`.
        UsageError: for inputs that are missing or malformed.
    """
    import torch

    from glasshouse.workloads.builtin import compute, models
    from glasshouse.workloads.builtin.instructions import encode_records, lines_of

    # Addressed to peft's developers, not to the owner who reads the log.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    device = compute.choose(params.device)
    (compute.fix if params.deterministic else compute.seed_only)(params.seed, threads=params.threads)
    task.size(params.data)  # a missing input is said before the model is loaded
    model, tokenizer = models.base_model(task, params, device)
    with task.open(params.data) as lines:
        examples = encode_records(lines_of(lines), tokenizer, max_length=params.max_length, name=params.data)
    torch.manual_seed(params.seed)  # the adapter's start does not depend on how the base was made
    model.config.use_cache = False
    model = models.attach(model, params)
    if params.gradient_checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    _say(
        f"lora: {models.trainable(model):,} trainable parameters on {params.model} ({params.dtype}); "
        f"{len(examples)} examples, {examples.skipped} skipped; {compute.describe(device)}"
    )
    if params.slots is not None:
        lengths = {len(examples.example(index)[0]) for index in range(len(examples))}
        task.tokens_per_step = params.batch_size * lengths.pop() if len(lengths) == 1 else None
    work = _Training(task, params, model, _batches(torch, examples, tokenizer.pad_id, params, device), device)
    result = work.train()
    weights = models.weights_bytes(model)
    digest = task.save_bytes("adapter_model.safetensors", weights)
    task.save_bytes("adapter_config.json", models.config_bytes(model))
    _say(f"lora: adapter_model.safetensors sha256 {digest}")
    return Result(
        unit="step",
        done=result.done,
        elapsed_us=result.elapsed_us,
        stop_reason=result.stop_reason,
        loss_first=result.loss_first,
        loss_final=result.loss_final,
        trainable=models.trainable(model),
        digests={"adapter": digest},
    )


class _Training:
    """The loop. Losses are looked at one step late: a GPU is never waited for with nothing left to do."""

    def __init__(
        self, task: Task, params: LoraParams, model: Any, batches: Iterator[dict[str, Any]], device: Any
    ) -> None:
        import torch

        from glasshouse.workloads.measurement import phases

        self._phase = phases.ranges(params.profile)
        self._task, self._params, self._model, self._batches, self._device = task, params, model, batches, device
        self._torch = torch
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, lr=params.learning_rate, weight_decay=params.weight_decay)

    def train(self) -> Result:
        """Train until a target is reached or the owner stops the job."""
        from glasshouse.workloads.builtin import compute

        task, params = self._task, self._params
        task.progress(0, params.steps)
        compute.wait(self._device)
        started = time.perf_counter()
        first: Any = None
        loss: Any = None
        done, reason = 0, "steps"
        while params.steps is None or done < params.steps:
            if task.should_stop():
                reason = task.stop_reason
                break
            if params.seconds is not None and time.perf_counter() - started >= params.seconds:
                reason = "time"
                break
            before, loss = loss, self._step(done)
            done += 1
            self._check(before, done - 1)
            first = loss if first is None else first
            task.progress(done, params.steps, loss)
            if params.checkpoint_every and done % params.checkpoint_every == 0:
                self._check(loss, done)
                with self._phase("checkpoint"):
                    self._checkpoint(done)
        self._check(loss, done)
        compute.wait(self._device)
        elapsed_us = int((time.perf_counter() - started) * 1e6)
        task.progress(done, done, loss)
        return Result(
            unit="step",
            done=done,
            elapsed_us=elapsed_us,
            stop_reason=reason,
            loss_first=None if first is None else decimal(first),
            loss_final=None if loss is None else decimal(loss),
        )

    def _step(self, done: int) -> Any:
        params = self._params
        if done < params.warmup_steps:
            for group in self._optimizer.param_groups:
                group["lr"] = params.learning_rate * (done + 1) / params.warmup_steps
        elif done == params.warmup_steps:
            for group in self._optimizer.param_groups:
                group["lr"] = params.learning_rate
        with self._phase("data"):
            batch = next(self._batches)
        with self._phase("forward"):
            loss = self._model(**batch).loss
        with self._phase("backward"):
            loss.backward()
        with self._phase("optimizer"):
            if params.gradient_clip:
                self._torch.nn.utils.clip_grad_norm_(self._trained, params.gradient_clip)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _check(self, loss: Any, step: int) -> None:
        if loss is not None and self._params.fail_on_nonfinite and not math.isfinite(float(loss)):
            raise RunError(
                Code.NONFINITE_LOSS,
                f"the loss of step {step} is not a finite number",
                hint="lower learning_rate, or look at the data; fail_on_nonfinite = false goes on regardless",
            )

    def _checkpoint(self, done: int) -> None:
        from glasshouse.workloads.builtin import models

        self._task.checkpoint(f"checkpoints/step-{done}/adapter_model.safetensors", models.weights_bytes(self._model))


def _batches(torch: Any, examples: Any, pad_id: int, params: LoraParams, device: Any) -> Iterator[dict[str, Any]]:
    """Yield batches for ever: every epoch in another order, which the seed alone decides."""
    order = torch.Generator().manual_seed(params.seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < params.batch_size:
            waiting += torch.randperm(len(examples), generator=order).tolist()
        chosen, waiting = waiting[: params.batch_size], waiting[params.batch_size :]
        rows = [examples.example(index) for index in chosen]
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.full((len(rows), longest), pad_id, dtype=torch.long)
        labels = torch.full((len(rows), longest), _IGNORED, dtype=torch.long)
        mask = torch.zeros((len(rows), longest), dtype=torch.long)
        for row, (tokens, prompt) in enumerate(rows):
            values = torch.tensor(tokens, dtype=torch.long)
            ids[row, : len(tokens)] = values
            mask[row, : len(tokens)] = 1
            start = prompt if params.answers_only else 0
            labels[row, start : len(tokens)] = values[start:]
        yield {
            "input_ids": ids.to(device, non_blocking=True),
            "attention_mask": mask.to(device, non_blocking=True),
            "labels": labels.to(device, non_blocking=True),
        }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - the sealed log
