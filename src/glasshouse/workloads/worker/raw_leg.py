"""The raw leg: the same workloads over a plain folder, for measurements and for trying a job out."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from glasshouse.task.channel import Channel, EventLines
from glasshouse.task.inputs import FolderInputs, Inputs
from glasshouse.wire.canonical import Json
from glasshouse.wire.group import SECRET_BYTES
from glasshouse.workloads.params import KINDS, canonical
from glasshouse.workloads.worker.worker_run import work

if TYPE_CHECKING:
    from glasshouse.workloads.distributed.rank_server import Given

__all__ = ["tell"]


class Raw:
    """Inputs are a plain folder; SIGTERM and SIGINT stop the job."""

    def __init__(self, *, kind: str, params: Path, inputs: Path, outputs: Path, events: BinaryIO) -> None:
        self.channel: Channel = EventLines(events, outputs)
        self._kind, self._params, self._inputs = kind, params, inputs
        self._table: Mapping[str, Json] = {}

    def prepared(self) -> bool:
        return True

    def granted(self) -> tuple[Inputs, Mapping[str, Json]] | None:
        self._table = canonical(self._kind, json.loads(self._params.read_text("utf-8")))
        return FolderInputs(self._inputs), self._table

    def begin(self, on_stop: Callable[[], None]) -> None:
        def stop(_number: int, _frame: object) -> None:
            if not self.channel.stopping:
                self.channel.stopping = True
                on_stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)

    def for_ranks(self) -> Given:
        from glasshouse.workloads.distributed.rank_server import Given

        message: dict[str, Json] = {"inputs": str(self._inputs), "params": dict(self._table)}
        return Given(secret=os.urandom(SECRET_BYTES), message=message, descriptors=(), closed_to_others=False)


def tell(argv: Sequence[str]) -> int:
    """Run one workload whose process is closed to others; return 0 when it finished, 1 when it failed."""
    arguments = _arguments(argv)
    # Removed by hand: a TemporaryDirectory also goes when a script's exit handlers are run, which is before its end.
    scratch = Path(tempfile.mkdtemp(prefix="glasshouse-raw-"))
    try:
        with _events(arguments.events) as events:
            leg = Raw(
                kind=arguments.workload,
                params=arguments.params.resolve(),
                inputs=arguments.inputs.resolve(),
                outputs=arguments.outputs.resolve(),
                events=events,
            )
            leg.channel.send({"type": "ready", "pid": os.getpid()})
            workspace = arguments.workspace or scratch
            return work(leg, arguments.workload, workspace, protected=False, ranks=arguments.ranks)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="glasshouse.workloads.worker", allow_abbrev=False)
    parser.add_argument("--raw", action="store_true")
    parser.add_argument("--workload", choices=KINDS, required=True)
    parser.add_argument("--params", type=Path, required=True)
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--outputs", type=Path, required=True)
    parser.add_argument("--workspace", type=Path)
    parser.add_argument("--events", default="-", help="file for the messages, - for standard output")
    parser.add_argument("--ranks", type=int, help="run a script in this many processes of one group")
    return parser.parse_args(argv)


def _events(name: str) -> BinaryIO:
    # The script's own standard output must not mix with a buffer of ours: unbuffered, line by line.
    return os.fdopen(os.dup(1), "wb", buffering=0) if name == "-" else Path(name).open("ab", buffering=0)
