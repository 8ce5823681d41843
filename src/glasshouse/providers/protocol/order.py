"""What a runtime is started with at a place, beside its launch file."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Order", "RelayOrder"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayOrder:
    """A gate that stays, to which the runtime's keeper carries its calls: with or without its owner's machine.

    Attributes:
        url: ``https://host[:port]``.
        certificate: SHA-256 of its own certificate, in hex; None where the system's authorities vouch for it.
        socket: where the runtime calls; None for where the place says.
        store: whether what the run leaves is sent there too, if it keeps that.
    """

    url: str
    certificate: str | None
    socket: str | None = None
    store: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What a runtime is started with, beside its launch file.

    Attributes:
        package: what `Placed.upload` returned.
        max_seconds: the runtime ends itself after so long.
        ranks: how many ranks the job has on this machine, as the launch file says too; None for a run without a group.
        peers: where the runtimes of its group's machines reach each other, ``host:port`` in the order of the machines,
            this one's own too; empty for a run on one machine.
        relay: where its calls go; None for its owner's own broker.
    """

    package: str
    max_seconds: int
    ranks: int | None = None
    peers: tuple[str, ...] = ()
    relay: RelayOrder | None = None
