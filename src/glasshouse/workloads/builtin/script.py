"""`script`: the owner's own training script, unmodified, in the in-memory workspace.

The inputs lie as plain files in the working directory; what the script writes into the output folder leaves sealed at
the end. Its standard output and error are the sealed log.
"""

from __future__ import annotations

import importlib.util
import io
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Self

from glasshouse.errors import Code, RunError, UsageError
from glasshouse.task.handle import Task
from glasshouse.workloads.job_keys import FLAG, Field, exactly_one, integer, invalid, mapped, read, text, texts
from glasshouse.workloads.params import NAME, Example, PlainFile
from glasshouse.workloads.params import Params as Common
from glasshouse.workloads.process import environment, interpreter
from glasshouse.workloads.process.import_hooks import ImportHooks
from glasshouse.workloads.process.job_control import JobControl, Result
from glasshouse.workloads.process.progress_hooks import ProgressHooks
from glasshouse.workloads.requirements import REQUIREMENT, lacking

FRAMEWORKS = ()
EXAMPLE = Example(
    params={"script": "train.py"},
    files={
        "train.py": """\
# Any script: it finds its inputs where it runs, and what it writes to outputs/ comes back sealed.
from pathlib import Path

rows = Path("data.csv").read_text().splitlines()[1:]
mean = sum(float(row.split(",")[0]) for row in rows) / len(rows)
print(f"{len(rows)} rows")
Path("outputs/mean.txt").write_text(f"{mean}\\n")
""",
        "data.csv": "x,y,label\n" + "".join(f"{n / 10},{(n * 7 % 10) / 10},{int(n >= 16)}\n" for n in range(32)),
    },
)

# What the loader, the interpreter, the C library and the ciphers' library obey, and what is Glasshouse's own.
_REFUSED = (
    r"(?!(?:LD_|DYLD_|GLIBC_|MALLOC_|PYTHON|GLASSHOUSE_)|(?:GCONV_PATH|LOCPATH|NLSPATH|SSLKEYLOGFILE"
    r"|OPENSSL_(?:CONF|CONF_INCLUDE|ENGINES|MODULES)|BASH_ENV|ENV)$)"
)
ENVIRONMENT = mapped(
    text(
        _REFUSED + r"[A-Za-z_][A-Za-z0-9_]*",
        "a name of letters, digits and _ that neither the loader (LD_, DYLD_, GLIBC_, MALLOC_, OPENSSL_, …) nor "
        "Python (PYTHON) obeys and that is not Glasshouse's own (GLASSHOUSE_)",
        max_chars=128,
    ),
    text(r"[^\x00]*", "a text of at most 4096 characters", min_chars=0, max_chars=4096),
)
"""Environment variables of a script."""

_MODULE = text(r"(?!.*\.py$)[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*", "a module's name, as pkg.train")
RESUME = "GLASSHOUSE_RESUME"
"""Names the file or folder of the checkpoint that the script goes on from."""
# Parts that are neither `.` nor `..`, a slash at the end or none.
_PART = r"(?!\.{1,2}(?:/|$))[^/\x00-\x1f\x7f\\]+"
_FOLDER = text(rf"{_PART}(?:/{_PART})*/?", "a folder inside the working directory", max_chars=100)
# A run that is stopped is given five seconds to its end; what is written until then comes back.
_ENDING_S = 2.5


