"""One rank: a process that torchelastic or `rank_pairs` started in the sandbox, and that runs the job's workload.

``python -I -B -c 'from glasshouse.workloads.distributed.rank import main; main()' KIND``, with the variables of
torchrun and the two tokens of `wire.ranks`, or the number of an inherited descriptor, in its environment. It becomes
undumpable before its first request; it receives what a worker of one process receives, from the same secret memory.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING

from glasshouse.workloads.process.undumpable import close_to_others

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from glasshouse.task.checkpoints import Restored
    from glasshouse.task.inputs import Inputs
    from glasshouse.wire.canonical import Json
    from glasshouse.workloads.distributed.rank_channel import RankChannel
    from glasshouse.workloads.process.job_control import Result


def main() -> None:
    """Join, run the workload, and end the process."""
    close_to_others()
    from glasshouse.errors import RunError
    from glasshouse.workloads.distributed.rank_channel import RankChannel
    from glasshouse.workloads.process import failures

    try:
        channel = RankChannel()
    except RunError as refused:
        failures.report(refused)
        os._exit(1)
    try:
        outcome: Result | BaseException = _run(channel, sys.argv[1])
    except BaseException as error:
        outcome = error
    code = _report(channel, outcome)
    sys.stdout.flush()
    sys.stderr.flush()
    # Frameworks take a second to take themselves down, and plaintext would live that much longer.
    os._exit(code)


def _report(channel: RankChannel, outcome: Result | BaseException) -> int:
    """Send the worker this rank's end; return the exit status."""
    from dataclasses import fields

    from glasshouse.workloads.distributed.rank_messages import RankFailed, Report
    from glasshouse.workloads.process import failures

    channel.wait_until_saved()
    if isinstance(outcome, BaseException):
        sys.stdout.flush()
        sys.stderr.write(f"glasshouse: rank {os.environ.get('RANK', channel.rank)}:\n")
        failures.explain(outcome)
        channel.send(RankFailed(code=failures.code_of(outcome), words=failures.in_a_line(outcome)).to_json())
        return 1
    channel.send(Report(**{one.name: getattr(outcome, one.name) for one in fields(Report)}).to_json())
    return 0


def _run(channel: RankChannel, kind: str) -> Result:
    from pathlib import Path

    from glasshouse.collectives.torch_backend import reach
    from glasshouse.task import install
    from glasshouse.task.handle import Task
    from glasshouse.workloads import registry
    from glasshouse.workloads.process import bytecode, environment
    from glasshouse.workloads.process.import_hooks import ImportHooks
    from glasshouse.workloads.process.job_control import JobControl

    environment.keep_freed_memory()
    inputs, table, workspace = _handed(channel)
    workload = registry.load(kind)
    params = workload.Params.read(table)
    line = None
    if params.checkpoints is not None and "bytes" in channel.joined:  # not in a raw run
        from glasshouse.workloads.distributed.rank_line import RankLine

        line = RankLine(channel, params.checkpoints)
    task = Task(
        params=dict(table),
        inputs=inputs,
        channel=channel,
        workspace=Path(workspace),
        output_folders=getattr(params, "outputs", ("outputs",)),
        shared=True,
        line=line,
        resume=_restored(channel.joined.get("resume")),
    )
    install(task)
    bytecode.allow_third_party()
    control = JobControl(lambda outcome: _report(channel, outcome))
    channel.listen(control.stop)
    reach.seal_all()
    os.environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)  # at 0, torch would not call what seals its groups
    if channel.machine is not None:
        from glasshouse.workloads.distributed.rank_channel import OtherMachines

        reach.use_dialler(OtherMachines(channel, channel.machine))
    if channel.inherited:
        _use_channel(channel)
    environment.import_uncollected(workload.warm)
    # Half a second to import, and most jobs do without.
    with ImportHooks({"torch.distributed.checkpoint.state_dict_saver": _use_own_group}):
        result = workload.run(task, params, control)
    task.close()
    return result


def _restored(found: Json) -> Restored | None:
    """Return the checkpoint that the worker has laid out for this rank."""
    from pathlib import Path

    from glasshouse.task.checkpoints import Restored

    if not isinstance(found, dict) or not isinstance(step := found["step"], int):
        return None
    path = str(found["path"])
    if path:
        os.environ["GLASSHOUSE_RESUME"] = path
    return Restored(step=step, path=Path(path) if path else None, files=frozenset())


def _use_own_group(saver: ModuleType) -> None:
    from glasshouse.collectives.torch_backend import in_job

    in_job.replace_async_save(saver)


def _use_channel(channel: RankChannel) -> None:
    """Have torch find its store, and sealed groups their secret and their ranks, over the channel."""
    from glasshouse.collectives import secret
    from glasshouse.collectives.torch_backend import reach
    from glasshouse.collectives.transport.dial import HandedOver

    @functools.cache  # torch's C++ holds its own half of the object alone, and calls this one
    def store() -> object:
        from glasshouse.workloads.distributed.torch_store import ChannelStore

        return ChannelStore(channel)

    reach.use_dialler(HandedOver(channel.open_door, channel.call))
    reach.use_store(store)
    secret.provide(channel.group_secret)


def _handed(channel: RankChannel) -> tuple[Inputs, Mapping[str, Json], str]:
    """Return the inputs, the parameters and the workspace that came with the answer to `join`."""
    from pathlib import Path

    joined = channel.joined
    workspace, table, size = str(joined["workspace"]), joined.get("params"), joined.get("bytes")
    if isinstance(table, dict):
        from glasshouse.task.inputs import FolderInputs

        return FolderInputs(Path(str(joined["inputs"]))), table, workspace
    from glasshouse.task.granted import GrantInputs

    assert isinstance(size, int)  # noqa: S101 - written by the worker
    secret, package = channel.take_descriptors(2)
    inputs = GrantInputs(secret=secret, secret_bytes=size, package=package)
    os.close(secret)  # the mapping stays
    return inputs, inputs.job, workspace
