"""A job in several ranks: torchelastic starts them, as torchrun would, inside this worker's sandbox.

Where the sandbox has no network of its own, for want of a namespace, `rank_pairs` starts them in its place, and they
inherit their connections. An unmodified script of torchrun finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT as there; its inputs lie once, for all ranks, in the working directory. Laws: a rank that fails, is killed
or is refused ends the job on all ranks, with the reason that came first and is no consequence of another; what any rank
wrote into the output folder comes back, and each machine's first rank alone reports progress, saves outputs by name and
has its end for the run's.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeAlias

from glasshouse.errors import Code, RunError
from glasshouse.task.channel import Channel
from glasshouse.task.handle import Task
from glasshouse.wire import ranks
from glasshouse.workloads.distributed.machine_group import STORE_PORT, MachineGroup
from glasshouse.workloads.distributed.rank_checkpoints import RankCheckpoints
from glasshouse.workloads.distributed.rank_server import Failure, Given, RankLinks, RankServer
from glasshouse.workloads.params import Params
from glasshouse.workloads.process import environment, failures
from glasshouse.workloads.process.job_control import JobControl, Result

_RANK = "from glasshouse.workloads.distributed.rank import main; main()"
_LOOPBACK = "127.0.0.1"
_POLL_S = 0.1
_JOINING_S, _JOINING_MACHINES_S = 60, 600
_NOTICING_S = 5.0
# How other ranks fail when one is gone or has failed: a consequence, unless no other has a reason.
_CONSEQUENCES = frozenset({Code.COLLECTIVE_ABORTED, Code.RANK_LOST, Code.COLLECTIVE_TIMEOUT})

_Exits: TypeAlias = Mapping[int, int]  # of the ranks that failed, on this machine; negative for a signal


class RankedWorkload:
    """A workload in `count` processes, each of which does its `run`."""

    def __init__(self, kind: str, count: int, channel: Channel) -> None:
        self._kind, self._count, self._channel = kind, count, channel
        self._inherit = not environment.sockets_open()

    def warm(self) -> None:
        """Import the launcher, which is all of torch; the ranks import it again, each for itself."""
        if self._inherit:
            from glasshouse.workloads.distributed import rank_pairs  # noqa: F401
        else:
            import torch.distributed.launcher.api  # noqa: F401 - what the gate's decision leaves time for

    def run(self, given: Given, task: Task, params: Params, control: JobControl) -> Result:
        """Start the ranks, and wait for the last.

        Raises:
            RunError: the reason of the first rank that failed: its own, `rank-lost` or a collective's.
        """
        restarts = getattr(params, "max_restarts", 0)
        machines, self._line = given.machines, given.line
        given = replace(given, first=0 if machines is None else machines.machine * self._count)
        if machines is not None:
            machines.start(partial(_end_without, task, self._channel))
        if self._inherit:
            from glasshouse.workloads.distributed import rank_pairs

            with rank_pairs.PairServer(given, task, self._channel) as pairs:
                command = (sys.executable, *self._arguments())
                launch = partial(rank_pairs.launch, pairs, command, self._count, max_restarts=restarts)
                return self._finish(pairs, launch, control, machines)
        with RankServer(given, task, self._channel) as server:
            launch = partial(self._launch, server, restarts, machines)
            return self._finish(server, launch, control, machines)

    def _finish(
        self,
        server: RankLinks,
        launch: Callable[[], _Exits],
        control: JobControl,
        machines: MachineGroup | None,
    ) -> Result:
        control.on_stop(server.stop)
        if self._line is not None:
            server.checkpoints = RankCheckpoints(self._line, self._count, machines)
            self._line.on_permission = server.permit
        if self._count > 1:
            os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
        failed = launch()
        if server.checkpoints is not None:
            server.checkpoints.wait_until_idle()  # of ranks that were killed
        server.settle()
        if machines is not None and not failed:
            machines.finish()
        if failed and not server.stopped:
            own, count = (0, 1) if machines is None else (machines.machine, machines.machines)
            raise first_reason(server.failures, failed, self._count * count, first=self._count * own)
        ended = server.report
        return Result(**asdict(replace(ended, stop_reason="stopped") if server.stopped else ended))

    def _launch(self, server: RankServer, restarts: int, machines: MachineGroup | None) -> _Exits:
        """Have torchelastic start the ranks, and wait."""
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        class Tokens(DefaultLogsSpecs):  # type: ignore[misc]  # torch is not typed here
            """Adds each rank's own tokens where torchelastic lets each rank's own variables be set."""

            def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
                destinations = super().reify(envs)
                for rank, variables in envs.items():
                    variables.update(server.issue_tokens(rank))
                return destinations

        os.environ[ranks.SOCKET] = server.path
        config = LaunchConfig(
            **_rendezvous(machines),
            nproc_per_node=self._count,
            role="rank",
            max_restarts=restarts,
            monitor_interval=_POLL_S,
            local_addr=_LOOPBACK,
            logs_specs=Tokens(),
            # The others are handled by the worker: each rank gets a `stop`, and its script is interrupted.
            signals_to_handle="SIGQUIT",
        )
        try:
            elastic_launch(config, sys.executable)(*self._arguments())
        except ChildFailedError as error:
            return {failure.local_rank: failure.exitcode for failure in error.failures.values()}
        return {}

    def _arguments(self) -> tuple[str, ...]:
        """Return the arguments of the interpreter that becomes a rank."""
        prefix = () if sys.pycache_prefix is None else ("-X", f"pycache_prefix={sys.pycache_prefix}")
        return ("-I", "-B", *prefix, "-c", _RANK, self._kind)


def _end_without(task: Task, channel: Channel, machine: int) -> None:
    """End this worker because another machine's is gone; nothing that its ranks wait for will come.

    They may fail by themselves, or for the reason: they are given a moment to report it.
    """
    time.sleep(_NOTICING_S)
    failures.report(RunError(Code.RANK_LOST, f"the ranks of machine {machine} are gone, and with them the job"))
    with contextlib.suppress(Exception):
        task.close()  # what was written is the owner's too
    with contextlib.suppress(OSError):
        channel.send({"type": "failed", "code": Code.RANK_LOST.value})
    os._exit(1)


def _rendezvous(machines: MachineGroup | None) -> dict[str, Any]:
    """Return where torchelastic's agents meet: alone, or at the store of the first machine."""
    if machines is None:
        configs: dict[str, Any] = {"timeout": _JOINING_S}
        nodes, backend, endpoint, run_id = 1, "c10d", "localhost:0", secrets.token_hex(8)
    else:
        # Ranks are counted machine by machine, as in the group. Every machine finds the store at the same place.
        configs = {"rank": machines.machine, "timeout": _JOINING_MACHINES_S}
        nodes, backend, endpoint, run_id = machines.machines, "static", f"{_LOOPBACK}:{STORE_PORT}", "group"
    return {
        "min_nodes": nodes,
        "max_nodes": nodes,
        "rdzv_backend": backend,
        "rdzv_configs": configs,
        "rdzv_endpoint": endpoint,
        "run_id": run_id,
    }


