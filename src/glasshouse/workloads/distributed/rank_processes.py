"""Starts, waits for and ends the ranks of one machine where torchelastic cannot: it wants sessions and ports.

Laws: a rank inherits one end of a pair and nothing else that its worker holds; it is ended by a descriptor, never by a
number that may be another process's; when one rank has failed the others are ended, and all are gone before they begin
again. What a rank starts itself is ended with the worker.
Source: torch.distributed.elastic, whose variables a rank finds.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence

from glasshouse.wire import ranks
from glasshouse.workloads.distributed.rank_pairs import PairServer

# Those that fail because of the same thing are distinguished from those that are ended because of them.
_TOGETHER_S = 0.1
# As torchelastic leaves to a rank that handles SIGTERM.
_ENDING_S = 30.0


def launch(server: PairServer, command: Sequence[str], count: int, *, max_restarts: int) -> Mapping[int, int]:
    """Start the ranks, again if one fails and it is allowed, and wait for the last; raises `OSError`.

    Returns:
        the exit codes of those that failed in the last start, negative for a signal.
    """
    variables = {
        # A script may look at these two; no listener is behind them.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": str(count),
        "ROLE_NAME": "rank",
        "ROLE_WORLD_SIZE": str(count),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": secrets.token_hex(8),
        "WORLD_SIZE": str(count),
    }
    for start in range(max_restarts + 1):
        server.begin()
        failed = _launch_once(server, command, count, variables | {"TORCHELASTIC_RESTART_COUNT": str(start)})
        server.settle()
        if not failed or server.stopped:
            return failed
    return failed


def _launch_once(
    server: PairServer, command: Sequence[str], count: int, variables: Mapping[str, str]
) -> dict[int, int]:
    started: list[_Rank] = []
    try:
        for rank in range(count):
            started.append(_Rank(server, command, rank, variables))
        _wait(started, to_failure=True)
        _wait(started, until=time.monotonic() + _TOGETHER_S)
        return {one.rank: one.code for one in started if one.code}
    finally:
        _end(started)


class _Rank:
    """One process."""

    def __init__(self, server: PairServer, command: Sequence[str], rank: int, variables: Mapping[str, str]) -> None:
        self.rank = rank
        self.code: int | None = None  # how it ended
        own, theirs = socket.socketpair()
        with theirs:
            number, channel = str(rank), theirs.fileno()
            numbers = {"LOCAL_RANK": number, "RANK": number, "ROLE_RANK": number, ranks.CHANNEL: str(channel)}
            try:
                self._process = subprocess.Popen(
                    command, env={**os.environ, **variables, **numbers}, pass_fds=[channel]
                )
            except BaseException:
                own.close()
                raise
        # Not waited for yet: the number is its own.
        self.pidfd = os.pidfd_open(self._process.pid)
        server.connect(rank, self._process.pid, own)

    def poll(self) -> bool:
        """Return whether it has ended."""
        if self.code is None:
            self.code = self._process.poll()
        return self.code is not None

    def close(self) -> None:
        """Wait for its end, which was ordered or has come."""
        self.code = self._process.wait()
        os.close(self.pidfd)


def _wait(started: Iterable[_Rank], *, to_failure: bool = False, until: float | None = None) -> None:
    """Wait until all have ended, or one has failed, or the time (monotonic, s) is up."""
    while True:
        living = [one for one in started if not one.poll()]
        if not living or (to_failure and any(one.code for one in started)):
            return
        left_s = None if until is None else until - time.monotonic()
        if left_s is not None and left_s <= 0:
            return
        poll = select.poll()
        for one in living:
            poll.register(one.pidfd, select.POLLIN)
        poll.poll(None if left_s is None else left_s * 1000)


def _end(started: Sequence[_Rank]) -> None:
    """Leave none of them: first by SIGTERM, which a script may handle, and then for good."""
    for number, patience_s in ((signal.SIGTERM, _ENDING_S), (signal.SIGKILL, 0.0)):
        for one in started:
            if not one.poll():
                signal.pidfd_send_signal(one.pidfd, number)
        _wait(started, until=time.monotonic() + patience_s)
    for one in started:
        one.close()
