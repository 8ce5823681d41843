"""Where one rank listens, and the addresses of all in the job's store (spec/sealed-collectives.md, section 3).

Laws: the store is not trusted: an address is a place to try, and the handshake proves which rank is there. No call to
the store takes longer than the rendezvous may, whatever the store does.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from glasshouse.collectives.protocol.group_keys import Membership
from glasshouse.collectives.transport.dial import (
    Dialler,
    HandedOver,
    check_own_limits,
    dial_local,
    enlarge,
    handed_over,
    local_address,
    looked_up,
    of_this_user,
    within,
)
from glasshouse.errors import Code, CollectiveError

_FIRST_LOOK_S, _LAST_LOOK_S = 0.01, 0.25  # how soon a rank looks again for an address that is not there yet
_MAX_ADDRESS_BYTES = 300
_MAX_PORT = 65535
HEAR_OUT_S = 0.3  # how long a rank that finds the store or another rank gone looks for the reason
_LOCAL_NAME = re.compile(r"[0-9a-f]{32}")


class Addresses:
    """The addresses of one group's ranks in a torch.distributed store, until a time to give up (monotonic, s)."""

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

        `meanwhile` spends so many seconds before the next look; its errors end the waiting.

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
    """Return host and port of ``host``, ``host:port``, ``[host]:port`` or an IPv6 address; port 0 if it has none."""
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
    """Return this machine's address on the way to the store's host, looked up in `limit_s`; else the loopback's."""
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


ADDRESS_VARIABLE = "GLASSHOUSE_SEALED_ADDRESS"
"""host or host:port at which the other ranks reach this one, where that is not the address on the way to the store."""


class Endpoint:
    """The listeners of one rank, registered with a selector that is the caller's to close."""

    def __init__(self, dialler: Dialler, selector: selectors.BaseSelector) -> None:
        self._dialler = dialler
        self._selector = selector
        self._listeners: list[socket.socket] = []

    def close(self) -> None:
        """Close the listeners."""
        for listener in self._listeners:
            listener.close()

    def listen(self, address: str, timeout_s: float, announce: Callable[[str], None]) -> None:
        """Open the listeners at this rank's host, or host:port, and announce where the other ranks reach them.

        Raises:
            CollectiveError: `collective-aborted`, this rank cannot listen there; whatever `announce` raises.
        """
        try:
            if isinstance(self._dialler, HandedOver):
                listener, name = self._dialler.listen()
                self._listeners.append(listener)
                host, port = self._dialler.address("", 0)
            else:
                host, port, name = self._listen(*split(address), timeout_s)
            for listener in self._listeners:
                listener.setblocking(False)
                self._selector.register(listener, selectors.EVENT_READ, listener)
            announce(f"{host} {port} {name}".rstrip())
        except (OSError, ValueError) as error:
            check_own_limits(error)
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise CollectiveError(
                Code.COLLECTIVE_ABORTED,
                f"this rank cannot listen at {address!r}: {why}",
                hint=f"{ADDRESS_VARIABLE} is the host, or host:port, by which the other ranks find this one",
            ) from None

    def accept(self, listener: socket.socket) -> tuple[socket.socket, bool] | None:
        """Return the next connection, and whether it came without the network; None if there is none to use.

        Raises:
            CollectiveError: `collective-aborted`, this process may open no more files.
        """
        handed = isinstance(self._dialler, HandedOver)
        try:
            connection = handed_over(listener) if handed else listener.accept()[0]
        except OSError as error:
            check_own_limits(error)
            return None
        if connection is None:
            self._selector.unregister(listener)  # the process that hands over is gone, and this one soon
            return None
        local = listener.family == socket.AF_UNIX
        if local and not of_this_user(connection):
            connection.close()
            return None
        return connection, local

    def dial_local(self, name: str, timeout_s: float) -> socket.socket | None:
        """Return a connection with a rank of this machine, None where there is none by that name."""
        if isinstance(self._dialler, HandedOver):
            with contextlib.suppress(OSError):
                return self._dialler.call(name, timeout_s)
            return None
        return dial_local(name) if self._dialler.local else None

    def _listen(self, host: str, port: int, timeout_s: float) -> tuple[str, int, str]:
        """Open the listeners; return the address of the one, and the name of the other."""
        info = looked_up(host, port, timeout_s)
        listener = socket.socket(info[0], socket.SOCK_STREAM)
        self._listeners.append(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        enlarge(listener)
        try:
            listener.bind(info[4])
        except OSError:
            # An address that others reach this rank by need not be one of this machine's own.
            listener.bind(("::" if info[0] == socket.AF_INET6 else "0.0.0.0", info[4][1]))  # noqa: S104
        name = self._listen_locally() if self._dialler.local else ""
        for each in self._listeners:
            each.listen(1024)
        return *self._dialler.address(host, listener.getsockname()[1]), name

    def _listen_locally(self) -> str:
        """Bind the listener for ranks of this machine; return its name."""
        name = secrets.token_hex(16)
        with contextlib.ExitStack() as undone:
            try:
                listener = undone.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                listener.bind(local_address(name))
            except OSError:
                return ""  # a sandbox that allows no such sockets or names
            undone.pop_all()
        self._listeners.append(listener)
        return name
