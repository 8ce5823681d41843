"""Connections of a runtime to its gate, carried through a channel (spec/place.md, section 7).

Both ends use this: at the place the sockets are the runtime's, at the owner's they lead to the gate.
Law: a call that breaks, or holds more than a gate ever sends, is dropped on both sides and harms no other.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from dataclasses import dataclass, field

from glasshouse.providers.protocol.link import Link
from glasshouse.providers.protocol.messages import message

MAX_CALLS = 16
_READ_BYTES = 1 << 16
# Evidence, an answer with its head, and as much again.
_MAX_HELD_BYTES = 1 << 20


@dataclass(slots=True)
class _Call:
    connection: socket.socket
    held: bytearray = field(default_factory=bytearray)  # waits to be written to the connection
    no_more_comes: bool = False
    no_more_goes: bool = False


class Calls:
    """The open calls of one channel.

    Args:
        selector: waits for the connections; the `data` of each is called with the events.
    """

    def __init__(self, link: Link, selector: selectors.BaseSelector) -> None:
        self._link, self._selector = link, selector
        self._calls: dict[int, _Call] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, number: int) -> bool:
        return number in self._calls

    def add(self, number: int, connection: socket.socket) -> None:
        """Carry a connected socket, and close it at its end."""
        connection.setblocking(False)
        self._calls[number] = _Call(connection)
        self._wait(number)

    def data(self, number: int, data: bytes) -> None:
        """Write what came from the other side; nothing for a call that is gone."""
        call = self._calls.get(number)
        if call is None or call.no_more_comes:
            return
        call.held += data
        if len(call.held) > _MAX_HELD_BYTES:
            self._fail(number)
        else:
            self._write(number, call)

    def end(self, number: int) -> None:
        """Note that nothing more comes from the other side."""
        call = self._calls.get(number)
        if call is not None:
            call.no_more_comes = True
            self._write(number, call)

    def drop(self, number: int) -> None:
        """Close a call because the other side did."""
        call = self._calls.pop(number, None)
        if call is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(call.connection)
            call.connection.close()

    def close(self) -> None:
        """Close all calls."""
        for number in list(self._calls):
            self.drop(number)

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
            self._fail(number)
            return
        if data:
            self._link.send_data(number, data)
            return
        call.no_more_goes = True
        self._link.send(message("end", number))
        self._settle(number, call)

    def _write(self, number: int, call: _Call) -> None:
        try:
            while call.held:
                del call.held[: call.connection.send(call.held, socket.MSG_NOSIGNAL)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._fail(number)
            return
        self._settle(number, call)

    def _settle(self, number: int, call: _Call) -> None:
        if call.no_more_comes and not call.held:
            with contextlib.suppress(OSError):
                call.connection.shutdown(socket.SHUT_WR)
            if call.no_more_goes:
                self.drop(number)
                return
        self._wait(number)

    def _wait(self, number: int) -> None:
        call = self._calls[number]
        events = (0 if call.no_more_goes else selectors.EVENT_READ) | (selectors.EVENT_WRITE if call.held else 0)
        with contextlib.suppress(KeyError):
            self._selector.unregister(call.connection)
        if events:
            self._selector.register(call.connection, events, lambda ready: self._ready(number, ready))

    def _fail(self, number: int) -> None:
        self._link.send(message("drop", number))
        self.drop(number)