def first_reason(reported: list[Failure], exits: _Exits, count: int, *, first: int = 0) -> RunError:
    """Return why a job of `count` ranks failed, by those of this machine.

    Args:
        reported: their failures, in the order in which they were reported.
        exits: exit codes of those that failed; the others are ended by SIGTERM.
        first: the number in the job of this machine's first rank.
    """
    reporting = {failure.rank for failure in reported}
    silent = [(rank, code) for rank, code in sorted(exits.items()) if rank not in reporting]
    own = [failure for failure in reported if failure.code not in failures.COLLECTIVE]
    killed = [(rank, -code) for rank, code in silent if code < 0 and code != -signal.SIGTERM]
    ended = [(rank, code) for rank, code in silent if code > 0]
    collective = [failure for failure in reported if failure.code not in _CONSEQUENCES] or reported
    code, what, words = Code.RANK_LOST, "a rank was ended from outside", ""
    if own:
        rank, code, words = own[0]
        what = f"rank {first + rank} failed"
    elif killed:
        rank, number = killed[0]
        what = f"rank {first + rank} was ended by {_signal(number)}"
    elif ended:
        rank, status = ended[0]
        code, what = Code.SCRIPT_FAILED, f"rank {first + rank} ended without a word, with exit status {status}"
    elif collective:
        rank, code, words = collective[0]
        what = f"rank {first + rank} could not go on with the others"
    # What other ranks wrote because of it stands between here and what this one wrote.
    hint = f"its words: {words}" if words else ""
    return RunError(code, f"{what}, which ends all {count} ranks" if count > 1 else what, hint=hint)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
