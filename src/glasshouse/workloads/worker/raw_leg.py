"""The raw leg: the same workloads over a plain folder, for measurements and for trying a job out."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from glasshouse.task.channel import Channel, EventLines
from glasshouse.task.inputs import FolderInputs, Inputs
from glasshouse.wire.canonical import Json
from glasshouse.wire.crypto import GROUP_SECRET_BYTES
from glasshouse.workloads import registry
from glasshouse.workloads.process.job_control import JobControl
from glasshouse.workloads.worker.worker_run import Leg, run_worker

if TYPE_CHECKING:
    from glasshouse.workloads.distributed.rank_server import Given


class Raw(Leg):
    """Inputs are a plain folder; SIGTERM and SIGINT stop the job."""

    def __init__(self, kind: str, params: Path, inputs: Path, channel: Channel, *, ranked: bool) -> None:
        self.channel = channel
        self._kind, self._params, self._inputs, self._ranked = kind, params, inputs, ranked

    def prepared(self) -> bool:
        return True

    def granted(self) -> tuple[Inputs, Mapping[str, Json], Given | None]:
        table = registry.canonical(self._kind, json.loads(self._params.read_text("utf-8")))
        if not self._ranked:
            return FolderInputs(self._inputs), table, None
        from glasshouse.workloads.distributed.rank_server import Given

        message: dict[str, Json] = {"inputs": str(self._inputs), "params": table}
        return FolderInputs(self._inputs), table, Given(secret=os.urandom(GROUP_SECRET_BYTES), message=message)

    def begin(self, control: JobControl) -> None:
        def stop(_number: int, _frame: object) -> None:
            if not self.channel.stopping:
                self.channel.stopping = True
                control.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)


def run_raw(argv: Sequence[str]) -> int:
    """Run one workload whose process is closed to others; return 0 when it finished, 1 when it failed."""
    parser = argparse.ArgumentParser(prog="glasshouse.workloads.worker", allow_abbrev=False)
    parser.add_argument("--raw", action="store_true")
    parser.add_argument("--workload", choices=tuple(registry.MODULES), required=True)
    parser.add_argument("--params", type=Path, required=True)
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--outputs", type=Path, required=True)
    parser.add_argument("--workspace", type=Path)
    parser.add_argument("--events", default="-", help="file for the messages, - for standard output")
    parser.add_argument("--ranks", type=int, help="run a script in this many processes of one group")
    given = parser.parse_args(argv)
    # Unbuffered, line by line: the script's own standard output must not mix with a buffer of ours.
    events = os.dup(1) if given.events == "-" else os.open(given.events, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    # Removed by hand: a TemporaryDirectory also goes when a script's exit handlers are run, which is before its end.
    scratch = Path(tempfile.mkdtemp(prefix="glasshouse-raw-"))
    try:
        with os.fdopen(events, "wb", buffering=0) as stream:
            channel = EventLines(stream, given.outputs.resolve())
            channel.send({"type": "ready", "pid": os.getpid()})
            paths = given.params.resolve(), given.inputs.resolve()
            leg = Raw(given.workload, *paths, channel, ranked=given.ranks is not None)
            workspace = given.workspace or scratch
            return run_worker(leg, given.workload, workspace, protected=False, ranks=given.ranks)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
