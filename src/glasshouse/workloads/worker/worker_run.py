"""One run of a workload in the worker, from `prepare` to its result; the same under both legs.

Every source is compiled anew at every start, so what only some runs need is imported where they need it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

from glasshouse.errors import Code, FormatError, GlasshouseError, RunError
from glasshouse.package.limits import CheckpointLimits
from glasshouse.task import install
from glasshouse.task.channel import AgentLink, Channel, EventLines, Message
from glasshouse.task.handle import JOB_FOLDER, Task
from glasshouse.task.inputs import FolderInputs, Inputs
from glasshouse.wire.canonical import Json
from glasshouse.wire.crypto import GROUP_SECRET_BYTES
from glasshouse.wire.group import MAX_MACHINES
from glasshouse.wire.policy import RANKED
from glasshouse.wire.record import LEFT_OUT, Record, integer
from glasshouse.workloads import registry
from glasshouse.workloads.job_keys import job_invalid
from glasshouse.workloads.process import bytecode, environment, failures
from glasshouse.workloads.process.job_control import JobControl, Result

if TYPE_CHECKING:
    from glasshouse.task.checkpoints import Restored
    from glasshouse.task.lines import AgentLine
    from glasshouse.workloads.distributed.rank_server import Given
    from glasshouse.workloads.measurement.measured_steps import WaitTimes
    from glasshouse.workloads.params import Params


@dataclass(frozen=True, kw_only=True, slots=True)
class _GrantMessage(Record, name="grant", constants={"type": "grant"}):
    """Comes with the descriptors of the grant and the package.

    Behind them, on one of several machines, of the agent's relay; and where the job goes on from a checkpoint, of the
    file of its parts.
    """

    bytes: Annotated[int, integer(1)]  # of the grant
    machines: Annotated[int | None, integer(2, MAX_MACHINES), LEFT_OUT] = None
    machine: Annotated[int, integer(0, MAX_MACHINES - 1), LEFT_OUT] = 0  # which this is
    resume: Annotated[bool, LEFT_OUT] = False

    def __post_init__(self) -> None:
        if self.machine >= (self.machines or 1):
            raise FormatError(Code.SCHEMA, "a grant for a machine that the group does not have")


class _Leg:
    """What both legs have."""

    channel: Channel  # where messages and outputs go
    line: AgentLine | None = None  # where checkpoints go
    restored: Mapping[int, Restored] = MappingProxyType({})  # what each rank goes on from


class Protected(_Leg):
    """The protected leg: inputs come from the agent as a grant in secret memory."""

    def __init__(self, descriptor: int, *, ranked: bool = False) -> None:
        self._link = AgentLink(socket.socket(fileno=descriptor))
        self.channel = self._link
        self._ranked = ranked

    def prepared(self) -> bool:
        """Wait until the work may be prepared; False when the run is over before it began."""
        if self._link.receive().get("type") != "prepare":
            return False
        # Ciphers are loaded now, while the gate decides; after the release every moment counts.
        importlib.import_module("glasshouse.task.granted")
        return True

    def granted(self, folder: Path) -> tuple[Inputs, Mapping[str, Json], Given | None] | None:
        """Wait for inputs, parameters and what each rank is handed; None when the run is over before it began.

        A checkpoint that the job goes on from is laid out below `folder`.
        """
        from glasshouse.task.granted import GrantInputs

        message = self._link.receive()
        if message.get("type") == "stop":
            return None
        grant = _GrantMessage.from_json(message)
        count = 2 + (grant.machines is not None) + grant.resume
        secret, package, *more = self._link.take_descriptors(count)
        inputs = GrantInputs(secret=secret, secret_bytes=grant.bytes, package=package)
        if (inputs.resume is not None) != grant.resume:
            raise FormatError(Code.SCHEMA, "a checkpoint to go on from without its parts, or the reverse")
        if inputs.resume is not None:
            from glasshouse.task.restore import restore

            self.restored = restore(inputs.resume, more.pop(), folder)
        if limits := CheckpointLimits.of(inputs.job):
            from glasshouse.task.lines import AgentLine

            self.line = AgentLine(self._link, limits)
        if not self._ranked:
            os.close(secret)  # the mapping stays
            return inputs, inputs.job, None
        if inputs.group_secret is None:
            raise FormatError(Code.SCHEMA, "a grant without a secret for the ranks")
        from glasshouse.workloads.distributed.machine_group import MachineGroup
        from glasshouse.workloads.distributed.rank_server import Given

        group = None
        if grant.machines is not None:
            own = socket.socket(fileno=more[0])
            group = MachineGroup(own, inputs.group_secret, machine=grant.machine, machines=grant.machines)
        given = Given(
            secret=inputs.group_secret,
            message={"bytes": grant.bytes},
            descriptors=(secret, package),
            closed_to_others=True,
            machines=group,
            line=self.line,
            restored=self.restored,
        )
        return inputs, inputs.job, given

    def begin(self, control: JobControl) -> None:
        """Listen for `stop` from now on."""
        if self.line is None:
            self._link.listen(control.stop)
        else:
            self._link.listen(control.stop, self.line.take)


class Raw(_Leg):
    """The raw leg: inputs are a plain folder; SIGTERM and SIGINT stop the job."""

    def __init__(self, kind: str, params: Path, inputs: Path, channel: Channel, *, ranked: bool) -> None:
        self.channel = channel
        self._kind, self._params, self._inputs, self._ranked = kind, params, inputs, ranked

    def prepared(self) -> bool:
        """Return that the work may be prepared."""
        return True

    def granted(self, _folder: Path) -> tuple[Inputs, Mapping[str, Json], Given | None]:
        """Return the folder, the parameters and what each rank is handed."""
        table = registry.canonical(self._kind, json.loads(self._params.read_text("utf-8")))
        if not self._ranked:
            return FolderInputs(self._inputs), table, None
        from glasshouse.workloads.distributed.rank_server import Given

        message: dict[str, Json] = {"inputs": str(self._inputs), "params": table}
        given = Given(secret=os.urandom(GROUP_SECRET_BYTES), message=message, closed_to_others=False)
        return FolderInputs(self._inputs), table, given

    def begin(self, control: JobControl) -> None:
        """Have both signals stop the job from now on."""

        def stop(_number: int, _frame: object) -> None:
            if not self.channel.stopping:
                self.channel.stopping = True
                control.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)


def run_protected(argv: Sequence[str]) -> int:
    """Run one workload under the protected leg, where `ready` was sent already; return 0 when it finished, else 1.

    Args:
        argv: ``--fd N --workload KIND --workspace DIR [--ranks N]``, from the agent; a command line for people is
            `run_raw`'s.
    """
    options = dict(zip(argv[::2], argv[1::2], strict=True))
    descriptor, kind, workspace = options.pop("--fd"), options.pop("--workload"), options.pop("--workspace")
    ranks = int(options.pop("--ranks")) if "--ranks" in options else None
    if options:
        raise ValueError("the worker was started with unknown options")
    leg = Protected(int(descriptor), ranked=ranks is not None)
    return run_worker(leg, kind, Path(workspace), protected=True, ranks=ranks)


def run_raw(argv: Sequence[str]) -> int:
    """Run one workload under the raw leg; return 0 when it finished, 1 when it failed."""
    import argparse  # the protected leg does without these: every start compiles what it imports
    import shutil
    import tempfile

    parser = argparse.ArgumentParser(prog="glasshouse.workloads.worker", allow_abbrev=False)
    parser.add_argument("--raw", action="store_true")
    parser.add_argument("--workload", choices=tuple(registry.MODULES), required=True)
    parser.add_argument("--params", type=Path, required=True)
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--outputs", type=Path, required=True)
    parser.add_argument("--workspace", type=Path)
    parser.add_argument("--events", default="-", help="file for the messages, - for standard output")
    parser.add_argument("--ranks", type=int, help="run in this many processes of one group")
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


def run_worker(leg: Protected | Raw, kind: str, workspace: Path, *, protected: bool, ranks: int | None = None) -> int:
    """Do one run in a `workspace` of its own, in `ranks` processes; return 0 when it finished, else 1."""
    try:
        result = _run(leg, kind, workspace.resolve(), protected=protected, ranks=ranks)
    except (ConnectionError, EOFError):
        return 1  # the agent is gone
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


def _run(leg: Protected | Raw, kind: str, workspace: Path, *, protected: bool, ranks: int | None) -> Message | None:
    if not leg.prepared():
        return None
    environment.prepare(workspace, protected=protected)
    environment.keep_freed_memory()
    bytecode.allow_third_party()
    os.chdir(workspace)
    workload = registry.load(kind)
    warm, run, ranked = workload.warm, workload.run, None
    if ranks is not None:
        from glasshouse.workloads.distributed.ranked_workload import RankedWorkload

        if kind not in RANKED:
            raise job_invalid(f"{kind} runs in one process; in several ranks: {', '.join(RANKED)}")
        ranked = RankedWorkload(kind, ranks, leg.channel)
        warm = ranked.warm
    started = time.perf_counter_ns()
    environment.import_uncollected(warm)
    leg.channel.send({"type": "imported", "us": (time.perf_counter_ns() - started) // 1000})

    granted = leg.granted(workspace / JOB_FOLDER)
    if granted is None:
        return None
    inputs, table, given = granted
    if ranked is not None and given is not None:
        run = partial(ranked.run, given)
    params = workload.Params.read(table)
    channel, waits = leg.channel, None
    if params.slots is not None and ranks is not None:
        raise job_invalid(
            "a job of several ranks cannot be measured: one process would wait for its slot and the others for it",
            hint="measure it in one process; make bench-collectives, in a checkout, measures the exchange of several",
        )
    if params.slots is not None:
        from glasshouse.workloads.measurement.measured_steps import TimedChannel, TimedInputs, WaitTimes

        waits = WaitTimes()
        channel, inputs = TimedChannel(channel, waits), TimedInputs(inputs, waits)
    task = Task(
        params=table,
        inputs=inputs,
        channel=channel,
        workspace=workspace,
        output_folders=getattr(params, "outputs", ("outputs",)),
        line=leg.line,
        resume=leg.restored.get(0),
    )
    install(task)
    leg.channel.send({"type": "opened"})
    control = JobControl(partial(_conclude, leg.channel, task))
    leg.begin(control)
    if waits is not None:
        _measure(task, params, leg.channel, control, waits)
    leg.channel.send({"type": "running"})
    try:
        workload.prepare(task, params)
        result = run(task, params, control)
    except BaseException:
        _save_what_there_is(task)
        raise
    task.close()
    return result.to_json()


def _measure(task: Task, params: Params, channel: Channel, control: JobControl, waits: WaitTimes) -> None:
    """Have the job's steps wait for their slots, from the first on, and the job end with its schedule."""
    from glasshouse.workloads.measurement.measured_steps import MeasuredSteps

    def end() -> None:
        channel.stopping = True
        control.stop()

    measured = MeasuredSteps(params.slots or {}, task, end=end, waits=waits, profile=params.profile)
    task.measure_by(measured.boundary, measured.record)


def _save_what_there_is(task: Task) -> None:
    """Pass on what was written before a failure: it is the owner's too."""
    try:
        task.close()
    except GlasshouseError as refused:
        failures.report(refused)
    except Exception:  # noqa: S110 - the failure that is under way is the one to report
        pass
