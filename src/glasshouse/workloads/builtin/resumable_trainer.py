"""A `transformers.Trainer` whose whole state leaves from memory, in the files that it goes on from itself.

Laws: one that goes on makes the steps that it would have made, bit by bit in deterministic mode; what a checkpoint
lacks is not made up for, as Trainer does; a step waits until its state is copied, and not for its sealing.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import random
from collections.abc import Mapping
from threading import Thread
from typing import Any

import numpy
import torch
from transformers import Trainer

from glasshouse.errors import Code, PackageError, RunError
from glasshouse.task.checkpoints import Part
from glasshouse.task.handle import Task
from glasshouse.workloads.process import failures

FOLDER = "trainer-checkpoint"
"""Below the job's folder, where a checkpoint lies when a leg begins."""
_OF_ALL = ("optimizer.pt", "scheduler.pt", "trainer_state.json")
OF_THE_CLOCK = ("runtime", "per_second", "flos")
"""Of a line of the log, what another run of the same job would have otherwise."""
# Of the losses since the last line of the log; private to Trainer, and without them that line is another.
_OF_LOG = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged")


class ResumableTrainer(Trainer):  # type: ignore[misc]  # transformers is not typed here
    """Takes checkpoints of a line between steps, and goes on from one.

    A subclass has the weights: `weight_files`, `weight_names` and `_load_from_checkpoint`, and `own_state`.
    """

    task: Task
    weight_names: tuple[str, ...]
    before: Mapping[str, Any] | None = None  # of the checkpoint that it goes on from: `own_state`
    generators: bytes | None = None  # those of this rank before the evaluation that has begun
    epoch_over = False  # whether the end of the epoch has come, and not the next one's beginning
    _taken = 0  # the step of the last checkpoint
    _sending: Thread | None = None

    def weight_files(self) -> dict[str, bytes]:
        """Return what else all ranks go on from, by `weight_names`."""
        raise NotImplementedError  # the subclass has it: Trainer, its base, is no abstract class

    def own_state(self) -> dict[str, Any]:
        """Return what else this rank goes on from, as JSON has it."""
        raise NotImplementedError  # the subclass has it: Trainer, its base, is no abstract class

    def go_on(self) -> None:
        """Train from the task's checkpoint, or from the beginning.

        Raises:
            PackageError: `checkpoint-tampered` for one that is not whole.
        """
        if self.task.resume is None:
            self.train()
            return
        folder = self.task.resume.path
        names = [*_OF_ALL, *self.weight_names, self._rng_name(), self._own_name()]
        missing = [name for name in names if folder is None or not (folder / name).is_file()]
        if folder is None or missing:
            raise PackageError(Code.CHECKPOINT_TAMPERED, f"a checkpoint without {', '.join(missing)}")
        self._taken = self.task.resume.step
        self.before = json.loads((folder / self._own_name()).read_bytes())
        self.train(resume_from_checkpoint=str(folder))

    def begin_log(self) -> None:
        """Put back the losses since the last line of the log; when the training begins."""
        for name, value in zip(_OF_LOG, (self.before or {}).get("log", ()), strict=False):
            now = getattr(self, name, None)
            setattr(self, name, now + value if isinstance(now, torch.Tensor) else value)

    def between_steps(self) -> None:
        """Take a checkpoint, if one is wanted: all that follows a step is done."""
        raise NotImplementedError  # the subclass has it: Trainer, its base, is no abstract class

    def _maybe_log_save_evaluate(self, *given: Any, **named: Any) -> None:
        super()._maybe_log_save_evaluate(*given, **named)
        # After the last step of an epoch, its evaluation is still to come.
        if self.epoch_over or not float(self.state.epoch or 0).is_integer():
            self.between_steps()

    def take_checkpoint(self, *, wait_s: float = 0.0) -> None:
        """Have the whole state leave as a checkpoint, unless it has; in several ranks, each does.

        Raises:
            RunError: as `weight_files`.
        """
        line, step = self.task.checkpoints.line, self.state.global_step
        if line is None or self._taken == step:
            return
        files = self._files()
        try:
            line.check_size(sum(map(len, files.values())))
        except RunError as error:
            failures.report(error)
            self.task.checkpoints.decline(step=step)
            return
        part = self.task.checkpoints.begin(step=step, wait_s=wait_s, paths=[FOLDER])
        if part is not None:
            self._taken = step
            self.wait_for_checkpoint()
            self._sending = Thread(target=_send, args=(part, files), name="glasshouse-checkpoint", daemon=True)
            self._sending.start()

    def wait_for_checkpoint(self) -> None:
        """Return when the last one has left as a whole."""
        if self._sending is not None:
            self._sending.join()

    def _files(self) -> dict[str, bytes]:
        found = {self._rng_name(): self.generators or self.rng_state()}
        log = [float(getattr(self, name, 0)) for name in _OF_LOG]
        found[self._own_name()] = json.dumps({**self.own_state(), "log": log}).encode()
        if self.args.local_process_index == 0:  # all of it on each machine
            found["optimizer.pt"] = _pickled(self.optimizer.state_dict())
            found["scheduler.pt"] = _pickled(self.lr_scheduler.state_dict())
            found["trainer_state.json"] = json.dumps(dataclasses.asdict(self.state)).encode()
            found |= self.weight_files()
        return found

    def rng_state(self) -> bytes:
        """Return the state of every generator of this rank, as Trainer reads it."""
        found = {"python": random.getstate(), "numpy": numpy.random.get_state(), "cpu": torch.random.get_rng_state()}
        if torch.cuda.is_available():
            one = torch.cuda.random.get_rng_state
            found["cuda"] = one() if self.args.world_size <= 1 else torch.cuda.random.get_rng_state_all()
        return _pickled(found)

    def _rng_name(self) -> str:
        return "rng_state.pth" if self.args.world_size <= 1 else f"rng_state_{self.args.process_index}.pth"

    def _own_name(self) -> str:
        return f"job_{self.args.process_index}.json"


def history(trainer: Trainer) -> list[dict[str, Any]]:
    """Return the lines of the log: losses, gradient norms and learning rates by step, and evaluations."""
    lines = [
        {name: value for name, value in line.items() if not name.endswith(OF_THE_CLOCK)}
        for line in trainer.state.log_history
        if "loss" in line or "eval_loss" in line
    ]
    return [{name: value if math.isfinite(value) else None for name, value in line.items()} for line in lines]


def _send(part: Part, files: Mapping[str, bytes]) -> None:
    with part:
        for name, data in files.items():
            part.begin(f"{FOLDER}/{name}")
            part.write(data)


def _pickled(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()
