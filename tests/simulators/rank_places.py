"""The worker's end of its ranks, with real processes at the other ends."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from glasshouse.task.channel import Channel
from glasshouse.task.handle import Task
from glasshouse.task.inputs import FolderInputs
from glasshouse.wire import ranks
from glasshouse.workloads.distributed.rank_pairs import PairServer
from glasshouse.workloads.distributed.rank_server import Given, RankLinks
from tools.recording_channel import Recorded

__all__ = ["JOINED", "PATIENCE_S", "SECRET", "PairPlace", "RankPlace"]

SECRET = secrets.token_bytes(32)
PATIENCE_S = 120.0

# What a rank that inherited its connection does before its script; `channel` is its end.
JOINED = """
import os, queue, socket, sys, time
from glasshouse.errors import GlasshouseError
from glasshouse.workloads.process.undumpable import close_to_others
from glasshouse.workloads.distributed.rank_channel import RankChannel
close_to_others()
channel = RankChannel()
channel.listen(lambda: print("stop", flush=True))
def said(action):
    try:
        return action()
    except (GlasshouseError, OSError, queue.Empty) as error:
        return type(error).__name__
def asked(what, *keys, limit_s=60, **words):
    answer = channel.ask_store({"keys": list(keys), "what": what, **words}, limit_s)
    return {name: value for name, value in answer.items() if name not in ("id", "type")}
def taken(door):
    return socket.socket(fileno=socket.recv_fds(door, 1, 1)[1][0])
"""

S = TypeVar("S", bound=RankLinks)


class RankPlace(Generic[S]):
    """A server, its task, and the ranks that a test starts.

    Args:
        serve: the server's class.
        folder: of the task.
        closed, descriptors: as `Given` has them.
    """

    def __init__(
        self,
        serve: Callable[[Given, Task, Channel], S],
        folder: Path,
        *,
        closed: bool = False,
        descriptors: tuple[int, ...] = (),
    ) -> None:
        (folder / "in").mkdir(exist_ok=True)
        self.channel = Recorded()
        self.task = Task(params={}, inputs=FolderInputs(folder / "in"), channel=self.channel, workspace=folder)
        given = Given(secret=SECRET, message={"bytes": 7}, descriptors=descriptors, closed_to_others=closed)
        self.server = serve(given, self.task, self.channel)
        self.processes: list[subprocess.Popen[str]] = []

    def spawn(self, code: str, environment: dict[str, str], **how: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", code],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **how,
        )
        self.processes.append(process)
        return process

    def start(self, code: str, rank: int = 0) -> subprocess.Popen[str]:
        raise NotImplementedError

    def say(self, code: str, rank: int = 0) -> list[str]:
        """Run a rank to its end, and return what it printed."""
        return self.start(code, rank).communicate(timeout=PATIENCE_S)[0].splitlines()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


class PairPlace(RankPlace[PairServer]):
    """Ranks that inherit their connection."""

    def __init__(self, folder: Path, **given: Any) -> None:
        super().__init__(PairServer, folder, **given)

    def start(self, code: str, rank: int = 0) -> subprocess.Popen[str]:
        own, theirs = socket.socketpair()
        with theirs:
            named = {"RANK": str(rank), ranks.CHANNEL: str(theirs.fileno())}
            process = self.spawn(code, named, pass_fds=[theirs.fileno()], stdin=subprocess.PIPE)
        self.server.connect(rank, process.pid, own)
        return process
