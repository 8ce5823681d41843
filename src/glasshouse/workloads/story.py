"""A run as the worker lives it: prepare, take the grant, work, finish; the same under both legs."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from glasshouse.errors import Code, FormatError, RunError
from glasshouse.task.channel import AgentLink, Channel, EventLines, Message
from glasshouse.task.handle import Task
from glasshouse.task.inputs import FolderInputs, Inputs
from glasshouse.task.result import Result
from glasshouse.task.session import install
from glasshouse.wire.canonical import Json
from glasshouse.workloads import bytecode, environment, failures
from glasshouse.workloads.params import KINDS, Params, canonical, parse

__all__ = ["tell"]


class Workload(Protocol):
    """What each of `mlp`, `lora` and `script` is, as a module."""

    def warm(self) -> None:
        """Import the third-party modules that it needs whatever its parameters are."""

    def run(self, task: Task, params: Any, on_stop: Callable[[Callable[[], None]], None]) -> Result:
        """Do the work; `on_stop` takes what to call, from another thread, when the owner stops the job."""


class Leg(Protocol):
    """How a run begins under one of the two legs."""

    channel: Channel

    def prepared(self) -> bool:
        """Wait until the work may be prepared; False when the run is over before it began."""

    def granted(self) -> tuple[Inputs, Mapping[str, Json]] | None:
        """Wait for the inputs and the parameters; None when the run is over before it began."""

    def begin(self, on_stop: Callable[[], None]) -> None:
        """Listen for `stop` from now on."""


class Protected:
    """Inputs come from the agent as a grant in secret memory."""

    def __init__(self, descriptor: int) -> None:
        self._link = AgentLink(socket.socket(fileno=descriptor))
        self.channel: Channel = self._link

    def prepared(self) -> bool:
        if self._link.receive().get("type") != "prepare":
            return False
        # Ciphers are loaded now, while the gate decides; after the release every moment counts.
        importlib.import_module("glasshouse.task.granted")
        return True

    def granted(self) -> tuple[Inputs, Mapping[str, Json]] | None:
        message = self._link.receive()
        if message.get("type") == "stop":
            return None
        size = message.get("bytes")
        if message.get("type") != "grant" or not isinstance(size, int) or size <= 0:
            raise FormatError(Code.SCHEMA, "the agent sent something else where the grant belongs")
        from glasshouse.task.granted import GrantInputs

        secret, package = self._link.take_descriptors(2)
        inputs = GrantInputs(secret=secret, secret_bytes=size, package=package)
        os.close(secret)  # the mapping stays
        return inputs, inputs.job

    def begin(self, on_stop: Callable[[], None]) -> None:
        self._link.listen(on_stop)


class Raw:
    """Inputs are a plain folder; SIGTERM and SIGINT stop the job."""

    def __init__(self, *, kind: str, params: Path, inputs: Path, outputs: Path, events: BinaryIO) -> None:
        self.channel: Channel = EventLines(events, outputs)
        self._kind, self._params, self._inputs = kind, params, inputs

    def prepared(self) -> bool:
        return True

    def granted(self) -> tuple[Inputs, Mapping[str, Json]] | None:
        return FolderInputs(self._inputs), canonical(self._kind, json.loads(self._params.read_text("utf-8")))

    def begin(self, on_stop: Callable[[], None]) -> None:
        def stop(_number: int, _frame: object) -> None:
            if not self.channel.stopping:
                self.channel.stopping = True
                on_stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)


def tell(argv: Sequence[str]) -> int:
    """Run one workload whose process is closed to others; return 0 when it finished, 1 when it failed.

    Under the protected leg, `ready` was said already.
    """
    arguments = _arguments(argv)
    if not arguments.raw:
        return _work(Protected(arguments.fd), arguments.workload, arguments.workspace, protected=True)
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
            return _work(leg, arguments.workload, arguments.workspace or scratch, protected=False)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _work(leg: Leg, kind: str, workspace: Path, *, protected: bool) -> int:
    try:
        result = _run(leg, kind, workspace, protected=protected)
    except (BrokenPipeError, ConnectionError, EOFError):
        return 1  # the agent is gone; nobody is left to tell
    except BaseException as error:
        failures.explain(error)
        leg.channel.send({"type": "failed", "code": failures.code_of(error).value})
        return 1
    finally:
        sys.stdout.flush()
    if result is not None:
        leg.channel.send(result)
    return 0


def _run(leg: Leg, kind: str, workspace: Path, *, protected: bool) -> Message | None:
    if not leg.prepared():
        return None
    workspace = workspace.resolve()
    environment.prepare(workspace, protected=protected)
    bytecode.allow_third_party()
    os.chdir(workspace)
    workload = _workload(kind)
    started = time.perf_counter_ns()
    workload.warm()
    leg.channel.send({"type": "imported", "us": (time.perf_counter_ns() - started) // 1000})

    granted = leg.granted()
    if granted is None:
        return None
    inputs, table = granted
    params: Params = parse(kind, table)
    task = Task(
        params=table,
        inputs=inputs,
        channel=leg.channel,
        workspace=workspace,
        output_folder=getattr(params, "outputs", "outputs"),
    )
    install(task)
    leg.channel.send({"type": "opened"})
    stop = _Stop()
    leg.begin(stop.ask)
    leg.channel.send({"type": "running"})
    try:
        result = workload.run(task, params, stop.register)
    except BaseException:
        with contextlib.suppress(Exception):
            task.close()  # what was written before the failure is the owner's too
        raise
    task.close()
    return result.to_json()


class _Stop:
    """What is to be done when the owner stops the job; each action is done once, however early the owner asks."""

    def __init__(self) -> None:
        self._actions: list[Callable[[], None]] = []
        self._asked = False

    def register(self, action: Callable[[], None]) -> None:
        self._actions.append(action)
        if self._asked:
            self._act()

    def ask(self) -> None:
        self._asked = True
        self._act()

    def _act(self) -> None:
        # Asked from another thread or from a signal handler between two lines: whoever takes an action does it.
        with contextlib.suppress(IndexError):
            while True:
                self._actions.pop()()


def _workload(kind: str) -> Workload:
    # Each is imported only where it runs: a script must not pay for a framework that it does not use.
    if kind == "mlp":
        from glasshouse.workloads import mlp

        return mlp
    if kind == "lora":
        from glasshouse.workloads import lora

        return lora
    if kind == "script":
        from glasshouse.workloads import script

        return script
    raise RunError(Code.WORKER_FAILED, "there is no such workload")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="glasshouse.workloads.worker", allow_abbrev=False)
    parser.add_argument("--workload", choices=KINDS, required=True)
    parser.add_argument("--workspace", type=Path)
    parser.add_argument("--fd", type=int, help="the socket to the agent (protected leg)")
    parser.add_argument("--raw", action="store_true")
    parser.add_argument("--params", type=Path)
    parser.add_argument("--inputs", type=Path)
    parser.add_argument("--outputs", type=Path)
    parser.add_argument("--events", default="-", help="file for the messages, - for standard output")
    found = parser.parse_args(argv)
    if found.raw and not (found.params and found.inputs and found.outputs):
        parser.error("--raw takes --params, --inputs and --outputs")
    if not found.raw and (found.fd is None or found.workspace is None):
        parser.error("--fd and --workspace are required without --raw")
    return found


def _events(name: str) -> BinaryIO:
    # The script's own standard output must not mix with a buffer of ours: unbuffered, line by line.
    return os.fdopen(os.dup(1), "wb", buffering=0) if name == "-" else Path(name).open("ab", buffering=0)
