"""The agent's command line: two paths and a limit, nothing secret. (argparse costs 40 ms uncompiled.)"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from glasshouse.errors import Code, UsageError
from glasshouse.wire.group import MAX_MACHINES

USAGE = (
    "usage: python -I -B -X pycache_prefix=DIR -m glasshouse.runtime --package FILE --out DIR "
    "[--max-seconds N] [--ranks N] [--peers HOST:PORT,…]"
)

_NAMES = ("--package", "--out", "--max-seconds", "--ranks", "--peers")
_PEER = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9.-]{1,253}):([1-9][0-9]{0,4})")


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentOptions:
    """What the command line gives."""

    package: str
    out: str  # the run's folder, to be made
    max_seconds: int | None = None  # ends the run earlier than the policy would; None for no own limit
    # how many ranks the job has on this machine, as the launch token has too; None for one process, no group
    ranks: int | None = None
    # ``host:port`` of the runtimes of the group's machines in order, this one's too; empty on one machine. No more
    # trustworthy than the network
    peers: tuple[str, ...] = ()


def parse(argv: Sequence[str]) -> AgentOptions:
    """Read the arguments; each is given at most once; raises `UsageError`: `usage`."""
    found: dict[str, str] = {}
    left = list(argv)
    while left:
        name = left.pop(0)
        if name not in _NAMES or name in found or not left:
            raise _usage()
        found[name] = left.pop(0)
    if "--package" not in found or "--out" not in found:
        raise _usage()
    return AgentOptions(
        package=found["--package"],
        out=found["--out"],
        max_seconds=_number(found.get("--max-seconds")),
        ranks=_number(found.get("--ranks")),
        peers=_peers(found.get("--peers")),
    )


def _number(text: str | None) -> int | None:
    if text is not None and not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= 1):
        raise _usage()
    return None if text is None else int(text)


def _peers(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    peers = tuple(text.split(","))
    found = [_PEER.fullmatch(peer) for peer in peers]
    if len(peers) > MAX_MACHINES or not all(one is not None and int(one[2]) < 65536 for one in found):
        raise _usage()
    return peers


def _usage() -> UsageError:
    return UsageError(Code.USAGE, "the runtime was started with arguments that it does not take", hint=USAGE)
