"""The agent's command line: two paths and a limit, nothing secret. (argparse costs 40 ms uncompiled.)"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from glasshouse.errors import Code, UsageError
from glasshouse.wire.group import MAX_MACHINES

__all__ = ["Options", "parse"]

USAGE = (
    "usage: python -I -B -X pycache_prefix=DIR -m glasshouse.runtime --package FILE --out DIR "
    "[--max-seconds N] [--ranks N] [--peers HOST:PORT,…]"
)

_NAMES = ("--package", "--out", "--max-seconds", "--ranks", "--peers")
_PEER = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9.-]{1,253}):([1-9][0-9]{0,4})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the command line says.

    Attributes:
        package: the sealed package.
        out: the run's folder, to be made.
        max_seconds: ends the run earlier than the policy would; None for no own limit.
        ranks: how many ranks the job has on this machine, as the launch token says again; None for a run without a
            group, in one process.
        peers: where the runtimes of the group's machines are to be found, ``host:port`` in the order of the machines,
            this one's own too; empty on a single machine. As little to be believed as the network is.
    """

    package: str
    out: str
    max_seconds: int | None = None
    ranks: int | None = None
    peers: tuple[str, ...] = ()


def parse(argv: Sequence[str]) -> Options:
    """Read the arguments; each is given at most once.

    Raises:
        UsageError: `usage`.
    """
    found: dict[str, str] = {}
    left = list(argv)
    while left:
        name = left.pop(0)
        if name not in _NAMES or name in found or not left:
            raise _usage()
        found[name] = left.pop(0)
    if "--package" not in found or "--out" not in found:
        raise _usage()
    return Options(
        package=found["--package"],
        out=found["--out"],
        max_seconds=_number(found, "--max-seconds", low=1),
        ranks=_number(found, "--ranks", low=1),
        peers=_peers(found.get("--peers")),
    )


def _number(found: dict[str, str], name: str, *, low: int) -> int | None:
    text = found.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= low):
        raise _usage()
    return int(text)


def _peers(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    peers = tuple(text.split(","))
    found = [_PEER.fullmatch(peer) for peer in peers]
    if len(peers) > MAX_MACHINES or not all(one is not None and int(one[2]) < 65536 for one in found):
        raise _usage()
    return peers


def _usage() -> UsageError:
    return UsageError(Code.USAGE, "the runtime was started with other arguments than it knows", hint=USAGE)
