"""Trains an adapter: transformers' `Trainer`, made to stop as a job does, and to fail where a number is none.

Laws: no adapter leaves that is not finite, unless the job asks for it; ranks stop at the same step. Left to itself,
`Trainer` returns normally from a loss that is not a number, with an adapter that is none.
Source: docs/adr/0038-lora-trains-with-trainer.md.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file, save
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from glasshouse.errors import Code, RunError
from glasshouse.task.handle import Task, decimal
from glasshouse.workloads.builtin import training
from glasshouse.workloads.builtin.resumable_trainer import OF_THE_CLOCK, ResumableTrainer
from glasshouse.workloads.lora import models
from glasshouse.workloads.lora.lora_params import LoraParams
from glasshouse.workloads.measurement.measured_steps import ranges
from glasshouse.workloads.process.job_control import Result

_NO_END = 2**31 - 1
# Of the five seconds that a job has when its owner stops it, those in which its last checkpoint may begin.
_ENDING_S = 4.0
_SAME = (
    "adam_beta1", "adam_beta2", "adam_epsilon", "eval_steps", "eval_strategy", "gradient_accumulation_steps",
    "learning_rate", "logging_steps", "lr_scheduler_type", "max_grad_norm", "optim",
    "per_device_eval_batch_size", "per_device_train_batch_size", "save_steps", "save_strategy", "seed",
    "warmup_steps", "weight_decay",
)  # fmt: skip


def arguments(params: LoraParams, task: Task, device: torch.device) -> TrainingArguments:
    """Return a job's parameters as `Trainer` takes them."""
    if params.max_steps is not None or params.num_train_epochs is None:
        end: dict[str, Any] = {"max_steps": params.max_steps or _NO_END}
    else:
        end = {"num_train_epochs": params.num_train_epochs}
    found = TrainingArguments(
        output_dir=str(task.workspace / "trainer"),  # where nothing is written: `_save_checkpoint` is ours
        **end,
        **{name: getattr(params, name) for name in _SAME},
        use_cpu=device.type == "cpu",
        disable_tqdm=True,
        report_to=[],
        logging_nan_inf_filter=False,  # on, it would put the average of earlier losses in the place of one that is none
        remove_unused_columns=False,
        dataloader_pin_memory=device.type == "cuda",
        ddp_find_unused_parameters=False,
        accelerator_config={"non_blocking": device.type == "cuda"},
        prediction_loss_only=True,
    )
    # One process has one device: left to itself, Trainer splits each batch over all that it sees.
    found._n_gpu = min(found.n_gpu, 1)
    return found


