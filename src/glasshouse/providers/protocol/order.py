"""What a runtime is started with at a place, beside its launch file."""

from __future__ import annotations

import re
from dataclasses import dataclass

from glasshouse.errors import Code, UsageError

_URL = re.compile(r"https://([A-Za-z0-9][A-Za-z0-9.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\])(?::([0-9]{1,5}))?/?")
_HTTPS = 443


def gate_address(url: str) -> tuple[str, int]:
    """Return host and port of a gate, the same however its URL is written; raises `UsageError` for another URL."""
    match = _URL.fullmatch(url)
    if match is None or not 0 < int(match[2] or _HTTPS) < 65536:
        hint = "it looks like https://gate.example:8443"
        raise UsageError(Code.USAGE, f"not a gate's address: {url[:80]!r}", hint=hint)
    return match[1].strip("[]").lower(), int(match[2] or _HTTPS)


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayOrder:
    """A gate that stays, to which the runtime's keeper carries its calls, with or without the owner's machine."""

    url: str  # https://host[:port]
    certificate: str | None  # SHA-256 of its own certificate, in hex; None: the system's authorities vouch for it
    socket: str | None = None  # where the runtime calls; None: where the place decides
    store: bool = False  # whether what the run leaves is sent there too, if it keeps that


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What a runtime is started with, beside its launch file."""

    package: str  # what `Placed.upload` returned
    max_seconds: int  # the runtime ends itself after so long
    ranks: int | None = None  # of the job on this machine, as in the launch file; None: a run without a group
    # Where the group's machines reach each other's runtimes, host:port in the order of the machines, this one included;
    # empty for a run on one machine.
    peers: tuple[str, ...] = ()
    relay: RelayOrder | None = None  # where its calls go; None: to its owner's own broker