@dataclass(frozen=True, kw_only=True)
class ScriptParams(Common):
    """Parameters of `script`."""

    RULES = (exactly_one("script", "module"), *Common.RULES)
    INPUTS = ("script",)

    script: Annotated[str | None, NAME, "The input to run, by its name in the package."] = None
    module: Annotated[str | None, _MODULE, "The module to run, as `python -m` does from the folder of the inputs."] = (
        None
    )
    arguments: Annotated[
        tuple[str, ...], texts(text(r"[^\x00]*", "a text", min_chars=0, max_chars=4096)), "Its command line."
    ] = ()
    requirements: Annotated[
        tuple[str, ...],
        texts(
            text(rf"\s*{REQUIREMENT}", "a distribution's name with versions, as name>=1.2,<2"),
            "distributions with versions",
        ),
        "Distributions that must be installed, as `name` or `name>=1.2,<2`; checked before anything runs.",
    ] = ()
    outputs: Annotated[
        tuple[str, ...],
        texts(_FOLDER, "folders", min_items=1, max_items=16, distinct=True),
        "Folders, relative to the working directory, whose files come back; what is written elsewhere is lost, and "
        "the summary lists it. Of several, each file comes back under its folder's name.",
    ] = ("outputs/",)
    allow_pickle: Annotated[bool, FLAG, "Let outputs be pickles, which run code when they are loaded."] = False
    max_restarts: Annotated[
        int,
        integer(0, 100),
        "How often all ranks begin again after one failed; for a job with `--ranks` alone.",
    ] = 0
    # Environment variables; in the job file a table of its own, sealed with the parameters.
    env: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        # Checked again here, where they are set.
        env = read((Field("env", ENVIRONMENT, "", {}),), {k: v for k, v in values.items() if k == "env"}, "")
        found = super().read({name: value for name, value in values.items() if name != "env"})
        folders = tuple(folder.rstrip("/") for folder in found.outputs)
        # A file in both would come back twice under one name, which is refused after the training.
        if any(f"{one}/".startswith(f"{other}/") for one, other in itertools.permutations(folders, 2)):
            raise invalid("params.outputs", "folders of which none lies in another", list(values["outputs"]))
        return replace(found, outputs=folders, **env)

    @property
    def what(self) -> str:
        """The script's or the module's name."""
        return self.script or f"python -m {self.module}"


Params = ScriptParams


def examine(params: ScriptParams, files: Mapping[str, PlainFile]) -> list[str]:
    """Check sources, requirements and output folders; raises as `registry.examine`."""
    from glasshouse.workloads.builtin import script_files

    return script_files.examine(params.script, params.module, params.requirements, params.outputs, files)


def requirements(params: ScriptParams, _names: Iterable[str]) -> dict[str, str]:
    """Return what the job lists, and what would do instead."""
    return dict.fromkeys(params.requirements, "take it out of requirements in [params]")


def warm() -> None:
    """Do nothing: what a script imports is part of its own time."""


def prepare(task: Task, params: ScriptParams) -> None:
    """Lay the inputs out, where the working directory is then, and set the environment.

    Raises:
        RunError: `requirement-missing`.
        UsageError: `file-missing` when the package has no such script.
    """
    if params.script is not None and params.script not in task.inputs:
        raise UsageError(Code.FILE_MISSING, f"the package has no input named {params.script!r} to run")
    if missing := lacking(params.requirements):
        raise RunError(
            Code.REQUIREMENT_MISSING,
            "this machine lacks what the script requires: " + "; ".join(missing),
            hint="choose an image that has it, or take it out of requirements in [params]",
        )
    variables: dict[str, str] = {}
    if not environment.egress_open():
        # What it would send comes back, for `wandb sync`; but not by a link, as it makes to its newest run.
        variables = {"WANDB_MODE": "offline", "WANDB_SYMLINK": "false"}
        if "wandb" not in params.outputs:
            variables["WANDB_DIR"] = str(task.output_dir)
    os.environ.update(variables | dict(params.env))
    os.environ["GLASSHOUSE_INPUTS"] = str(task.input_dir)
    os.environ["GLASSHOUSE_OUTPUTS"] = str(task.output_dir)
    if task.resume is not None and task.resume.path is not None:
        os.environ[RESUME] = str(task.resume.path)
    os.chdir(task.input_dir)


