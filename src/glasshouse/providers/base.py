"""What every provider offers: a placement is one runtime on one machine, until it has ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

__all__ = ["Placement", "Provider", "Request"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a provider is asked to run.

    Attributes:
        launch: the launch file; goes to the runtime by standard input and nowhere else.
        package: path of the sealed package.
        out: folder for events, sealed outputs and receipt.
        scratch: an empty folder that stays empty: nothing is ever imported from it.
        log: where the runtime's own words go.
        max_seconds: the runtime ends itself after so long.
        ranks: how many ranks the job has on this machine, as the launch file says too; None for a run without a group.
        peers: where the runtimes of its group's machines reach each other, ``host:port`` in the order of the machines,
            this one's own too; empty for a run on one machine.
    """

    launch: bytes
    package: Path
    out: Path
    scratch: Path
    log: Path
    max_seconds: int
    ranks: int | None = None
    peers: tuple[str, ...] = ()

    def __repr__(self) -> str:
        # The launch file holds a private key.
        return f"Request(package={self.package}, out={self.out})"


class Placement(Protocol):
    """A runtime that was placed."""

    @property
    def pid(self) -> int:
        """Process id, for a person and for `status`."""

    def wait(self, timeout_s: float) -> int | None:
        """Return the runtime's exit code once it has ended, or None after the timeout."""

    def interrupt(self) -> None:
        """Ask the runtime to stop, zeroize and end."""

    def kill(self) -> None:
        """End it at once; for a runtime that does not answer `interrupt`."""


class Provider(Protocol):
    """A way to get a machine.

    Attributes:
        name: as people write it.
        container_source: who names the container: `minted` by us, or read from the `platform`.
    """

    name: str
    container_source: str

    def addresses(self, machines: int) -> tuple[str, ...]:
        """Return where the runtimes of one group's machines will reach each other, ``host:port`` in their order.

        Raises:
            PlatformError: machines of this provider cannot reach each other.
        """

    def place(self, request: Request) -> Placement:
        """Start a runtime.

        Raises:
            PlatformError: it cannot be started there.
        """
