"""The agent's client of the broker: requests over TCP or a Unix socket, waited for in the agent's loop.

Laws: a call never blocks the loop; it ends with an answer's body, with the gate's refusal, or with
`broker-unreachable` when no whole answer came in time. Only the last may be tried again. What an answer
holds is judged by `handshake` and `evidence`.

Of HTTP/1.1 only what the broker's runtime listener needs: POST with a body, answered with a status and a body of a
length given in advance. Redirects, chunked bodies, informational answers and upgrades are refused, for each is a way to
be led astray. (The standard library's client costs the agent 0.2 s and 7 MB, because every module is compiled from
measured source at start.)
"""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from glasshouse.errors import Code, FormatError, GlasshouseError, PeerError, RefusedError
from glasshouse.runtime.loop import READ, WRITE, Loop
from glasshouse.wire.canonical import Json, decode

TIMEOUT_S = 10.0
MAX_HEAD_BYTES = 8192
MAX_BODY_BYTES = 256 * 1024

_STATUS = re.compile(rb"HTTP/1\.[01] ([2-5][0-9]{2})(?: [^\r\n]*)?")
_LENGTH = re.compile(rb"[0-9]{1,7}")
_TCP = re.compile(r"http://(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9.-]{1,253}):([0-9]{1,5})/?")
_UNIX_PATH_BYTES = 107

_MAX_PROBLEM_BYTES = 8192
_MAX_REASON = 400
_HARDWARE_CHECK = "12"
# Not now, rather than no.
_PASSING = frozenset({408, 429, 500, 502, 503, 504})

Target: TypeAlias = tuple[socket.AddressFamily, str | tuple[object, ...]]
Done: TypeAlias = Callable[["BrokerCall"], None]


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


class PendingError(PeerError):
    """The gate accepted this machine and waits for others of its group; for any other question, no answer at all."""

    def __init__(self) -> None:
        super().__init__(Code.BROKER_PROTOCOL, "the broker asks to wait where there is nothing to wait for")


class EvidenceRefusedError(RefusedError):
    """The gate refused what this machine's hardware shows; its hint is the gate's sentence, made printable."""


def body_of(answer: HttpAnswer) -> bytes:
    """Return a good answer's body.

    Raises:
        RefusedError: the gate refused, with its code; `EvidenceRefusedError` where it says what of the hardware it is.
        PendingError: it has to be asked again.
        PeerError: `broker-unreachable` for a passing trouble, `broker-protocol` for anything else.
    """
    if answer.status == 200:
        return answer.body
    if answer.status == 202:
        raise PendingError
    problem = _problem_of(answer.body)
    code = _code_of(problem)
    if code is not None and code is not Code.TOO_MANY_CHALLENGES and answer.status < 500:
        if problem.get("check") == _HARDWARE_CHECK:
            raise EvidenceRefusedError(code, "the gate refused this machine", hint=_reason_of(problem))
        raise RefusedError(code, "the gate refused this runtime")
    if answer.status in _PASSING:
        raise PeerError(Code.BROKER_UNREACHABLE, f"the broker cannot answer now (HTTP {answer.status})")
    raise PeerError(Code.BROKER_PROTOCOL, f"an answer that is none: HTTP {answer.status}")


def _problem_of(body: bytes) -> dict[str, Json]:
    try:
        problem = decode(body, max_bytes=_MAX_PROBLEM_BYTES)
    except FormatError:
        return {}
    return problem if isinstance(problem, dict) else {}


def _code_of(problem: dict[str, Json]) -> Code | None:
    try:
        return Code(str(problem["code"])) if "code" in problem else None
    except ValueError:
        return None


def _reason_of(problem: dict[str, Json]) -> str:
    """Return what was refused and what the machine shows, on one line of ASCII; nothing authenticates it."""
    said, shown = (str(problem.get(name, "")) for name in ("detail", "actual"))
    line = f"{said}: it shows {shown}" if shown else said
    return "".join(one if " " <= one <= "~" else "?" for one in line)[:_MAX_REASON]