class LoraTrainer(ResumableTrainer):
    """Trains the adapter of one job."""

    weight_names = ("adapter.safetensors", "best.safetensors")

    def __init__(self, task: Task, params: LoraParams, model: Any, device: torch.device, **given: Any) -> None:
        self.task, self.params = task, params
        self.step_loss: Any = None  # of the step that is being taken: the sum over its batches
        self._phase = ranges(params.profile)
        self._saved = 0  # the step of the last checkpoint
        self._unchecked: list[tuple[str, int, training.Later]] = []
        self.job = _Job(self)
        super().__init__(model=model, args=arguments(params, task, device), callbacks=[self.job], **given)
        self.remove_callback(PrinterCallback)
        self._clip = self.accelerator.clip_grad_norm_
        self.accelerator.clip_grad_norm_ = self._clipped
        if params.profile:
            self.accelerator.backward = self._named("backward", self.accelerator.backward)

    def fit(self) -> Result:
        """Train until a target of the job's parameters is reached or the owner stops the job.

        Raises:
            RunError: `nonfinite-loss`.
        """
        try:
            with contextlib.suppress(_Ended):
                self.go_on()
            if self.job.stopped:  # within an evaluation
                self.take_checkpoint(wait_s=_ENDING_S)
            self.job.ended()
        finally:
            self.wait_for_checkpoint()
        self.check()
        self.job.keep_best(self.model)
        return self.job.result()

    def check(self) -> None:
        """Refuse what came of the steps so far, if it is not finite; raises `RunError` (`nonfinite-loss`)."""
        self._check_late()
        if self.params.fail_on_nonfinite and not models.is_finite(self.model):
            raise self._refusal("the adapter", self.state.global_step)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)
        # One batch late: a GPU is not waited for while nothing is left in its queue.
        self._check_late()
        self.step_loss = loss if self.step_loss is None else self.step_loss + loss
        self._unchecked.append(("the loss", self.state.global_step + 1, training.Later(loss)))
        return loss

    def get_batch_samples(self, *given: Any) -> Any:
        self.step_loss = None
        with self._phase("data"):
            return super().get_batch_samples(*given)

    def compute_loss(self, *given: Any, **named: Any) -> Any:
        with self._phase("forward"):
            return super().compute_loss(*given, **named)

    def _clipped(self, *given: Any, **named: Any) -> Any:
        with self._phase("optimizer"):
            norm = self._clip(*given, **named)
        self._unchecked.append(("the gradient", self.state.global_step + 1, training.Later(norm)))
        return norm

    def weight_files(self) -> dict[str, bytes]:
        self.check()
        return dict(zip(self.weight_names, map(save, (models.copied(self.model), self.job.kept)), strict=True))

    def own_state(self) -> dict[str, Any]:
        return self.job.state()

    def _load_from_checkpoint(self, folder: str, model: Any = None) -> None:
        """Take the adapter, in the place of Trainer, which takes files of other kinds too."""
        last, self.job.kept = (load_file(f"{folder}/{name}") for name in self.weight_names)
        models.put_back(self.model, last)

    def between_steps(self) -> None:
        if self.job.stopped or (self.job.due and not self.control.should_training_stop):
            self.take_checkpoint(wait_s=_ENDING_S if self.job.stopped else 0.0)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Have the adapter leave, and nothing else: Trainer's own checkpoint is a folder with pickles."""
        self.check()
        self.save()

    def save(self) -> None:
        """Have the adapter leave as a checkpoint, unless it has."""
        if self.is_world_process_zero() and self._saved != self.state.global_step:
            self._saved = self.state.global_step
            with self._phase("checkpoint"):
                for name, data in models.files(self.model).items():
                    self.task.checkpoint(f"checkpoints/step-{self.state.global_step}/{name}", data)

    def agreed(self, reason: str | None) -> tuple[str | None, bool]:
        """Return what all ranks have: the strongest reason to stop after this step, and whether a checkpoint is due."""
        due = self.task.checkpoints.due()
        if self.args.world_size == 1:
            return reason, due
        order = (None, "time", "stopped")
        strongest = torch.tensor([order.index(reason), due], device=self.args.device)
        torch.distributed.all_reduce(strongest, torch.distributed.ReduceOp.MAX)
        return order[int(strongest[0])], bool(strongest[1])

    def of_all_ranks(self, loss: Any) -> Any:
        """Return the mean of a loss over the ranks, each of which has its part of the step's tokens."""
        if loss is not None and self.args.world_size > 1:
            loss = loss / self.args.world_size  # a copy: the first loss may be the last one too
            torch.distributed.all_reduce(loss)
        return loss

    def _check_late(self) -> None:
        waiting, self._unchecked = self._unchecked, []
        if self.params.fail_on_nonfinite:
            for what, step, number in waiting:
                if not math.isfinite(number.read()):
                    raise self._refusal(what, step)

    def _refusal(self, what: str, step: int) -> RunError:
        return RunError(
            Code.NONFINITE_LOSS,
            f"{what} of step {step} is not a finite number",
            hint="lower learning_rate, or look at the data; fail_on_nonfinite = false goes on regardless",
        )

    def _named(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def named(*given: Any, **more: Any) -> Any:
            with self._phase(phase):
                return call(*given, **more)

        return named


class _Job(TrainerCallback):  # type: ignore[misc]
    """What a job asks of each step: progress, the owner's stop, the clock, and the best adapter so far."""

    def __init__(self, trainer: LoraTrainer) -> None:
        self._trainer, self._task, self._params = trainer, trainer.task, trainer.params
        self._reason: str | None = None
        self._best, self._worse = math.inf, 0
        self.kept: dict[str, torch.Tensor] = {}
        self.due = False  # whether a checkpoint is to be taken after this step
        self._owed = False  # whether this step's evaluation was left out, because the job ends
        self._first: Any = None
        self._done, self._elapsed_us, self._before_s = 0, 0, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._total = None if state.max_steps == _NO_END else state.max_steps
        self._params.check_checkpoints(self._total)
        self._go_on(state.global_step)
        self._task.progress(self._done, self._total)
        training.wait(args.device)
        self._started = time.perf_counter()
        self._reason = self._asked()
        if self._reason is not None:
            raise _Ended

    def _go_on(self, step: int) -> None:
        before = self._trainer.before
        if before is not None:
            self._done, self._first = step, before["first"]
            self._best, self._worse, self._owed, self._before_s = (
                before[name] for name in ("best", "worse", "owed", "elapsed_s")
            )
            self._trainer.begin_log()

    def state(self) -> dict[str, Any]:
        """Return what this object goes on from."""
        return {
            "best": self._best,
            "elapsed_s": self._before_s + time.perf_counter() - self._started,
            "first": float(self._first),
            "owed": self._owed,
            "worse": self._worse,
        }

    @property
    def stopped(self) -> bool:
        """Whether the owner has stopped the job."""
        return self._reason == "stopped"

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._owed:  # with the generators as they were then
            self._owed = False
            self._trainer.evaluate()
            if control.should_training_stop:
                raise _Ended

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer.epoch_over = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self._trainer
        self._done = state.global_step
        self._first = trainer.of_all_ranks(trainer.step_loss) if self._first is None else self._first
        # The end of a step, and the begin of the next; its batch has been read ahead.
        self._task.progress(self._done, self._total, trainer.step_loss)
        self._end(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer.epoch_over = True
        if self.stopped and not float(state.epoch).is_integer():
            control.should_evaluate = False  # the epoch's, which goes on elsewhere
        self._end(control)

    def _end(self, control: Any) -> None:
        """End a step or an epoch, and with it perhaps the job."""
        reason = self._asked()
        if reason is not None and self._done != self._total:
            self._reason = reason
            control.should_training_stop = True
        if reason == "stopped" or self._task.over:  # which leaves a few seconds, enough for the adapter
            self._owed = self._owed or control.should_evaluate
            control.should_evaluate = control.should_save = False
        wanted = control.should_evaluate and self._task.checkpoints.line is not None
        self._trainer.generators = self._trainer.rng_state() if wanted else None

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._asked() == "stopped":
            self._reason, self._owed = "stopped", True
            raise _Ended

    def _asked(self) -> str | None:
        """Return why the job is to end now, None where it is not; the same in all ranks."""
        reason = None
        if self._task.should_stop():
            reason = self._task.stop_reason
        elif self._params.seconds is not None:
            elapsed_s = self._before_s + time.perf_counter() - self._started
            reason = "time" if elapsed_s >= self._params.seconds else None
        reason, self.due = self._trainer.agreed(reason)
        return reason

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        loss, params = metrics["eval_loss"], self._params
        self._trainer.generators = None
        better = loss < self._best - params.early_stopping_threshold
        self._worse = 0 if better else self._worse + 1
        if loss < self._best and params.load_best_model_at_end:
            self.kept = models.copied(self._trainer.model)
        self._best = min(loss, self._best)
        if params.early_stopping_patience is not None and self._worse >= params.early_stopping_patience:
            training.log(f"lora: stopped after {self._worse} evaluations without a better loss than {self._best:.6g}")
            self._reason = "finished"
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        shown = [f"{name} {value:.6g}" for name, value in logs.items() if not name.endswith(OF_THE_CLOCK)]
        if self._trainer.is_world_process_zero():
            training.log(f"lora: step {state.global_step}: {', '.join(shown)}")

    def ended(self) -> None:
        """Take the time."""
        training.wait(self._trainer.args.device)
        self._elapsed_us = int((time.perf_counter() - self._started) * 1e6)

    def keep_best(self, model: Any) -> None:
        """Put the adapter of the best evaluation in the place of the last one, where the job asks for it."""
        if self.kept:
            if self._reason == "stopped":  # without an evaluation of what came last
                self._trainer.save()
            models.put_back(model, self.kept)
            training.log(f"lora: the adapter is that of the best evaluation, with the loss {self._best:.6g}")

    def result(self) -> Result:
        """Return how the training ended."""
        first, last = self._first, self._trainer.of_all_ranks(self._trainer.step_loss)
        self._task.progress(self._done, self._done, last)
        return Result(
            unit="step",
            done=self._done,
            elapsed_us=self._elapsed_us,
            stop_reason=self._reason or "steps",
            loss_first=None if first is None else decimal(first),
            loss_final=None if last is None else decimal(last),
        )


class _Ended(Exception):  # noqa: N818 - no error
    """The job is over, between two steps or within an evaluation."""
