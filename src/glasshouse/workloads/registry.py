"""The workloads: each is a module, and a line here (its name is also in `wire.policy.WORKLOADS`, for formats).

Law: a module imports a training framework only within `warm` and `run`; job files are checked without any.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, cast

from glasshouse.task.handle import Task
from glasshouse.wire.canonical import Json
from glasshouse.workloads.job_keys import invalid, job_invalid
from glasshouse.workloads.params import Example, Params, PlainFile, travelling
from glasshouse.workloads.process.job_control import JobControl, Result

MODULES = {
    "mlp": "glasshouse.workloads.builtin.mlp",
    "lora": "glasshouse.workloads.lora.lora",
    "script": "glasshouse.workloads.builtin.script",
}
"""The module of each."""


class Workload(Protocol):
    """What a workload's module has."""

    Params: type[Params]
    FRAMEWORKS: tuple[str, ...]  # the distributions that it imports itself
    EXAMPLE: Example  # a job to begin with

    def examine(self, params: Any, files: Mapping[str, PlainFile]) -> list[str]:
        """Check what will be packed under these names; see `registry.examine`."""
        ...

    def requirements(self, params: Any, names: Iterable[str]) -> Mapping[str, str]:
        """Return what else a job with inputs of these names requires, each with what would do instead."""
        ...

    def warm(self) -> None:
        """Import the third-party modules that it needs whatever its parameters are."""

    def prepare(self, task: Task, params: Any) -> None:
        """Do what is done once, in the worker, also where several ranks run what follows."""

    def run(self, task: Task, params: Any, control: JobControl) -> Result:
        """Do the work: in one process, or of a workload in `wire.policy.RANKED` in each rank.

        There rank 0 alone may save and be heard, and returns what becomes of the run.
        """
        ...


def load(kind: str) -> Workload:
    """Return a workload's module; raises `UsageError` where there is none of that name."""
    if kind not in MODULES:
        raise invalid("workload", f"one of {', '.join(MODULES)}", kind)
    return cast(Workload, importlib.import_module(MODULES[kind]))


def parse(kind: str, table: Mapping[str, Any]) -> Params:
    """Check the `[params]` of a job file, also as `canonical` returned them; raises as `Params.read`."""
    return load(kind).Params.read(table)


def canonical(kind: str, table: Mapping[str, Any]) -> dict[str, Json]:
    """Return checked `[params]` as they travel in the sealed index; raises as `parse`."""
    parse(kind, table)
    return {name: travelling(value) for name, value in table.items()}


def examine(kind: str, params: Params, files: Mapping[str, PlainFile]) -> list[str]:
    """Check a job's files against its parameters; return what could not be checked here, and what is passed over.

    Raises:
        UsageError: `job-invalid` or `file-missing`, naming file, line and key, and what to do.
    """
    for key in params.INPUTS:
        name = getattr(params, key)
        if name is not None and name not in files:
            shown = ", ".join([*files][:5]) + (" ..." if len(files) > 5 else "")
            raise job_invalid(f"params.{key} = {name!r} is not among the [inputs]: {shown}")
    return load(kind).examine(params, files)


def missing_frameworks(kind: str, installed: Mapping[str, str] | None = None) -> list[str]:
    """Return what a workload imports itself and is not installed: here, or among the versions of another machine."""
    if installed is None:
        return [name for name in load(kind).FRAMEWORKS if importlib.util.find_spec(name) is None]
    return [name for name in load(kind).FRAMEWORKS if name not in installed]
