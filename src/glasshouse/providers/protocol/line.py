"""The line to a gate that stays: TLS to a pinned certificate, and a relay that carries a runtime's calls over it.

A runtime's agent has no TLS, whose code would be measured and trusted with it: its keeper carries its calls.

Laws: nothing is sent before the certificate is the pinned one, or, where none is pinned, one that this system's
authorities vouch for; a relay understands nothing of what it carries.
"""

from __future__ import annotations

import contextlib
import hashlib
import select
import socket
import ssl
import threading
from dataclasses import dataclass

from glasshouse.providers.protocol.order import gate_address

_CONNECT_S = 10.0
# A call that lies still for so long has been given up by its runtime.
_STILL_S = 60.0
_PIECE_BYTES = 64 << 10
_MOST_CALLS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class GateLine:
    """How a gate is reached."""

    url: str  # https://host[:port]
    certificate: str | None  # SHA-256 of its own certificate, in hex; None: the system's authorities vouch for it

    def __post_init__(self) -> None:
        gate_address(self.url)

    @property
    def address(self) -> tuple[str, int]:
        """Its host and port, which are the same however the URL is written."""
        return gate_address(self.url)

    def connect(self) -> ssl.SSLSocket:
        """Return a connection; raises `OSError`, of these `ssl.SSLCertVerificationError` for another certificate."""
        host, port = self.address
        if self.certificate is None:
            context = ssl.create_default_context()
        else:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # without the system's authorities: that takes a while
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE  # what it shows is compared with the pinned one below
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        plain = socket.create_connection((host, port), timeout=_CONNECT_S)
        try:
            # What is asked goes after the handshake's last flight without waiting for that to be acknowledged.
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line = context.wrap_socket(plain, server_hostname=host)
        except BaseException:
            plain.close()
            raise
        shown = line.getpeercert(binary_form=True)
        if self.certificate is not None and (shown is None or hashlib.sha256(shown).hexdigest() != self.certificate):
            line.close()
            raise ssl.SSLCertVerificationError(f"{self.url} shows another certificate than the one that is pinned")
        return line


class Relay:
    """Carries what calls a listening socket, which is the relay's own, over a line to a gate, until it is closed."""

    def __init__(self, listener: socket.socket, line: GateLine) -> None:
        self._listener, self._line = listener, line
        self._room = threading.BoundedSemaphore(_MOST_CALLS)
        listener.setblocking(True)
        listener.listen(_MOST_CALLS)
        self._thread = threading.Thread(target=self._accept, name="relays", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more calls; those that are under way end by themselves."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for a call
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                call, _ = self._listener.accept()
            except OSError:
                return
            self._room.acquire()
            threading.Thread(target=self._serve, args=(call,), name="relay", daemon=True).start()

    def _serve(self, call: socket.socket) -> None:
        try:
            line = self._line.connect()
        except OSError:
            call.close()  # the runtime tries again within its lease
        else:
            _carry(call, line)
        finally:
            self._room.release()


def _carry(call: socket.socket, line: ssl.SSLSocket) -> None:
    """Carry bytes both ways until either end is done."""
    with call, line, contextlib.suppress(OSError):
        call.settimeout(_STILL_S)
        asked: list[socket.socket] = [call, line]
        while True:
            ready = [line] if line.pending() else select.select(asked, [], [], _STILL_S)[0]
            if not ready:
                return
            if call in ready:
                data = call.recv(_PIECE_BYTES)
                if not data:
                    asked.remove(call)
                line.settimeout(_STILL_S)
                line.sendall(data)
            if line in ready and not _bring(line, call):
                return


def _bring(line: ssl.SSLSocket, call: socket.socket) -> bool:
    """Carry what has come over the line; return whether there may be more."""
    line.settimeout(0)
    with contextlib.suppress(ssl.SSLWantReadError):  # what came was for TLS itself
        data = line.recv(_PIECE_BYTES)
        if not data:
            return False
        call.sendall(data)
    return True
