"""The line to the broker: whatever answers there, the loop goes on and the call ends."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from glasshouse.errors import Code, PeerError, RefusedError
from glasshouse.runtime.gate.broker_client import (
    MAX_BODY_BYTES,
    AnswerReader,
    BrokerClient,
    EvidenceRefusedError,
    HttpAnswer,
    body_of,
    parse_url,
    request,
)
from glasshouse.runtime.loop import Loop
from glasshouse.runtime.run.run_state import Ending
from glasshouse.wire.canonical import encode

GOOD = b"HTTP/1.1 200 OK\r\nserver: x\r\ncontent-length: 2\r\n\r\n{}"


def answer(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        status,
        len(body),
        body,
    )


class Peer:
    """Listens on a Unix socket and does one thing to every connection."""

    def __init__(self, path: Path, act: Callable[[socket.socket], None]) -> None:
        self.received: list[bytes] = []
        self._act = act
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            with connection:
                connection.settimeout(5)
                first = connection.recv(65536)
                if first == b"stop":
                    return
                self.received.append(first)
                with contextlib.suppress(OSError):  # the agent may have gone
                    self._act(connection)

    def close(self, path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(str(path))
            last.send(b"stop")
        self._thread.join()
        self._socket.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "broker.sock"


@pytest.fixture
def serve(path: Path) -> Iterator[Callable[[Callable[[socket.socket], None]], Peer]]:
    peers: list[Peer] = []

    def start(act: Callable[[socket.socket], None]) -> Peer:
        peers.append(Peer(path, act))
        return peers[-1]

    yield start
    for peer in peers:
        peer.close(path)


def post(path: Path, *, timeout_s: float = 5.0) -> bytes:
    return BrokerClient(f"unix:{path}", Loop()).post("/v1/challenge", b'{"a":1}', timeout_s=timeout_s)


def test_a_good_answer_is_its_body(path: Path, serve: Callable[..., Peer]) -> None:
    peer = serve(lambda connection: connection.sendall(GOOD))
    assert post(path) == b"{}"
    assert peer.received[0].startswith(b"POST /v1/challenge HTTP/1.1\r\nHost: localhost\r\n")
    assert peer.received[0].endswith(b"Content-Length: 7\r\nConnection: close\r\n\r\n" + b'{"a":1}')


def test_an_answer_in_single_bytes_is_the_same(path: Path, serve: Callable[..., Peer]) -> None:
    serve(lambda connection: [connection.sendall(GOOD[i : i + 1]) for i in range(len(GOOD))])
    assert post(path) == b"{}"


def test_an_answer_to_what_was_not_read_is_heard(path: Path, serve: Callable[..., Peer]) -> None:
    """A gate that refuses hardware evidence before it reads it leaves it in the socket, which is full then."""
    heard = threading.Event()

    def act(connection: socket.socket) -> None:
        connection.sendall(answer(409, b'{"code":"nonce-replayed","status":409}'))
        assert heard.wait(5)

    serve(act)
    with pytest.raises(RefusedError) as caught:
        BrokerClient(f"unix:{path}", Loop()).post("/v1/evidence", bytes(8 * 2**20), timeout_s=5.0)
    heard.set()
    assert caught.value.code is Code.NONCE_REPLAYED


def test_what_a_gate_says_of_this_machines_hardware_is_kept_on_one_line_of_what_can_be_printed() -> None:
    def refused(**problem: str) -> RefusedError:
        said = {"code": "tpm-quote", "detail": "register 7\x1b[2J\nof \xfc", "title": "x"}
        with pytest.raises(RefusedError) as caught:
            body_of(HttpAnswer(status=403, body=encode({**said, **problem})))
        return caught.value

    shown = refused(actual="ab" * 400, check="12")
    assert isinstance(shown, EvidenceRefusedError)
    assert (shown.code, len(shown.hint)) == (Code.TPM_QUOTE, 400)
    assert shown.hint.startswith("register 7?[2J?of ?: it shows abab")
    assert Ending.of(shown).hint == shown.hint
    other = refused(actual="ab", check="11")
    assert Ending.of(other).hint == ""


def test_a_refusal_keeps_its_code(path: Path, serve: Callable[..., Peer]) -> None:
    serve(lambda connection: connection.sendall(answer(403, b'{"code":"release-budget-exhausted","status":403}')))
    with pytest.raises(RefusedError) as caught:
        post(path)
    assert caught.value.code is Code.RELEASE_BUDGET


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (answer(503, b"busy"), Code.BROKER_UNREACHABLE),
        (answer(429, b'{"code":"too-many-challenges"}'), Code.BROKER_UNREACHABLE),
        (answer(500, b'{"code":"package-revoked"}'), Code.BROKER_UNREACHABLE),
        (answer(404, b'{"code":"no-such-code"}'), Code.BROKER_PROTOCOL),
        (answer(301, b""), Code.BROKER_PROTOCOL),
        (answer(202, b'{"accepted":1,"deadline_us":0,"machines":2}'), Code.BROKER_PROTOCOL),
        (b"SSH-2.0-OpenSSH\r\n\r\n", Code.BROKER_PROTOCOL),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", Code.BROKER_PROTOCOL),
        (b"HTTP/1.1 200 OK\r\n\r\n", Code.BROKER_PROTOCOL),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\n{}", Code.BROKER_PROTOCOL),
        (b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1), Code.BROKER_PROTOCOL),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n{}", Code.BROKER_PROTOCOL),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 9000, Code.BROKER_PROTOCOL),
        (GOOD[:-1], Code.BROKER_UNREACHABLE),
        (b"", Code.BROKER_UNREACHABLE),
    ],
)
def test_every_other_answer_ends_the_call_with_the_right_code(
    path: Path, serve: Callable[..., Peer], reply: bytes, code: Code
) -> None:
    serve(lambda connection: connection.sendall(reply))
    with pytest.raises(PeerError) as caught:
        post(path)
    assert caught.value.code is code


def test_nobody_listens(path: Path) -> None:
    with pytest.raises(PeerError) as caught:
        post(path)
    assert caught.value.code is Code.BROKER_UNREACHABLE


def test_a_broker_that_never_answers_does_not_hold_the_loop(path: Path, serve: Callable[..., Peer]) -> None:
    serve(lambda connection: time.sleep(0.4))
    loop, ticks = Loop(), []

    def tick() -> None:
        ticks.append(loop.now_s())
        loop.after(0.02, tick)

    tick()
    with pytest.raises(PeerError) as caught:
        BrokerClient(f"unix:{path}", loop).post("/v1/evidence", b"{}", timeout_s=0.2)
    assert caught.value.code is Code.BROKER_UNREACHABLE
    assert len(ticks) >= 4


def test_a_refused_tcp_connection_and_an_unknown_host_are_unreachable() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for url in (f"http://127.0.0.1:{port}", "http://no-such-host.invalid:80"):
        with pytest.raises(PeerError) as caught:
            BrokerClient(url, Loop()).post("/v1/challenge", b"{}", timeout_s=2)
        assert caught.value.code is Code.BROKER_UNREACHABLE


def test_an_abandoned_call_says_nothing_more(path: Path, serve: Callable[..., Peer]) -> None:
    serve(lambda connection: connection.sendall(GOOD))
    loop, told = Loop(), []
    call = BrokerClient(f"unix:{path}", loop).begin("/v1/heads", b"{}", told.append)
    call.abandon()
    loop.sleep(0.1)
    assert call.finished
    assert told == []


@pytest.mark.parametrize(
    "url", ["https://broker:1", "http://broker", "http://broker:0", "http://broker:65536", "http://a b:1", "unix:rel"]
)
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(PeerError) as caught:
        parse_url(url)
    assert caught.value.code is Code.BROKER_PROTOCOL


def test_a_request_names_its_host() -> None:
    assert b"Host: [::1]:8080\r\n" in request(parse_url("http://[::1]:8080"), "/v1/heads", b"")


def test_a_reader_gives_nothing_before_the_whole_answer() -> None:
    reader = AnswerReader()
    assert [reader.feed(bytes([byte])) for byte in GOOD[:-1]] == [None] * (len(GOOD) - 1)
    found = reader.feed(GOOD[-1:])
    assert found is not None
    assert (found.status, found.body) == (200, b"{}")
