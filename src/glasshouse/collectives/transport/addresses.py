"""The addresses of a group's ranks in the job's store (spec/sealed-collectives.md, section 3).

Laws: the store is not trusted: an address is a place to try, and the handshake proves which rank is there. No call to
the store takes longer than the rendezvous may, whatever the store does.
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
"""How long a rank that finds the store or another rank gone looks for the reason that may have been sent."""
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
        """Store this rank's address: ``host port``, and the name of its listener on its machine if it has one.

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
        """Return host, port and the name on its machine, or "", of a rank; wait until they are there.

        Args:
            peer: the rank.
            meanwhile: spends so many seconds before the next look; what it raises ends the waiting. A store that does
                not answer keeps it from being called.

        Raises:
            CollectiveError: `collective-timeout`, it never came; `rank-lost`, the store is gone;
                `collective-tampered`, no rank leaves such an address.
        """
        pause_s = _FIRST_LOOK_S
        key = self._key(peer)
        try:
            # Polled: torch prints a warning for every wait that ends without an answer.
            while not self._ask(lambda: self._store.check([key])):
                meanwhile(max(0.0, min(pause_s, self._until - time.monotonic())))
                pause_s = min(2 * pause_s, _LAST_LOOK_S)
            found = bytes(self._ask(lambda: self._store.get(key)))
        except TimeoutError:
            raise late(self._membership, [peer]) from None
        except CollectiveError:
            raise
        except RuntimeError:
            # The process that kept the store is gone too: others may have sent the reason.
            meanwhile(max(0.0, min(HEAR_OUT_S, self._until - time.monotonic())))
            gone = f"the job's store is gone, and {self._membership.called(peer)} had not come"
            raise CollectiveError(Code.RANK_LOST, gone) from None
        try:
            if len(found) > _MAX_ADDRESS_BYTES:
                raise ValueError
            host, port, *names = found.decode("ascii").split(" ")
            name = names.pop(0) if names else ""
            if not 1 <= int(port) <= _MAX_PORT or names or (name and not _LOCAL_NAME.fullmatch(name)):
                raise ValueError
            return host, int(port), name
        except ValueError:
            raise self.wrong(peer) from None

    def wrong(self, peer: int) -> CollectiveError:
        """Return the error for what cannot be an address of a rank."""
        return CollectiveError(
            Code.COLLECTIVE_TAMPERED, f"the store has no valid address of {self._membership.called(peer)}"
        )

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
        f"{who} did not come to the rendezvous of group {membership.group!r} in time",
        rank=missing[0] if len(missing) == 1 else None,
    )


def lost(membership: Membership, peer: int) -> CollectiveError:
    """Return the error for a rank that left before the group was complete."""
    who = membership.called(peer)
    return CollectiveError(Code.RANK_LOST, f"{who} left during the rendezvous of the group", rank=peer)


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
    try:
        if host:
            info = looked_up(host, getattr(store, "port", None) or 9, limit_s, kind=socket.SOCK_DGRAM)
            with socket.socket(info[0], socket.SOCK_DGRAM) as probe:
                probe.connect(info[4])
                return str(probe.getsockname()[0])
    except OSError:
        pass
    return "127.0.0.1"
