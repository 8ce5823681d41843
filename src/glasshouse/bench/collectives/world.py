"""The ranks of a benchmark as their parent sees them: started once, given orders, ended with it.

Laws: an order goes to every rank and every answer is waited for; a rank that dies, or takes longer than its time, ends
all of them with an error that carries what it said last; nothing is left running.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

from glasshouse.bench.collectives.values import Way
from glasshouse.errors import Code, InternalError

__all__ = ["World"]

START_S = 180.0
_LAST_WORDS = 1_500
_POLL_S = 0.2


class World:
    """Processes of ranks, ready for orders.

    Args:
        size: how many.
        ways: the groups that they make.
        stopped: says whether the measurement was asked to stop; looked at while waiting.

    Raises:
        InternalError: a rank did not start.
    """

    def __init__(self, size: int, ways: Sequence[Way], *, stopped: Callable[[], bool] = lambda: False) -> None:
        self.size, self._stopped = size, stopped
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._said: list[BinaryIO] = []
        self._files = contextlib.ExitStack()
        self._lines = [b""] * size
        try:
            self._start(ways)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes, by rank."""
        return tuple(process.pid for process in self._ranks)

    def order(self, do: str, *, timeout_s: float, **rest: Any) -> list[dict[str, Any]]:
        """Give an order to every rank and return their answers, by rank.

        Raises:
            InternalError: a rank died or took too long.
            KeyboardInterrupt: the measurement was asked to stop meanwhile.
        """
        for number in range(self.size):
            self._tell(number, {"do": do, **rest})
        return self._answers(range(self.size), timeout_s)

    def close(self) -> None:
        """End every rank; may be called again."""
        for process in self._ranks:
            with contextlib.suppress(OSError):
                process.kill()
        for process in self._ranks:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        self._files.close()

    def _start(self, ways: Sequence[Way]) -> None:
        # -P: nothing is imported from where the command was started.
        command = [sys.executable, "-P", "-m", "glasshouse.bench.collectives.rank"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        for _ in range(self.size):
            said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by the stack
            self._said.append(self._files.enter_context(said))
            self._ranks.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=said,
                    env=environment,
                    bufsize=0,
                )
            )
        first = {"size": self.size, "ways": [way.value for way in ways], "secret": secrets.token_hex(32)}
        self._tell(0, {**first, "rank": 0})
        [where] = self._answers([0], START_S)
        for number in range(1, self.size):
            self._tell(number, {**first, "rank": number, "port": where["port"]})
        self._answers(range(self.size), START_S)

    def _tell(self, number: int, order: Mapping[str, Any]) -> None:
        pipe = self._ranks[number].stdin
        try:
            if pipe is None:
                raise OSError("no pipe")
            pipe.write(json.dumps(order).encode() + b"\n")
        except OSError:
            raise self._dead(number) from None

    def _answers(self, numbers: Sequence[int] | range, timeout_s: float) -> list[dict[str, Any]]:
        end, found = time.monotonic() + timeout_s, dict[int, dict[str, Any]]()
        with selectors.DefaultSelector() as selector:
            for number in numbers:
                selector.register(self._pipe(number), selectors.EVENT_READ, number)
            while len(found) < len(numbers):
                if self._stopped():
                    raise KeyboardInterrupt
                if time.monotonic() > end:
                    waited = next(number for number in numbers if number not in found)
                    self._ask_where()
                    raise self._dead(waited, f"did not answer within {timeout_s:g} s")
                for key, _ in selector.select(_POLL_S):
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        raise self._dead(key.data)
                    line, newline, rest = (self._lines[key.data] + data).partition(b"\n")
                    self._lines[key.data] = rest if newline else line
                    if newline:
                        found[key.data] = json.loads(line)
        return [found[number] for number in numbers]

    def _ask_where(self) -> None:
        """Have every rank say where it stands, for the error's hint."""
        for process in self._ranks:
            with contextlib.suppress(OSError):
                process.send_signal(signal.SIGUSR1)
        time.sleep(_POLL_S)

    def _pipe(self, number: int) -> Any:
        pipe = self._ranks[number].stdout
        if pipe is None:
            raise self._dead(number)
        return pipe

    def _dead(self, number: int, how: str = "ended early") -> InternalError:
        said = self._said[number]
        said.seek(0)
        words = said.read().decode(errors="replace").strip()[-_LAST_WORDS:]
        return InternalError(Code.INTERNAL, f"rank {number} of the benchmark {how}", hint=words)
