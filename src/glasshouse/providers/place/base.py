"""What every place offers: runs are put there, followed and stopped, by whichever way it is reached."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from glasshouse.providers.protocol.order import Order


class Placed(Protocol):
    """One run at a place, from before its start until it has ended there and all of it is here."""

    problem: str  # why it cannot be followed at this moment; empty while it can

    def connect(self) -> str | None:
        """Get ready; return the `broker_url` that the launch file has to name, None for the broker's own.

        Raises:
            PeerError, PlatformError: the place cannot be reached, or does not serve.
        """

    def upload(self, package: Path, on_progress: Callable[[int, int], None]) -> str:
        """Have a sealed package there, over a line that may break, and return what to name in the order.

        Args:
            on_progress: called with how many bytes are there, and how many it has; may raise.

        Raises:
            PeerError: the place is gone, for longer than is waited.
            UsageError, RunError: the place refused it.
        """

    def start(self, order: Order, launch: bytes, *, check: Callable[[], None]) -> int:
        """Start the runtime, once, over a line that may break; return its process id there.

        Args:
            launch: the launch file; goes to the runtime by standard input and nowhere else.
            check: called between tries; may raise.

        Raises:
            UsageError, PlatformError: it cannot be started.
            PeerError: whether it was started is not known.
        """

    def wait(self, timeout_s: float) -> int | None:
        """Take what is new for at most a time; return the exit code once the run has ended and all of it is here.

        A connection that is lost is opened again.
        """

    def interrupt(self) -> None:
        """Ask the runtime to stop, zeroize and end; where it cannot be reached now, later."""

    def stop(self) -> None:
        """Ask it now; raises `PeerError` where it cannot be reached."""

    def kill(self) -> None:
        """End it at once; for a runtime that does not answer `interrupt`."""

    def remove(self, package: str | None = None) -> None:
        """Remove what is left at the place of a run that has ended, also of one that was never started.

        Args:
            package: what `upload` returned, if it was sent.

        Raises:
            PeerError, UsageError: it cannot be, or has not ended.
        """

    def close(self) -> None:
        """Leave it to itself: it goes on."""


class Place(Protocol):
    """Where runtimes run."""

    name: str  # as people write it
    container_source: str  # who names the container: `minted` by us, or read from the `platform`

    def check(self, package_bytes: int = 0) -> None:
        """See that a run could be placed, before anything is sealed or sent.

        Args:
            package_bytes: what would be sent; 0 where that is not known yet.

        Raises:
            PeerError, PlatformError, UsageError: it could not, and why.
        """

    def installed(self) -> Mapping[str, str] | None:
        """Return version by normal name of what is installed there, and of ``nvidia-driver``; None for this machine.

        Raises:
            PeerError, PlatformError: it cannot be listed.
        """

    def addresses(self, machines: int) -> tuple[str, ...]:
        """Return where the runtimes of one group's machines will reach each other, ``host:port`` in their order.

        Raises:
            PlatformError: machines of this kind cannot reach each other.
        """

    def run(self, folder: Path, *, max_bytes: int | None = None, relayed: bool = False) -> Placed:
        """Return the handle on a run.

        Args:
            folder: the run's folder here; its name is the run's id. What the run leaves comes into ``out`` and
                ``runtime.log`` there.
            max_bytes: the most that its outputs may have together; None for the most that any job's may.
            relayed: whether its keeper carries its calls: its order has a `relay`.
        """

    def close(self) -> None:
        """End what was kept open from one question, or handle, to the next."""
