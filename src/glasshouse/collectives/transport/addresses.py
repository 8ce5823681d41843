"""Where the ranks of a group say that they are reached: in the job's store, which is not believed.

Laws: what the store says is at most a place to try: the handshake shows who is there. No call to it takes longer than
the meeting may, whatever the store does.
Source: spec/sealed-collectives.md, section 3.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from glasshouse.collectives.protocol.group_keys import Membership
from glasshouse.collectives.transport.dial import looked_up, within
from glasshouse.errors import Code, CollectiveError

__all__ = ["HEAR_OUT_S", "Addresses", "late", "lost", "own_address", "split"]

_FIRST_LOOK_S, _LAST_LOOK_S = 0.01, 0.25
"""How soon a rank looks again for an address that is not there yet."""
_MAX_ADDRESS_BYTES = 300
_MAX_PORT = 65535
HEAR_OUT_S = 0.3
"""How long a rank that finds the store or another rank gone looks for the reason that somebody may have sent."""
_LOCAL_NAME = re.compile(r"[0-9a-f]{32}")


class Addresses:
    """The addresses of one group's ranks.

    Args:
        store: a torch.distributed store that all ranks have.
        membership: the group.
        until: when to give up (monotonic, s).
    """

    def __init__(self, store: Any, membership: Membership, until: float) -> None:
        self._store = store
        self._membership = membership
        self._until = until

    def leave(self, address: str) -> None:
        """Say where this rank is: ``host port``, and the name of its listener on its machine if it has one.

        Raises:
            CollectiveError: `collective-timeout`, the store does not take it.
        """
        try:
            self._ask(lambda: self._store.set(self._key(self._membership.rank), address))
        except CollectiveError:
            raise
        except (RuntimeError, TimeoutError):
            raise CollectiveError(Code.COLLECTIVE_TIMEOUT, "the store takes no address of this rank in time") from None

    def of(self, peer: int, meanwhile: Callable[[float], None]) -> tuple[str, int, str]:
        """Return host, port and the name on its machine, or "", of a rank; wait until it says so.

        Args:
            peer: the rank.
            meanwhile: spends so many seconds before the next look; what it raises ends the waiting. A store that does
                not answer keeps it from being called.

        Raises:
            CollectiveError: `collective-timeout`, it never came; `rank-lost`, the store is gone;
                `collective-tampered`, no rank leaves such an address.
        """
        pause_s = _FIRST_LOOK_S
        try:
            while (said := self._said(peer)) is None:
                meanwhile(max(0.0, min(pause_s, self._until - time.monotonic())))
                pause_s = min(2 * pause_s, _LAST_LOOK_S)
        except TimeoutError:
            raise late(self._membership, [peer]) from None
        except _GoneError:
            # The process that kept it is gone too: others may know why.
            meanwhile(max(0.0, min(HEAR_OUT_S, self._until - time.monotonic())))
            raise CollectiveError(
                Code.RANK_LOST, f"the job's store is gone, and {self._membership.called(peer)} had not come"
            ) from None
        try:
            if len(said) > _MAX_ADDRESS_BYTES:
                raise ValueError
            host, port, *names = said.decode("ascii").split(" ")
            name = names.pop(0) if names else ""
            if not 1 <= int(port) <= _MAX_PORT or names or (name and not _LOCAL_NAME.fullmatch(name)):
                raise ValueError
            return host, int(port), name
        except ValueError:
            raise self.wrong(peer) from None

    def wrong(self, peer: int) -> CollectiveError:
        """Return the error for what cannot be an address of a rank."""
        return CollectiveError(
            Code.COLLECTIVE_TAMPERED, f"the store says no address of {self._membership.called(peer)}"
        )

    def _said(self, peer: int) -> bytes | None:
        """Return what the store has of a rank, None if nothing yet.

        It is looked for, not waited for: torch warns on the screen of every wait that ends without an answer.

        Raises:
            TimeoutError: the time is up.
            _GoneError: there is no store.
        """
        key = self._key(peer)
        try:
            if not self._ask(lambda: self._store.check([key])):
                return None
            return bytes(self._ask(lambda: self._store.get(key)))
        except CollectiveError:
            raise
        except RuntimeError:
            raise _GoneError from None

    def _ask(self, question: Callable[[], Any]) -> Any:
        # No call to a store has a limit of its own that holds when the store falls silent.
        return within(self._until - time.monotonic(), question)

    def _key(self, rank: int) -> str:
        return f"glasshouse/{self._membership.incarnation:x}/{rank}"


def late(membership: Membership, missing: Sequence[int]) -> CollectiveError:
    """Return the error for ranks that are not there when the time is up."""
    who = " and ".join(map(membership.called, missing)) or "the other ranks"
    return CollectiveError(
        Code.COLLECTIVE_TIMEOUT,
        f"{who} did not come to the meeting of group {membership.group!r} in time",
        rank=missing[0] if len(missing) == 1 else None,
    )


def lost(membership: Membership, peer: int) -> CollectiveError:
    """Return the error for a rank that left before the group was complete."""
    who = membership.called(peer)
    return CollectiveError(Code.RANK_LOST, f"{who} left while the ranks of the group were meeting", rank=peer)


class _GoneError(Exception):
    """The store does not answer any more."""


def split(address: str) -> tuple[str, int]:
    """Return host and port of ``host``, ``host:port``, ``[host]:port`` or an IPv6 address; port 0 if it has none.

    Raises:
        ValueError: it is none of these.
    """
    if address.startswith("["):
        host, closed, rest = address[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")):
            raise ValueError("that is no address")
        port = rest.removeprefix(":") or "0"
    else:
        host, port = address.split(":") if address.count(":") == 1 else (address, "0")
    if not host or not (port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= _MAX_PORT):
        raise ValueError("that is no address")
    return host, int(port)


def own_address(store: Any, limit_s: float) -> str:
    """Return this machine's address on the way to the store's host; the loopback's where there is no such way.

    Args:
        store: as `Addresses` has it.
        limit_s: how long a look-up of the host may take.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None)
    port = getattr(store, "port", None)
    if not host:
        return "127.0.0.1"
    try:
        info = looked_up(host, port or 9, limit_s, kind=socket.SOCK_DGRAM)
        with socket.socket(info[0], socket.SOCK_DGRAM) as probe:
            probe.connect(info[4])
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
