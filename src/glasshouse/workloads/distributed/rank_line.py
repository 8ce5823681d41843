"""A rank's side of a line: it saves together with the others, through the worker (`rank_checkpoints`)."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import time
from collections.abc import Sequence
from functools import partial

from glasshouse.errors import RunError
from glasshouse.package.limits import CheckpointLimits
from glasshouse.task.channel import Message
from glasshouse.task.checkpoints import Line, Part, refused
from glasshouse.task.lines import PartSink, PartStream, check_size
from glasshouse.workloads.distributed.rank_channel import RankChannel
from glasshouse.workloads.distributed.rank_messages import PartBegins, PartEnds, SaveTogether

PIPE_BYTES = 1 << 20


class RankLine(Line):
    """The line of one rank; every rank of the job saves at the same step, or none does."""

    def __init__(self, channel: RankChannel, limits: CheckpointLimits) -> None:
        self.limits = limits
        self._channel = channel
        self._left, self._begins_s = 0, math.inf
        channel.on_line = self.take

    def take(self, message: Message) -> None:
        """Take what the worker passes on of the agent's permission."""
        left, wait_us = message.get("left"), message.get("wait_us")
        if isinstance(left, int) and isinstance(wait_us, int):
            self._left, self._begins_s = left, time.monotonic() + wait_us / 1e6

    def check_size(self, size: int) -> None:
        check_size(size, self.limits)

    def due(self) -> bool:
        return self._left > 0 and time.monotonic() >= self._begins_s

    def begin(self, paths: Sequence[str] | None, *, step: int, wait_s: float, shared: bool) -> Part | None:
        wait_us = int(wait_s * 1e6) if math.isfinite(wait_s) else None
        given = None if paths is None else tuple(paths)
        answer = self._channel.ask(partial(SaveTogether, step=step, shared=shared, paths=given, wait_us=wait_us))
        if "why" in answer:
            raise refused(str(answer["why"]))
        if answer.get("taken") is not True:
            return None
        self._left, self._channel.saved = 0, False
        excepted = answer["excepted"]
        return PartStream(
            _PipeSink(self._channel),
            self.limits,
            list(paths or ()),
            excepted=[*map(str, excepted)],  # type: ignore[arg-type]
        )


class _PipeSink(PartSink):
    """One part, through a pipe to the worker."""

    def __init__(self, channel: RankChannel) -> None:
        self._channel = channel
        read, self._write = os.pipe()
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        channel.tell(PartBegins(), [read])
        os.close(read)

    def data(self, plaintext: memoryview) -> None:
        try:
            while plaintext:
                plaintext = plaintext[os.write(self._write, plaintext) :]
        except BrokenPipeError:
            raise _without_others() from None

    def end(self, size: int, *, whole: bool) -> None:
        os.close(self._write)
        self._channel.saved = whole
        answer = self._channel.ask(partial(PartEnds, size=size, whole=whole))
        if whole and answer.get("taken") is not True:
            raise _without_others()


def _without_others() -> RunError:
    return refused("another rank has ended, or left its part")
