"""Connections of a runtime to its gate, carried through a channel (spec/place.md, section 7).

Both ends use this: at the place the sockets are the runtime's, at the owner's they lead to the gate.

Laws: a call that breaks, or holds more than a gate ever sends, is dropped on both sides and harms no other.
"""

from __future__ import annotations

import contextlib
import selectors
import socket

from glasshouse.providers.protocol.link import Link

__all__ = ["FIRST_CALL", "MAX_CALLS", "Streams"]

FIRST_CALL = 1 << 31
MAX_CALLS = 16
_READ_BYTES = 1 << 16
# Evidence, an answer with its head, and as much again.
_MAX_HELD_BYTES = 1 << 20


class _Call:
    """One connection: what waits to be written to it, and which directions have ended."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.held = bytearray()
        self.no_more_comes = self.no_more_goes = False


class Streams:
    """The open calls of one channel.

    Args:
        link: the channel.
        selector: where the connections are waited for; the `data` of each is called with the events.
    """

    def __init__(self, link: Link, selector: selectors.BaseSelector) -> None:
        self._link, self._selector = link, selector
        self._calls: dict[int, _Call] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, number: int) -> bool:
        return number in self._calls

    def add(self, number: int, connection: socket.socket) -> None:
        """Carry a connected socket; it is closed here."""
        connection.setblocking(False)
        self._calls[number] = _Call(connection)
        self._wait(number)

    def data(self, number: int, data: bytes) -> None:
        """Write what came from the other side; for a call that is gone, nothing."""
        call = self._calls.get(number)
        if call is None or call.no_more_comes:
            return
        call.held += data
        if len(call.held) > _MAX_HELD_BYTES:
            self._drop(number)
        else:
            self._write(number, call)

    def end(self, number: int) -> None:
        """Take it that nothing more comes from the other side."""
        call = self._calls.get(number)
        if call is not None:
            call.no_more_comes = True
            self._write(number, call)

    def drop(self, number: int) -> None:
        """Close a call because the other side did."""
        self._close(number)

    def close(self) -> None:
        for number in list(self._calls):
            self._close(number)

    def _ready(self, number: int, events: int) -> None:
        call = self._calls.get(number)
        if call is not None and events & selectors.EVENT_WRITE:
            self._write(number, call)
        if number in self._calls and events & selectors.EVENT_READ:
            self._read(number, self._calls[number])

    def _read(self, number: int, call: _Call) -> None:
        try:
            data = call.connection.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._drop(number)
            return
        if data:
            self._link.send_data(number, data)
            return
        call.no_more_goes = True
        self._link.send({"end": number})
        self._settle(number, call)

    def _write(self, number: int, call: _Call) -> None:
        try:
            while call.held:
                del call.held[: call.connection.send(call.held, socket.MSG_NOSIGNAL)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._drop(number)
            return
        self._settle(number, call)

    def _settle(self, number: int, call: _Call) -> None:
        if call.no_more_comes and not call.held:
            with contextlib.suppress(OSError):
                call.connection.shutdown(socket.SHUT_WR)
            if call.no_more_goes:
                self._close(number)
                return
        self._wait(number)

    def _wait(self, number: int) -> None:
        call = self._calls[number]
        events = (0 if call.no_more_goes else selectors.EVENT_READ) | (selectors.EVENT_WRITE if call.held else 0)
        with contextlib.suppress(KeyError):
            self._selector.unregister(call.connection)
        if events:
            self._selector.register(call.connection, events, lambda ready: self._ready(number, ready))

    def _drop(self, number: int) -> None:
        self._link.send({"drop": number})
        self._close(number)

    def _close(self, number: int) -> None:
        call = self._calls.pop(number, None)
        if call is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(call.connection)
            call.connection.close()
