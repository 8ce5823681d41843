"""The listeners of one rank, and its connections without the network (spec/sealed-collectives.md, section 3)."""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
from collections.abc import Callable

from glasshouse.collectives.transport.addresses import split
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
)
from glasshouse.errors import Code, CollectiveError

__all__ = ["ADDRESS_VARIABLE", "Endpoint"]

ADDRESS_VARIABLE = "GLASSHOUSE_SEALED_ADDRESS"
"""host or host:port at which the other ranks reach this one, where that is not the address on the way to the store."""


class Endpoint:
    """The listeners of one rank.

    Args:
        dialler: how ranks are reached.
        selector: where the listeners are registered; the caller's to close.
    """

    def __init__(self, dialler: Dialler, selector: selectors.BaseSelector) -> None:
        self._dialler = dialler
        self._selector = selector
        self._listeners: list[socket.socket] = []

    def close(self) -> None:
        """Close the listeners."""
        for listener in self._listeners:
            listener.close()

    def listen(self, address: str, timeout_s: float, announce: Callable[[str], None]) -> None:
        """Open the listeners, and announce where the other ranks reach them.

        Args:
            address: host, or host:port, of this rank.
            timeout_s: how long a look-up of the host may take.
            announce: leaves an address in the store.

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
