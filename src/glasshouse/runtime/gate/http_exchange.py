"""One HTTP/1.1 request and its answer, as bytes: no socket, no clock.

Only what the broker's runtime listener needs: POST with a body, answered with a status and a body of a
length given in advance. Redirects, chunked bodies, informational answers and upgrades are refused, for
each is a way to be led astray. (The standard library's client costs the agent 0.2 s and 7 MB, because
every module is compiled from measured source at start.)
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from glasshouse.errors import Code, PeerError

MAX_HEAD_BYTES = 8192
MAX_BODY_BYTES = 256 * 1024

_STATUS = re.compile(rb"HTTP/1\.[01] ([2-5][0-9]{2})(?: [^\r\n]*)?")
_LENGTH = re.compile(rb"[0-9]{1,7}")
_TCP = re.compile(r"http://(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9.-]{1,253}):([0-9]{1,5})/?")
_UNIX_PATH_BYTES = 107


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where the broker listens: a Unix socket's path, or a host and port."""

    unix_path: str = ""
    host: str = ""
    port: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpAnswer:
    """What came back."""

    status: int
    body: bytes


def parse_url(url: str) -> Address:
    """Read ``http://host:port`` or ``unix:/path``; raises `PeerError`: `broker-protocol`.

    Plain HTTP is what is meant: secrecy and authenticity of the exchange never rest on the transport.
    """
    if url.startswith("unix:/") and len(url.encode()) - 5 <= _UNIX_PATH_BYTES and "\x00" not in url:
        return Address(unix_path=url[5:])
    match = _TCP.fullmatch(url)
    if match is None or not 0 < int(match[2]) < 65536:
        raise PeerError(Code.BROKER_PROTOCOL, "a broker address that is neither http://host:port nor unix:/path")
    return Address(host=match[1], port=int(match[2]))


def request(address: Address, path: str, body: bytes) -> bytes:
    """Return the bytes of a POST; the connection is used once."""
    authority = "localhost" if address.unix_path else f"{address.host}:{address.port}"
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {authority}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("ascii") + body


class AnswerReader:
    """Reads one answer from the bytes as they arrive."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._status = 0
        self._length = -1

    def feed(self, data: bytes) -> HttpAnswer | None:
        """Take more bytes and return the answer once it is whole; raises `PeerError`: `broker-protocol`."""
        self._received += data
        if (self._length < 0 and not self._read_head()) or len(self._received) < self._length:
            return None
        if len(self._received) > self._length:
            raise _unexpected("an answer longer than its length")
        return HttpAnswer(status=self._status, body=bytes(self._received))

    def _read_head(self) -> bool:
        end = self._received.find(b"\r\n\r\n")
        if end < 0 or end > MAX_HEAD_BYTES:
            if len(self._received) > MAX_HEAD_BYTES:
                raise _unexpected("a head that does not end")
            return False
        lines = bytes(self._received[:end]).split(b"\r\n")
        del self._received[: end + 4]
        match = _STATUS.fullmatch(lines[0])
        if match is None:
            raise _unexpected("not an answer")
        self._status = int(match[1])
        lengths = []
        for line in lines[1:]:
            name, colon, value = line.partition(b":")
            if not colon or not name or name != name.strip():
                raise _unexpected("a malformed field")
            if name.lower() == b"transfer-encoding":
                raise _unexpected("a body of unknown length")
            if name.lower() == b"content-length":
                lengths.append(value.strip())
        if len(lengths) != 1 or not _LENGTH.fullmatch(lengths[0]) or int(lengths[0]) > MAX_BODY_BYTES:
            raise _unexpected("no valid length")
        self._length = int(lengths[0])
        return True


def _unexpected(what: str) -> PeerError:
    return PeerError(Code.BROKER_PROTOCOL, f"not the HTTP that is expected of the broker: {what}")
