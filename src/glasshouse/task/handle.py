"""The handle that a training script holds."""

from __future__ import annotations

import io
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from glasshouse.errors import Code, UsageError
from glasshouse.task import uncollected
from glasshouse.task.channel import Channel
from glasshouse.task.checkpoints import Checkpoints, Line, Restored, Resumable
from glasshouse.task.deliveries import Deliveries
from glasshouse.task.inputs import Buffer, Inputs, lay_out
from glasshouse.wire.canonical import Json

if TYPE_CHECKING:
    from glasshouse.task.tensors import Opener

JOB_FOLDER = "job"
"""In the workspace, where inputs are laid out and a script runs."""
RECORD = "glasshouse-steps.jsonl"
"""The output with a measured worker's record of its own steps."""

_REPORT_EVERY_S = 1.0
_MAX_COUNT = 2**53 - 1


class Task(Resumable):
    """Inputs, progress and outputs of one job; a script gets it from `glasshouse.task.current()`.

    Args:
        params: the job file's `[params]`.
        inputs: where inputs come from.
        channel: where messages and outputs go.
        workspace: a directory of this job alone, in memory under a protected leg.
        output_folders: names of the folders, beside the laid-out inputs, whose files come back at the end. Of a single
            one, outputs have the names that they have in it; of several, those names behind the folder's own.
        folders: input and output folder of a script that is tried out by hand, used in place.
        shared: whether the workspace is another process's, which has laid the inputs out and sends the output folder.
        line: where checkpoints go; None for a job without any, and under the raw leg.
        resume: the checkpoint that lies in the workspace already.
    """

    def __init__(
        self,
        *,
        params: Mapping[str, Json],
        inputs: Inputs,
        channel: Channel,
        workspace: Path,
        output_folders: Sequence[str] = ("outputs",),
        folders: tuple[Path, Path] | None = None,
        shared: bool = False,
        line: Line | None = None,
        resume: Restored | None = None,
    ) -> None:
        self._params = dict(params)
        self._inputs = inputs
        self._channel = channel
        self._workspace = workspace
        self._in_place = folders is not None
        self._sends_folders = not (folders or shared)
        self._input_dir = folders[0] if folders else workspace / JOB_FOLDER
        super().__init__(Checkpoints(line, self._input_dir), resume)
        # Each by what stands before the names of its files: nothing where there is only one.
        prefixes = [""] if len(output_folders) == 1 else [f"{folder.rstrip('/')}/" for folder in output_folders]
        paths = [folders[1]] if folders else [self._input_dir / folder for folder in output_folders]
        self._output_dirs = dict(zip(prefixes, paths, strict=True))
        self._before: uncollected.Snapshot | None = None
        self._laid_out = not self._sends_folders
        self._deliveries = Deliveries(params, channel)
        self._started = time.monotonic()
        self._next_report = 0.0
        self._last: tuple[int, int | None, Any, str] | None = None
        self._reported = -1  # the last count that was passed on
        self._first_loss: str | None = None
        self._reports_itself = False  # whether the script called `progress`
        # Whether the script calls `should_stop`; one that does not is stopped as if by Ctrl-C.
        self.asks_to_stop = False
        # Of a measured job: what takes its step boundaries, and what makes its record.
        self._boundary: Callable[[int, Any], None] | None = None
        self._record: Callable[[], bytes] | None = None
        # Of a measured job: whether its schedule has ended, and how many tokens each step has, where all have as many.
        self.over = False
        self.tokens_per_step: int | None = None

    @property
    def params(self) -> dict[str, Json]:
        """The job file's `[params]`; numbers with a fraction are decimal strings."""
        return self._params

    @property
    def deterministic(self) -> bool:
        """Whether the job asks for bit-equal results from run to run."""
        return self._params.get("deterministic") is True

    # inputs

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs, sorted; a folder's files are named ``folder/file``."""
        return self._inputs.names

    def size(self, name: str) -> int:
        """Return the size of an input in bytes."""
        return self._inputs.size(name)

    def open(self, name: str) -> BinaryIO:
        """Open an input for reading: seekable, buffered, decrypted as it is read."""
        return self._inputs.open(name)

    def read_into(self, name: str, buffer: Buffer, offset: int = 0) -> int:
        """Read an input straight into `buffer`; return the bytes read, fewer only at the end of the input."""
        return self._inputs.read_into(name, buffer, offset)

    def tensors(
        self,
        name: str,
        torch: Any,
        *,
        into: Mapping[str, Any] | None = None,
        only: Sequence[str] | None = None,
        opener: Opener | None = None,
    ) -> dict[str, Any]:
        """Load a safetensors input, each tensor's bytes straight into its own storage.

        Args:
            torch: the framework, passed in by the script.
            into: existing tensors to fill; they may have another dtype or be on a GPU. Tensors of the
                file that are not in it are skipped.
            only: the tensors to load, all by default.
            opener: opens a sealed input on a GPU, where it can: its plaintext is never in host memory then. The
                built-in workloads have one (`workloads.builtin.weights`).

        Returns:
            The tensors by name, in CPU memory unless given by `into` or opened elsewhere.

        Raises:
            FormatError: for a file that is not valid safetensors.
            UsageError: `usage` when a tensor to fill is missing from the file or has another shape.
        """
        from glasshouse.task import tensors  # few scripts need it, and every start compiles what it imports

        return tensors.load(self._inputs, name, torch, into=into, only=only, opener=opener)

    @property
    def input_dir(self) -> Path:
        """The folder where all inputs lie as plain files; laid out in the workspace when first asked for."""
        if not self._laid_out:
            for folder in self._output_dirs.values():
                inside = folder.relative_to(self._input_dir).as_posix()
                if any(name == inside or name.startswith(inside + "/") for name in self.inputs):
                    raise UsageError(
                        Code.JOB_INVALID,
                        f"an input lies in {inside!r}, a folder whose files come back as outputs",
                        hint='name other folders with outputs = ["…"] in [params]',
                    )
            self.lay_out(self._not_restored(self.inputs), self._input_dir)
            self._input_dir.mkdir(parents=True, exist_ok=True)
            self._laid_out = True
            self._before = uncollected.snapshot(self._workspace)
        return self._input_dir

    def lay_out(self, names: Sequence[str], directory: Path) -> None:
        """Write some inputs as plain files under `directory`, by their names."""
        lay_out(self._inputs, names, directory)

    @property
    def workspace(self) -> Path:
        """A directory for temporary files that is gone when the job ends."""
        return self._workspace

    # progress

    def progress(self, done: int, total: int | None = None, loss: Any = None, unit: str = "step") -> bool:
        """Report how far the job is; may be called at every step.

        At most about one call a second is passed on, and the one that reaches `total`; the others cost
        a look at the clock. ``done=0`` marks the beginning: elapsed time counts from there.

        Args:
            done: steps or epochs done.
            total: how many there will be, when known.
            loss: a number, or a tensor of one element, which is read only when it is passed on.
            unit: ``step`` or ``epoch``.

        Returns:
            Whether this call was passed on.
        """
        self._reports_itself = True
        return self._take(done, total, loss, unit)

    def observe(self, done: int, total: int | None, loss: Any) -> None:
        """Take the steps that a hook of the script's framework saw; nothing once the script has reported itself."""
        if not self._reports_itself:
            self._take(done, total, loss, "step")

    def _take(self, done: int, total: int | None, loss: Any, unit: str) -> bool:
        if self._boundary is not None:
            # Before anything else: what this call costs belongs to the time after the boundary, in every arm.
            self._last = (done, total, loss, unit)  # should the job end here
            self._boundary(done, loss)
        now = time.monotonic()
        if done == 0:
            self._started = now
        elif done == total and self._reported == done:
            if loss is not None:
                self._last = (done, total, loss, unit)  # which came late
            return False
        self._last = (done, total, loss, unit)
        if now < self._next_report and 0 < done != total and (self._first_loss is not None or loss is None):
            return False
        self._next_report = now + _REPORT_EVERY_S
        self._report(now)
        return True

    def _report(self, now: float) -> None:
        if self._last is None:
            return
        done, total, loss, unit = self._last
        self._reported = done
        if not 0 <= done <= _MAX_COUNT or unit not in ("step", "epoch"):
            raise UsageError(Code.USAGE, "progress takes a count of 0 or more and the unit step or epoch")
        text = None if loss is None else decimal(loss)
        self._first_loss = self._first_loss or text
        self._channel.send(
            {
                "type": "progress",
                "done": int(done),
                "total": None if total is None else int(total),
                "unit": unit,
                "loss": text,
                "elapsed_us": int((now - self._started) * 1e6),
            }
        )

    def measure_by(self, boundary: Callable[[int, Any], None], record: Callable[[], bytes]) -> None:
        """Have the steps of this job measured.

        Args:
            boundary: called with the count and the loss at the beginning of each `progress`, which is where one step
                ends and the next begins; may wait, and may raise into the caller.
            record: makes the output `RECORD` when the job ends.
        """
        self._boundary, self._record = boundary, record

    @property
    def stop_reason(self) -> str:
        """Why a job that is to end before its own target does: `time`, if its schedule is over, or else `stopped`."""
        return "time" if self.over else "stopped"

    def should_stop(self) -> bool:
        """Return whether the owner asked the job to end; save what is worth saving, then return."""
        self.asks_to_stop = True
        return self._channel.stopping

    @property
    def last_report(self) -> tuple[int, str, str | None, str | None, int]:
        """The last progress: done, unit, first and final loss, elapsed microseconds."""
        done, _, loss, unit = self._last or (0, None, None, "step")
        elapsed_us = int((time.monotonic() - self._started) * 1e6)
        return done, unit, self._first_loss, None if loss is None else decimal(loss), elapsed_us

    # outputs

    @contextmanager
    def save(self, name: str, kind: str = "output") -> Iterator[BinaryIO]:
        """Open an output for writing; it leaves, sealed, when the block ends without an exception.

        Args:
            name: a relative path.
            kind: ``output`` or ``checkpoint``.

        Raises:
            RunError: `output-refused` for a bad or repeated name, one output too many, or a pickle that
                the job file does not allow.
        """
        import tempfile  # 15 ms, for scripts that write piece by piece

        self._deliveries.claim(name, kind)
        # In the workspace and without a name: the only copy, and gone with the process.
        scratch = self.output_dir if self._in_place else self._workspace
        scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=scratch) as content:
            yield cast(BinaryIO, content)
            content.flush()
            self._deliveries.deliver(name, kind, cast(BinaryIO, content))

    def save_bytes(self, name: str, data: bytes | bytearray | memoryview, kind: str = "output") -> str:
        """Save `data` as an output; return its SHA-256 in hex."""
        return self.pass_on(name, kind, io.BytesIO(data))

    def pass_on(self, name: str, kind: str, content: BinaryIO) -> str:
        """Deliver what another process of the job saved, under the rules of `save`; return its SHA-256 in hex."""
        self._deliveries.claim(name, kind)
        return self._deliveries.deliver(name, kind, content)

    def checkpoint(self, name: str, data: bytes | bytearray | memoryview) -> str:
        """Save `data` as a checkpoint; return its SHA-256 in hex."""
        return self.save_bytes(name, data, kind="checkpoint")

    @property
    def output_dir(self) -> Path:
        """A folder whose files all come back, sealed, when the job ends: for code that writes to paths."""
        for folder in self._output_dirs.values():
            folder.mkdir(parents=True, exist_ok=True)
        return next(iter(self._output_dirs.values()))

    def close(self) -> None:
        """Pass on the last progress and everything in the output folders; the worker calls this at the end.

        What was written elsewhere in the workspace is lost: it is reported in the sealed log.

        Raises:
            RunError: `output-refused`, after every other output was passed on.
        """
        self.checkpoints.close()
        if self._last is not None and self._last[0] != self._reported:
            self._report(time.monotonic())
        if self._record is not None:
            record, self._record = self._record, None
            self.save_bytes(RECORD, record())
        if not self._sends_folders:
            return
        if self._before is not None:
            folders = list(self._output_dirs.values())
            where, saved = self._workspace, self.checkpoints.saved
            found = uncollected.look(where, self._before, folder=self._input_dir, outputs=folders, saved=saved)
            if found is not None:
                sys.stdout.flush()
                sys.stderr.write(f"{found.line()}\n")
                sys.stderr.flush()
        self._deliveries.deliver_files(
            (prefix + name, path)
            for prefix, folder in self._output_dirs.items()
            for name, path in uncollected.regular_files(folder)
        )


def decimal(value: Any) -> str | None:
    """Return a number (or a tensor of one element) as a decimal string, or None when it is not finite."""
    number = float(value)
    return f"{number:.6g}" if math.isfinite(number) else None
