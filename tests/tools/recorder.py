"""A channel that remembers, and a task over plain bytes: for workloads that are run within the test's process."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from glasshouse.task import Task
from glasshouse.task.inputs import FolderInputs
from glasshouse.workloads.params import Params
from glasshouse.workloads.registry import canonical, parse


class Recorder:
    """Where messages and outputs end up."""

    def __init__(self) -> None:
        self.stopping = False
        self.messages: list[dict[str, Any]] = []
        self.outputs: dict[str, bytes] = {}

    def send(self, message: dict[str, Any]) -> None:
        self.messages.append(message)

    def output(self, header: dict[str, Any], source: BinaryIO) -> str:
        self.messages.append(header)
        self.outputs[header["name"]] = source.read()
        assert len(self.outputs[header["name"]]) == header["bytes"]
        return hashlib.sha256(self.outputs[header["name"]]).hexdigest()


def recorded_task(
    kind: str, table: Mapping[str, Any], files: Mapping[str, bytes], folder: Path
) -> tuple[Task, Params, Recorder]:
    """Return a task over these inputs, its parameters, and what records it."""
    for name, data in files.items():
        (folder / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "in" / name).write_bytes(data)
    travelling = canonical(kind, table)
    channel = Recorder()
    task = Task(params=travelling, inputs=FolderInputs(folder / "in"), channel=channel, workspace=folder / "workspace")
    return task, parse(kind, travelling), channel
