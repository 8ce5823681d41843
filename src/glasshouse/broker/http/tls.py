"""TLS for a gate that owners and places reach over the network: a certificate of its own, which they pin.

Laws: TLS 1.3 and nothing older; a connection is counted, and gives way to others, from before its handshake; one that
does not finish its handshake in time is cut off. Secrecy of a package key on its way here rests on it, and nothing of
a runtime's exchange does (spec/owner-api.md, section 2).
"""

from __future__ import annotations

import asyncio
import datetime
import ssl
from asyncio import sslproto
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from glasshouse.broker.http.bounded import BoundedProtocol
from glasshouse.broker.http.connections import Room, address_of
from glasshouse.broker.store.key_file import read_private_file, write_private_file
from glasshouse.errors import Code, UsageError
from glasshouse.wire.crypto import sha256

CERTIFICATE_NAME = "gate.pem"
_NAME = "glasshouse gate"
_VALID = datetime.timedelta(days=3650)
_HANDSHAKE_S = 2
_GOODBYE_S = 2
_PIECE_BYTES = 16 * 1024  # are read at once: each connection has a buffer for them from before its handshake
_MAX_FILE_BYTES = 16 * 1024
_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"


class Certificate:
    """A gate's own certificate and key.

    Args:
        path: one file, mode 0600, with both; made on the first start.

    Attributes:
        sha256: of the certificate's DER form: what owners and launch files pin.

    Raises:
        UsageError: a file that others can read, or that holds no certificate and key.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            write_private_file(path, _made())
        data = read_private_file(path, max_bytes=_MAX_FILE_BYTES, what="gate's certificate")
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.context.num_tickets = 0  # each connection is one request: there is nothing to resume
        try:
            begin = data.index(_CERTIFICATE)
            self.sha256 = sha256(x509.load_pem_x509_certificate(data[begin:]).public_bytes(Encoding.DER))
            self.context.load_cert_chain(path)
        except (ValueError, ssl.SSLError, OSError):
            raise UsageError(
                Code.USAGE,
                f"{path} does not hold a certificate and its key",
                hint="restore it from a backup, or remove it: then a new one is made, and every owner has to pin that",
            ) from None


def _made() -> bytes:
    """Return a new key and a certificate that it signed itself, as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NAME)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # A pinned certificate's dates are not checked; a day's grace is for other tools and clocks.
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + _VALID)
        .sign(key, SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return private + certificate.public_bytes(Encoding.PEM)


class _Inner(BoundedProtocol):
    """HTTP within a connection whose handshake is done."""

    outer: TlsProtocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.room.leave(self.outer)
        super().connection_made(transport)

    def on_response_complete(self) -> None:
        """Close it; where all of the answer has left, the peer's close_notify is awaited while there is a place."""
        super().on_response_complete()
        if not self.outer.writing:
            self.room.answered(self)

    def cut(self) -> None:
        self.outer.cut()

    def _wake_for(self, count: int) -> None:
        """Do nothing: part of a record may be here already, and the kernel would wait for more than is to come."""


class TlsProtocol(sslproto.SSLProtocol):
    """One connection, from before its handshake."""

    max_size = _PIECE_BYTES
    room: Room
    context: ssl.SSLContext

    def __init__(self, *, _loop: asyncio.AbstractEventLoop | None = None, **named: Any) -> None:
        loop = _loop or asyncio.get_running_loop()
        inner = _Inner(_loop=loop, **named)
        inner.room, inner.outer = self.room, self
        self._plain: asyncio.Transport | None = None
        super().__init__(
            loop,
            inner,
            self.context,
            None,  # type: ignore[arg-type] # the handshake is not awaited
            server_side=True,
            ssl_handshake_timeout=_HANDSHAKE_S,
            ssl_shutdown_timeout=_GOODBYE_S,
        )

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._plain = transport
        peer = transport.get_extra_info("peername")
        if not self.room.enter(self, address_of(str(peer[0]) if isinstance(peer, tuple) else None)):
            self.cut()
            return
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.room.leave(self)
        super().connection_lost(exc)

    @property
    def writing(self) -> bool:
        """Whether something that was written has not left yet."""
        return self._plain is not None and self._plain.get_write_buffer_size() > 0

    def cut(self) -> None:
        """End the connection at once."""
        if self._plain is not None:
            self._plain.abort()
