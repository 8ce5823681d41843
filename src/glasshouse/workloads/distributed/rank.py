"""One rank: a process that torchelastic or `rank_processes` started in the sandbox, and that runs the owner's script.

``python -I -B -c 'from glasshouse.workloads.distributed.rank import main; main()'``, with the variables of torchrun
and the two tokens of `wire.ranks`, or the number of an inherited descriptor, in its environment. It becomes undumpable
before its first request; it receives what a worker of one process receives, from the same secret memory.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING

from glasshouse.workloads.process.undumpable import close_to_others

if TYPE_CHECKING:
    from collections.abc import Mapping

    from glasshouse.task.inputs import Inputs
    from glasshouse.task.result import Result
    from glasshouse.wire.canonical import Json
    from glasshouse.workloads.distributed.rank_channel import RankChannel

__all__ = ["main"]


def main() -> None:
    """Join, run the script, and end the process."""
    close_to_others()
    code = _tell()
    sys.stdout.flush()
    sys.stderr.flush()
    # Frameworks take a second to take themselves down, and plaintext would live that much longer.
    os._exit(code)


def _tell() -> int:
    from glasshouse.errors import RunError
    from glasshouse.workloads.distributed.rank_channel import RankChannel
    from glasshouse.workloads.process import failures

    try:
        channel = RankChannel()
    except RunError as refused:
        failures.say(refused)
        return 1
    try:
        result = _run(channel)
    except BaseException as error:
        return _failed(channel, error)
    return _ended(channel, result)


def _failed(channel: RankChannel, error: BaseException) -> int:
    from glasshouse.workloads.distributed.rank_messages import Failed
    from glasshouse.workloads.process import failures

    sys.stdout.flush()
    sys.stderr.write(f"glasshouse: rank {os.environ.get('RANK', channel.rank)}:\n")
    failures.explain(error)
    channel.send(Failed(code=failures.code_of(error), words=failures.in_a_line(error)).to_json())
    return 1


def _ended(channel: RankChannel, result: Result) -> int:
    from glasshouse.workloads.distributed.rank_messages import Report

    report = Report(
        unit=result.unit,
        done=result.done,
        elapsed_us=result.elapsed_us,
        loss_first=result.loss_first,
        loss_final=result.loss_final,
    )
    channel.send(report.to_json())
    return 0


def _run(channel: RankChannel) -> Result:
    from pathlib import Path

    from glasshouse.errors import Code, FormatError, RunError
    from glasshouse.task.handle import Task
    from glasshouse.task.session import install
    from glasshouse.workloads.builtin import script
    from glasshouse.workloads.params import ScriptParams, parse
    from glasshouse.workloads.process import allocator, bytecode
    from glasshouse.workloads.process.stop_actions import Stop

    allocator.keep_freed_memory()
    inputs, table, workspace = _handed(channel)
    params = parse("script", table)
    if not isinstance(params, ScriptParams):
        raise FormatError(Code.SCHEMA, "a rank of something else than a script")
    task = Task(
        params=dict(table),
        inputs=inputs,
        channel=channel,
        workspace=Path(workspace),
        output_folders=params.outputs,
        shared=True,
    )
    install(task)
    bytecode.allow_third_party()
    stop = Stop()
    channel.listen(stop.ask)
    if channel.machine is not None:
        from glasshouse.collectives.torch_backend import reach
        from glasshouse.workloads.distributed.rank_channel import OtherMachines

        reach.use_dialler(OtherMachines(channel, channel.machine))
    if channel.inherited:
        _without_names(channel)

    def conclude(_task: Task, outcome: Result | RunError) -> int:
        return _failed(channel, outcome) if isinstance(outcome, RunError) else _ended(channel, outcome)

    result = script.train(task, params, stop.register, conclude)
    task.close()
    return result


def _without_names(channel: RankChannel) -> None:
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

    from glasshouse.wire.fields import Fields

    fields = Fields(channel.joined, "joined")
    workspace = fields.text("workspace", max_chars=4096)
    if fields.has("inputs"):
        from glasshouse.task.inputs import FolderInputs

        table = fields.any("params")
        assert isinstance(table, dict)  # noqa: S101 - written by the worker from what it had checked
        return FolderInputs(Path(fields.text("inputs", max_chars=4096))), table, workspace
    from glasshouse.task.granted import GrantInputs

    secret, package = channel.take_descriptors(2)
    inputs = GrantInputs(secret=secret, secret_bytes=fields.integer("bytes", low=1), package=package)
    os.close(secret)  # the mapping stays
    return inputs, inputs.job, workspace
