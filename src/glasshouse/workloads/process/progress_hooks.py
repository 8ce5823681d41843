"""Live progress of an unmodified script, by hooks that its frameworks offer to everyone.

The script's own `task.progress` stands above all: where its sources call it, nothing is reported here. Else the count
is that of the loop of Trainer (transformers) or Lightning while one runs, which also gives total and loss; else steps
of optimizers are counted. Laws: nothing is imported that the script does not import itself; a hook that fails ends live
progress, is said once in the sealed log, and is no failure of the script; no process that the script starts reports.

A report is a step boundary of a measured job, as the script's own would be: it comes where an optimizer has stepped, or
where the framework ends its step, in the thread that trains; and the script's own reports and these never mix.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from glasshouse.workloads.process.import_hooks import ImportHooks
from glasshouse.workloads.process.trainer_saves import TrainerSaves

if TYPE_CHECKING:
    from glasshouse.task.handle import Task

_MAX_SOURCE_BYTES = 4 << 20
_OWN_REPORT = re.compile(rb"\.progress\b(?! import\b)")
_installed: ProgressHooks | None = None


class ProgressHooks:
    """Reports the steps of a script in this process while it is entered."""

    def __init__(self, task: Task, script: str | None) -> None:
        self._task, self._script, self._pid = task, script, os.getpid()
        self._failed = False
        self._silent: bool | None = None  # whether the script reports by itself; None before the first step
        self._done = 0
        self._total: int | None = None  # the first that a framework gave: a log takes no other
        self._loss: Any = None
        self._before: int | None = None  # steps done before the loop of a framework that runs; None without one
        # The optimizers that have stepped since the count last grew.
        self._stepped: WeakSet[Any] = WeakSet()
        self._undo = ExitStack()
        self.saves = TrainerSaves(task.checkpoints, task.resume)

    def __enter__(self) -> None:
        global _installed
        _installed = self
        watched = {"torch.optim.optimizer": self._watch_optimizers, "transformers.trainer": self._watch_trainers}
        actions = {name: partial(self.attempt, action) for name, action in watched.items()}
        self._undo.enter_context(ImportHooks(actions))

    def __exit__(self, *_: object) -> None:
        global _installed
        _installed = None
        self._undo.close()

    def attempt(self, action: Callable[..., None], *arguments: Any) -> None:
        """Do something in a hook; its failure is not the script's. KeyboardInterrupt, which stops a script, passes."""
        if self._failed or os.getpid() != self._pid:
            return
        try:
            action(*arguments)
        except Exception as error:
            self._failed = True
            with contextlib.suppress(Exception):
                sys.stderr.write(f"glasshouse: no live progress from here on: {type(error).__name__}: {error}\n")

    def began(self, step: int, total: int | None) -> None:
        """The loop of a framework begins, at `step` where it resumes: it counts from now on."""
        # A second loop of one script goes on from where the count is, unless it resumes from there itself.
        self._before = max(0, self._done - step)
        self._done = self._before + step
        if self._total is None and total is not None:
            self._total = self._before + total
        self._report()

    def stepped(self, step: int, loss: Any) -> None:
        """The loop has done `step` steps; `loss` is the last that is known, or None."""
        if self._before is not None and step:  # the first may be of several batches, each of which comes here
            self._done = max(self._done, self._before + step)
            self._loss = self._loss if loss is None else loss
            self._report()

    def ended(self) -> None:
        """The loop has ended: steps of optimizers count again."""
        self._before = None
        self._stepped.clear()

    def optimizer_stepped(self, optimizer: Any) -> None:
        """Count a step where an optimizer steps again: several that take turns (of a GAN, of layers) make one step."""
        if self._before is not None:
            return
        # Weak: an optimizer that is gone took its steps for itself, as in each fold of a cross-validation.
        if optimizer in self._stepped or not self._stepped:
            self._done += 1
            self._stepped.clear()
            self._loss = None
        self._stepped.add(optimizer)
        if len(self._stepped) == 1:
            self._report()

    def _report(self) -> None:
        if self._silent is None:
            self._silent = self._reports_itself()
        if not self._silent:
            over = self._total is not None and self._done > self._total  # a second loop, which had not been planned
            self._task.observe(self._done, None if over else self._total, self._loss)

    def _reports_itself(self) -> bool:
        """Return whether the script's sources report progress: their first report may come late, in other units."""
        own = mentioned = False
        for name in self._task.inputs:
            if name.endswith(".py") or name == self._script:
                path = self._task.input_dir / name
                with contextlib.suppress(OSError), path.open("rb") as stream:
                    source = stream.read(_MAX_SOURCE_BYTES)
                    own = own or _OWN_REPORT.search(source) is not None
                    mentioned = mentioned or b"glasshouse" in source
        return own and mentioned

    def _watch_optimizers(self, module: ModuleType) -> None:
        if self._task.params.get("profile") is not None:
            return  # a boundary lies within what PyTorch profiles as the step: waiting for a slot would be a part of it
        torch = module.torch

        def hook(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            # First, and constant for the compiler: a compiled step is the same as without the hook, and is not counted.
            if not torch.compiler.is_compiling():
                self.attempt(self.optimizer_stepped, optimizer)

        self._undo.callback(module.register_optimizer_step_post_hook(hook).remove)

    def _watch_trainers(self, module: ModuleType) -> None:
        callback = _trainer_callback(self, module.TrainerCallback)
        module.DEFAULT_CALLBACKS.append(callback)
        self._undo.callback(lambda: callback in module.DEFAULT_CALLBACKS and module.DEFAULT_CALLBACKS.remove(callback))


def _trainer_callback(hooks: ProgressHooks, base: Any) -> Any:
    class TrainerProgress(base):  # type: ignore[misc]  # of transformers
        """Reports the steps of `transformers.Trainer`, and has what it saves taken."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            hooks.saves.began(args, state, kwargs.get("train_dataloader"))
            total = None if state.is_hyper_param_search or state.max_steps <= 0 else state.max_steps
            hooks.attempt(hooks.began, state.global_step, total)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            hooks.attempt(hooks.stepped, state.global_step, None)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "loss" in logs:
                hooks.attempt(hooks.stepped, state.global_step, logs["loss"])

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            hooks.saves.saved(args, state)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            hooks.attempt(hooks.ended)

        def __reduce__(self) -> Any:  # in a process that a copy is sent to, and in a copy, it does nothing
            return base, ()

    return TrainerProgress


def _lightning_callback(hooks: ProgressHooks, base: Any) -> Any:
    class LightningProgress(base):  # type: ignore[misc]  # of lightning
        """Reports the steps of a Lightning Trainer."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            hooks.attempt(self._begin, trainer, pl_module)

        def _begin(self, trainer: Any, module: Any) -> None:
            # What steps optimizers itself has a count that grows with each of them: those steps are counted here.
            if module.automatic_optimization:
                total = -1
                with contextlib.suppress(Exception):  # where accumulation changes from epoch to epoch
                    total = trainer.estimated_stepping_batches
                hooks.began(trainer.global_step, int(total) if 0 < total < float("inf") else None)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any, **kwargs: Any) -> None:
            hooks.attempt(self._step, trainer, outputs)

        def _step(self, trainer: Any, outputs: Any) -> None:
            loss = outputs.get("loss") if isinstance(outputs, dict) else None
            if loss is not None and trainer.accumulate_grad_batches != 1:
                loss = loss * trainer.accumulate_grad_batches  # Lightning has divided it
            hooks.stepped(trainer.global_step, loss)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            hooks.attempt(hooks.ended)

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            hooks.attempt(hooks.ended)

        def __reduce__(self) -> Any:
            return base, ()

    return LightningProgress


def _lightning(package: str) -> list[Any]:
    """Return the callbacks of each Trainer of that package; none outside a script that is watched."""
    if _installed is None:
        return []
    return [_lightning_callback(_installed, sys.modules[package].Callback)()]


# Lightning calls these wherever Glasshouse is installed (entry points in `pyproject.toml`).
lightning_callbacks = partial(_lightning, "lightning.pytorch")
pytorch_lightning_callbacks = partial(_lightning, "pytorch_lightning")