def run(task: Task, params: ScriptParams, control: JobControl) -> Result:
    """Run the script in this process, over inputs that are laid out, and return its last progress.

    Raises:
        RunError: `script-failed` or `out-of-memory`.
    """
    _fix_seeds(params)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # In blocks, as Python writes into a pipe, what was printed would come after the error that it led to.
        sys.stdout.reconfigure(line_buffering=True)
    interrupt = _Interrupt(task)
    control.on_stop(interrupt)

    def left(status: int) -> int:
        interrupt.disarm()
        status &= 0xFF
        failure = RunError(Code.SCRIPT_FAILED, f"the script ended its process with exit status {status}")
        return control.conclude(failure if status else _result(task, interrupt))

    def stopped(error: BaseException) -> bool:
        # Lightning ends an interrupted script by exit status 1.
        return isinstance(error, (KeyboardInterrupt, SystemExit)) and interrupt.sent

    try:
        storage = ImportHooks({"fsspec": _add_part_files})
        with interrupt, interpreter.leaving(left), storage, ProgressHooks(task, params.script):
            interpreter.execute(
                task.input_dir,
                script=params.script,
                module=params.module,
                arguments=params.arguments,
                expected=stopped,
            )
    except (KeyboardInterrupt, SystemExit):
        if not interrupt.sent:
            raise
    return _result(task, interrupt)


def _add_part_files(fsspec: Any) -> None:
    """Have `glasshouse://` lead to the checkpoint that is taken."""
    fsspec.register_implementation("glasshouse", "glasshouse.task.part_files.PartFiles", clobber=True)


def _result(task: Task, interrupt: _Interrupt) -> Result:
    done, unit, first, final, elapsed_us = task.last_report
    return Result(
        unit=unit,
        done=done,
        elapsed_us=elapsed_us,
        stop_reason=task.stop_reason if interrupt.asked else "finished",
        loss_first=first,
        loss_final=final,
    )


class _Interrupt:
    """Stops a script as Ctrl-C would, unless it asks `should_stop` itself; armed only while the script runs."""

    def __init__(self, task: Task) -> None:
        self.asked = False
        self.sent = False
        self._armed = False
        self._task = task
        self._lock = threading.RLock()  # the raw leg calls from a handler in the main thread

    def __enter__(self) -> None:
        if not callable(signal.getsignal(signal.SIGINT)):
            signal.signal(signal.SIGINT, signal.default_int_handler)
        with self._lock:
            if self.asked:  # while the inputs were laid out
                self.sent = True
                raise KeyboardInterrupt
            self._armed = True

    def __exit__(self, *_: object) -> None:
        self.disarm()

    def disarm(self) -> None:
        """Interrupt no more."""
        # The lock: a signal that is under way arrives before this returns, and not in the middle of what follows.
        with self._lock:
            self._armed = False

    def __call__(self) -> None:
        with self._lock:
            self.asked = True
            if not self._armed or self._task.asks_to_stop:
                return
            self.sent = True
            threading.Thread(target=self._insist, name="glasshouse-stop", daemon=True).start()
            if threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            self._signal()

    def _insist(self) -> None:
        """Interrupt once more, as a second Ctrl-C does: a script waits at its end for its pools and threads."""
        time.sleep(_ENDING_S)
        with self._lock:
            if self._armed:
                self._signal()

    def _signal(self) -> None:
        # A real signal, so that a script asleep in a system call wakes up too.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _fix_seeds(params: ScriptParams) -> None:
    """Seed what an unmodified script uses: the standard library, NumPy and PyTorch, where installed."""
    threads = params.threads or (1 if params.deterministic else None)
    if threads is not None:
        environment.fix_threads(threads)
    if not params.deterministic:
        return
    import random

    random.seed(params.seed)
    if importlib.util.find_spec("numpy"):
        import numpy

        numpy.random.seed(params.seed)
    if importlib.util.find_spec("torch"):
        from glasshouse.workloads.builtin import training

        training.seed(params.seed, threads=threads, deterministic=True)
