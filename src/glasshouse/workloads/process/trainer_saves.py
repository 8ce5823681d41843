"""Checkpoints of a script's `transformers.Trainer`: takes what it saves, and looks at what it goes on from.

Law: one is restored whole or not at all. Left to itself, Trainer goes on without an optimizer, generators, a callback's
count or its best checkpoint, with another batch size and with other data, and ends with another result.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import Any

from glasshouse.errors import Code, GlasshouseError, RunError
from glasshouse.task.checkpoints import Checkpoints, Restored

_FACTS = "glasshouse-trainer.json"
_NOT_RESUMED = 'write trainer.train(resume_from_checkpoint=os.environ.get("GLASSHOUSE_RESUME"))'
_OTHERWISE = (
    "have the script set what differs as it was, on whichever machine it runs, and resume the run; what is to train "
    "otherwise is another one: glasshouse run"
)
_SAME = ("gradient_accumulation_steps", "per_device_train_batch_size", "world_size")


class TrainerSaves:
    """Has a script's Trainers save checkpoints of the job's line."""

    def __init__(self, checkpoints: Checkpoints, resume: Restored | None) -> None:
        self._checkpoints, self._resume = checkpoints, resume
        self._examples: int | None = None  # of the Trainer that trains
        self._told: set[str] = set()

    def began(self, args: Any, state: Any, loader: Any) -> None:
        """Look at a Trainer that begins, or goes on.

        Raises:
            RunError: `script-failed`: it does not go on from the run's checkpoint as it was.
        """
        data = getattr(loader, "dataset", None)
        self._examples = len(data) if isinstance(data, Sized) else None
        resume = None if self._resume is None else self._resume.path
        if resume is None or resume.parent != Path(args.output_dir).resolve():
            return
        try:
            saved = json.loads((resume / _FACTS).read_bytes())
        except (OSError, ValueError):
            return  # a folder that the script saved by itself
        now = self._facts(args, state)
        differs = [name for name, value in saved.items() if now[name] != value]
        if differs:
            what = "; ".join(f"{name} was {saved[name]!r} and is {now[name]!r}" for name in differs)
            raise RunError(
                Code.SCRIPT_FAILED,
                f"Trainer does not go on from {resume.name} as it was: {what}",
                hint=_NOT_RESUMED if "step" in differs else _OTHERWISE,
            )

    def saved(self, args: Any, state: Any) -> None:
        """Take what a Trainer has saved, in all of its ranks, unless it is not whole."""
        if self._checkpoints.line is None:
            return
        folder = Path(args.output_dir).resolve() / f"checkpoint-{state.global_step}"
        lacking = list(_lacking(folder, args, state))
        if lacking:
            self._tell(f"{folder.name} is no checkpoint of the line: {'; '.join(lacking)}")
            self._checkpoints.decline(step=state.global_step)
            return
        if args.local_process_index == 0:
            (folder / _FACTS).write_text(json.dumps(self._facts(args, state)))
        paths = [folder]
        if state.best_model_checkpoint and folder != (best := Path(state.best_model_checkpoint).resolve()):
            paths.append(best)
        try:
            self._checkpoints.save(paths, step=state.global_step, wait_s=0.0)
        except GlasshouseError as error:
            self._tell(f"{error.message}; {error.hint}" if error.hint else error.message)

    def _facts(self, args: Any, state: Any) -> dict[str, Any]:
        """Return what must be the same when it goes on."""
        best = state.best_model_checkpoint
        return {
            **{name: getattr(args, name) for name in _SAME},
            "best checkpoint": best and Path(best).name,
            "examples": self._examples,
            "max_steps": state.max_steps,
            "num_train_epochs": state.num_train_epochs,
            "step": state.global_step,
        }

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            sys.stderr.write(f"glasshouse: {text}\n")


def _lacking(folder: Path, args: Any, state: Any) -> Iterator[str]:
    """Yield what is missing for Trainer to go on as if it had not been interrupted."""
    rng = "rng_state.pth" if args.world_size <= 1 else f"rng_state_{args.process_index}.pth"
    wanted = {"generators": rng}
    if args.local_process_index == 0:  # which writes the rest, and may be later than the others
        wanted |= {"optimizer": "optimizer*", "schedule": "scheduler.pt", "state": "trainer_state.json"}
        wanted |= {"scaler": "scaler.pt"} if args.fp16 else {}
    missing = [what for what, name in wanted.items() if not any(folder.glob(name))]
    if missing:
        yield f"it lacks {', '.join(missing)} (save_only_model, or save_on_each_node of several machines)"
    if args.ignore_data_skip:
        yield "ignore_data_skip reads the data from its beginning"
    counting = [name for name in state.stateful_callbacks if name != "TrainerControl"]
    if counting and not args.restore_callback_states_from_checkpoint:
        yield f"{', '.join(counting)} would begin anew: set restore_callback_states_from_checkpoint=True"
