"""A run as the worker lives it: prepare, take the grant, work, finish; the same under both legs.

Every source is compiled anew at every start, so what only some runs need is imported where they need it.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from glasshouse.errors import Code, FormatError, GlasshouseError, RunError, UsageError
from glasshouse.task.channel import AgentLink, Channel, Message
from glasshouse.task.handle import Task
from glasshouse.task.session import install
from glasshouse.wire.canonical import Json
from glasshouse.wire.group import MAX_MACHINES
from glasshouse.workloads.params import Params, parse
from glasshouse.workloads.process import allocator, bytecode, environment, failures
from glasshouse.workloads.process.stop_actions import Stop

if TYPE_CHECKING:
    from glasshouse.task.granted import GrantInputs
    from glasshouse.task.inputs import Inputs
    from glasshouse.task.result import Result
    from glasshouse.workloads.distributed.machine_group import Machines
    from glasshouse.workloads.distributed.rank_server import Given
    from glasshouse.workloads.measurement.wait_times import Hooks

__all__ = ["Leg", "tell", "work"]


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

    def for_ranks(self) -> Given:
        """Return what each rank is handed, once `granted`."""


class Protected:
    """Inputs come from the agent as a grant in secret memory."""

    def __init__(self, descriptor: int, *, ranked: bool = False) -> None:
        self._link = AgentLink(socket.socket(fileno=descriptor))
        self.channel: Channel = self._link
        self._ranked = ranked
        self._given: Given | None = None

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
        size, machines = message.get("bytes"), message.get("machines")
        if message.get("type") != "grant" or not isinstance(size, int) or size <= 0:
            raise FormatError(Code.SCHEMA, "the agent sent something else where the grant belongs")
        from glasshouse.task.granted import GrantInputs

        secret, package, *relay = self._link.take_descriptors(2 if machines is None else 3)
        inputs = GrantInputs(secret=secret, secret_bytes=size, package=package)
        if self._ranked:
            place = None if machines is None else _place(inputs, relay[0], message)
            self._given = _given(inputs, secret, size, package, place)
        else:
            os.close(secret)  # the mapping stays
        return inputs, inputs.job

    def for_ranks(self) -> Given:
        if self._given is None:
            raise FormatError(Code.SCHEMA, "a grant without a secret for the ranks")
        return self._given

    def begin(self, on_stop: Callable[[], None]) -> None:
        self._link.listen(on_stop)


def _given(inputs: GrantInputs, secret: int, size: int, package: int, machines: Machines | None) -> Given:
    from glasshouse.workloads.distributed.rank_server import Given

    return Given(
        secret=_group_secret(inputs),
        message={"bytes": size},
        descriptors=(secret, package),
        closed_to_others=True,
        machines=machines,
    )


def _place(inputs: GrantInputs, relay: int, message: Message) -> Machines:
    from glasshouse.wire.fields import Fields
    from glasshouse.workloads.distributed.machine_group import Machines

    fields = Fields(message, "grant")
    machines = fields.integer("machines", low=2, high=MAX_MACHINES)
    machine = fields.integer("machine", high=machines - 1)
    return Machines(socket.socket(fileno=relay), _group_secret(inputs), machine=machine, machines=machines)


def _group_secret(inputs: GrantInputs) -> bytes:
    if inputs.group_secret is None:
        raise FormatError(Code.SCHEMA, "a grant without a secret for the ranks")
    return inputs.group_secret


def tell(argv: Sequence[str]) -> int:
    """Run one workload under the protected leg, where `ready` was said already; return 0 when it finished, else 1.

    Args:
        argv: ``--fd N --workload KIND --workspace DIR [--ranks N]``, from the agent; a command line for people is
            `raw.tell`.
    """
    words = dict(zip(argv[::2], argv[1::2], strict=True))
    descriptor, kind, workspace = words.pop("--fd"), words.pop("--workload"), words.pop("--workspace")
    ranks = int(words.pop("--ranks")) if "--ranks" in words else None
    if words:
        raise ValueError("the worker was started with words that it does not know")
    leg = Protected(int(descriptor), ranked=ranks is not None)
    return work(leg, kind, Path(workspace), protected=True, ranks=ranks)


def work(leg: Leg, kind: str, workspace: Path, *, protected: bool, ranks: int | None = None) -> int:
    """Live one run to its end; return 0 when it finished, 1 when it failed.

    Args:
        workspace: an existing directory of this run alone.
        ranks: in how many processes of one group the script runs; None for this process.
    """
    try:
        result = _run(leg, kind, workspace.resolve(), protected=protected, ranks=ranks)
    except (ConnectionError, EOFError):
        return 1  # the agent is gone; nothing is left to tell
    except BaseException as error:
        return _failed(leg.channel, error)
    finally:
        sys.stdout.flush()
    if result is not None:
        leg.channel.send(result)
    return 0


def _failed(channel: Channel, error: BaseException) -> int:
    failures.explain(error)
    channel.send({"type": "failed", "code": failures.code_of(error).value})
    return 1


def _conclude(channel: Channel, task: Task, outcome: Result | RunError) -> int:
    """Report the end of a script that ends this process by `os._exit`; return the status to end it with."""
    try:
        if isinstance(outcome, RunError):
            _save_what_there_is(task)
            return _failed(channel, outcome)
        task.close()
    except BaseException as error:
        return _failed(channel, error)
    channel.send(outcome.to_json())
    return 0


def _run(leg: Leg, kind: str, workspace: Path, *, protected: bool, ranks: int | None) -> Message | None:
    if not leg.prepared():
        return None
    environment.prepare(workspace, protected=protected)
    allocator.keep_freed_memory()
    bytecode.allow_third_party()
    os.chdir(workspace)
    workload = _workload(leg, kind) if ranks is None else _ranked(leg, kind, ranks)
    started = time.perf_counter_ns()
    workload.warm()
    leg.channel.send({"type": "imported", "us": (time.perf_counter_ns() - started) // 1000})

    granted = leg.granted()
    if granted is None:
        return None
    inputs, table = granted
    params: Params = parse(kind, table)
    if ranks is not None and params.slots is not None:
        raise UsageError(
            Code.JOB_INVALID,
            "a job of several ranks cannot be measured: one process would wait for its slot and the others for it",
            hint="measure it in one process; make bench-collectives, in a checkout, measures the exchange of several",
        )
    channel, inputs, hooks = (leg.channel, inputs, None) if params.slots is None else _timed(leg.channel, inputs)
    task = Task(
        params=table,
        inputs=inputs,
        channel=channel,
        workspace=workspace,
        output_folders=getattr(params, "outputs", ("outputs",)),
    )
    install(task)
    leg.channel.send({"type": "opened"})
    stop = Stop()
    leg.begin(stop.ask)
    if params.slots is not None and hooks is not None:
        _measure(task, params, params.slots, leg.channel, stop, hooks)
    leg.channel.send({"type": "running"})
    try:
        result = workload.run(task, params, stop.register)
    except BaseException:
        _save_what_there_is(task)
        raise
    task.close()
    return result.to_json()


def _timed(channel: Channel, inputs: Inputs) -> tuple[Channel, Inputs, Hooks]:
    """Return a measured job's channel and inputs, and what adds up how long they took."""
    from glasshouse.workloads.measurement.wait_times import Hooks, TimedChannel, TimedInputs

    hooks = Hooks()
    return TimedChannel(channel, hooks), TimedInputs(inputs, hooks), hooks


