"""This machine as a place: the run's folder here is its folder there, and nothing has to be carried."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from glasshouse.errors import Code, PlatformError
from glasshouse.providers.place.base import Place, Placed
from glasshouse.providers.protocol.order import Order
from glasshouse.providers.serve.facts import free_addresses
from glasshouse.providers.serve.runs import Run

_LOOK_S = 0.1


class LocalPlaced(Placed):
    """A run on this machine."""

    problem = ""

    def __init__(self, folder: Path) -> None:
        self._run = Run(folder)
        # Readable when its keeper has ended: waiting costs nothing while it trains.
        self._keeper: int | None = None

    def connect(self) -> None:
        """Do nothing: the broker is reached as it is."""

    def upload(self, package: Path, on_progress: Callable[[int, int], None]) -> str:
        return str(package)

    def start(self, order: Order, launch: bytes, *, check: Callable[[], None] = lambda: None) -> int:
        return self._run.start(order, Path(order.package), launch, link=False)

    def wait(self, timeout_s: float) -> int | None:
        if self._keeper is None and (pid := self._run.keeper) is not None:
            with contextlib.suppress(ProcessLookupError):
                self._keeper = os.pidfd_open(pid)
        if self._keeper is not None and not select.select([self._keeper], [], [], timeout_s)[0]:
            return None  # it writes down the end before its own, and looking costs more than waiting
        ended = self._run.ended()
        if ended is None:
            time.sleep(min(timeout_s, _LOOK_S))  # the keeper was killed, and the runtime goes on
        if ended is not None:
            self.close()
        return ended

    def stop(self) -> None:
        self._run.stop(signal.SIGTERM)

    interrupt = stop

    def kill(self) -> None:
        self._run.stop(signal.SIGKILL)

    def remove(self, package: str | None = None) -> None:
        """Leave it: what is there is what its owner has."""

    def close(self) -> None:
        if self._keeper is not None:
            with contextlib.suppress(OSError):
                os.waitid(os.P_PIDFD, self._keeper, os.WEXITED | os.WNOHANG)  # where it was this process's child
            os.close(self._keeper)
            self._keeper = None


class LocalPlace(Place):
    """This machine, as it is."""

    name = "local"
    # Nothing here names containers for us: the id is ours, which stands in the evidence.
    container_source = "minted"

    def check(self, package_bytes: int = 0) -> None:
        if not sys.platform.startswith("linux"):
            raise PlatformError(Code.PLATFORM, "a runtime needs Linux; seal here and run on a Linux machine")

    def installed(self) -> None:
        """Return None: it is what this process can import."""

    def addresses(self, machines: int) -> tuple[str, ...]:
        return free_addresses("127.0.0.1", machines)

    def run(self, folder: Path, *, max_bytes: int | None = None, relayed: bool = False) -> LocalPlaced:
        return LocalPlaced(folder)

    def close(self) -> None:
        """Leave nothing open: nothing is kept."""