class BrokerCall:
    """One request in flight."""

    def __init__(self, loop: Loop, targets: list[Target], data: bytes, *, timeout_s: float, done: Done | None) -> None:
        self._loop, self._targets, self._data, self._done = loop, targets, data, done
        self._sent = 0
        self._reader = AnswerReader()
        self._socket: socket.socket | None = None
        self._answer: HttpAnswer | None = None
        self._error: GlasshouseError | None = None
        self.finished = False  # whether it ended, one way or the other
        self._timer = loop.after(timeout_s, lambda: self._lost("no answer in time"))
        self._connect()

    def body(self) -> bytes:
        """Return the body of a finished call's answer; raises as `body_of`."""
        if self._error is not None:
            raise self._error
        if self._answer is None:
            raise PeerError(Code.BROKER_UNREACHABLE, "the broker has not answered yet")
        return body_of(self._answer)

    def abandon(self) -> None:
        """Stop waiting; `done` is not called."""
        self._done = None
        if not self.finished:
            self._lost("abandoned")

    def _connect(self) -> None:
        while self._targets:
            family, where = self._targets.pop(0)
            connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
            if connection.connect_ex(where) in (0, errno.EINPROGRESS):
                self._socket = connection
                self._loop.watch(connection.fileno(), partial(self._writable, connection), WRITE)
                return
            connection.close()
        # From the loop, not from the constructor: the caller has no handle on this call yet.
        self._timer.cancel()
        self._timer = self._loop.after(0, lambda: self._lost("nothing listens"))

    def _writable(self, connection: socket.socket) -> None:
        if self._sent == 0 and connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._drop_socket()
            self._connect()
            return
        try:
            self._sent += connection.send(memoryview(self._data)[self._sent :], socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            # A broker that refuses early may have answered before it closed: read on.
            self._sent = len(self._data)
        if self._sent == len(self._data):
            self._loop.watch(connection.fileno(), partial(self._readable, connection), READ)
        else:
            self._loop.watch(connection.fileno(), partial(self._either, connection), READ | WRITE)

    def _either(self, connection: socket.socket) -> None:
        """Send on until an answer begins: a gate that refuses hardware evidence does not read it."""
        try:
            connection.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            self._writable(connection)
            return
        except OSError:
            pass
        self._sent = len(self._data)
        self._loop.watch(connection.fileno(), partial(self._readable, connection), READ)

    def _readable(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(65536)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._lost("the connection closed before a whole answer")
            return
        try:
            self._answer = self._reader.feed(data)
        except PeerError as error:
            self._finish(error)
        else:
            if self._answer is not None:
                self._finish(None)

    def _lost(self, why: str) -> None:
        self._finish(PeerError(Code.BROKER_UNREACHABLE, f"the broker did not answer: {why}"))

    def _drop_socket(self) -> None:
        if self._socket is not None:
            self._loop.unwatch(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _finish(self, error: GlasshouseError | None) -> None:
        self._timer.cancel()
        self._drop_socket()
        self._error = error
        self.finished = True
        done, self._done = self._done, None
        if done is not None:
            done(self)


class BrokerClient:
    """The broker's runtime listener, at ``http://host:port`` or ``unix:/path``."""

    def __init__(self, url: str, loop: Loop) -> None:
        self._address = parse_url(url)
        self._loop = loop
        self._targets: list[Target] = []

    def begin(self, path: str, body: bytes, done: Done | None, *, timeout_s: float = TIMEOUT_S) -> BrokerCall:
        """Send a request; `done` is called with the finished call, from the loop."""
        # Looked up once: a look-up blocks, which the loop must never do while a job trains.
        self._targets = self._targets or _resolve(self._address)
        data = request(self._address, path, body)
        return BrokerCall(self._loop, list(self._targets), data, timeout_s=timeout_s, done=done)

    def post(self, path: str, body: bytes, *, timeout_s: float = TIMEOUT_S) -> bytes:
        """Send a request and return the answer's body; the loop goes on meanwhile. Raises as `body_of`."""
        call = self.begin(path, body, None, timeout_s=timeout_s)
        try:
            self._loop.run_until(lambda: call.finished)
        finally:
            call.abandon()
        return call.body()


def _resolve(address: Address) -> list[Target]:
    if address.unix_path:
        return [(socket.AF_UNIX, address.unix_path)]
    # Bytes, for a text would first be taken for an international name: 70 ms for loading that codec.
    host = address.host.strip("[]").encode("ascii")
    try:
        found = socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [(family, where) for family, _, _, _, where in found]