def _measure(task: Task, params: Params, slots: Mapping[str, Json], channel: Channel, stop: Stop, hooks: Hooks) -> None:
    """Let the job take its slots, from its first step on, and end with its schedule."""
    from glasshouse.workloads.measurement.measured_steps import Measured

    def end() -> None:
        channel.stopping = True
        stop.ask()

    measured = Measured(slots, task, end=end, hooks=hooks, profile=params.profile)
    task.measure_by(measured.boundary, measured.record)


def _save_what_there_is(task: Task) -> None:
    """Pass on what was written before a failure: it is the owner's too."""
    try:
        task.close()
    except GlasshouseError as refused:
        failures.say(refused)
    except Exception:  # noqa: S110 - the failure that is under way is the one to tell
        pass


def _ranked(leg: Leg, kind: str, ranks: int) -> Workload:
    if kind != "script":
        raise UsageError(Code.JOB_INVALID, f"{kind} runs in one process: several ranks are for a script of your own")
    from glasshouse.workloads.distributed.ranked_script import Ranked

    return Ranked(ranks, leg.for_ranks, leg.channel)


def _workload(leg: Leg, kind: str) -> Workload:
    # Each is imported only where it runs: a script must not pay for a framework that it does not use.
    if kind == "mlp":
        from glasshouse.workloads.builtin import mlp

        return mlp
    if kind == "lora":
        from glasshouse.workloads.builtin import lora

        return lora
    if kind == "script":
        from glasshouse.workloads.builtin.script import Script

        return Script(partial(_conclude, leg.channel))
    raise RunError(Code.WORKER_FAILED, "there is no such workload")
