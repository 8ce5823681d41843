"""A request in pieces: the kernel joins them, so that in how many it comes costs the broker next to nothing."""

from __future__ import annotations

import asyncio
import selectors
import socket
import sys
import time

import pytest
from starlette import requests
from starlette.responses import Response

from glasshouse.broker.http import bounded, endpoints
from glasshouse.broker.http.listeners import Server
from glasshouse.errors import Code
from simulators.local_broker import LocalBroker
from tools.raw_http import head, problem


class VirtualTime(asyncio.SelectorEventLoop):
    """A loop in which waiting takes no time and its clock moves on by as much."""

    now_s = 0.0

    def __init__(self) -> None:
        selector = selectors.DefaultSelector()
        wait = selector.select

        def skip(timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            self.now_s += timeout or 0.0
            return wait(0)

        selector.select = skip  # type: ignore[method-assign]
        super().__init__(selector)

    def time(self) -> float:
        return self.now_s


class Kernel(asyncio.Transport):
    """A socket with a buffer: what comes while nobody reads is joined.

    Attributes:
        reads: pieces that were read, each of which costs a broker a turn.
    """

    def __init__(self, line: asyncio.Protocol) -> None:
        super().__init__()
        self._line, self._buffer, self._reading, self.reads, self.cut = line, b"", True, 0, False
        line.connection_made(self)

    def get_extra_info(self, name: str, default: object = None) -> object:
        return {"peername": ("192.0.2.1", 4711), "sockname": ("192.0.2.2", 80)}.get(name, default)

    def arrives(self, data: bytes = b"") -> None:
        self._buffer += data
        if self._buffer and self._reading and not self.cut:
            received, self._buffer = self._buffer, b""
            self.reads += 1
            self._line.data_received(received)

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        asyncio.get_running_loop().call_soon(self.arrives)

    def is_reading(self) -> bool:
        return self._reading

    def write(self, data: object) -> None:
        pass

    def abort(self) -> None:
        self.cut = True

    close = abort

    def is_closing(self) -> bool:
        return self.cut


def sent_in_pieces(size: int, seconds: float, *, of: int = 124_000) -> tuple[int, float, bytes]:
    """Send a request evenly in pieces of a size; return how often it was read from, when it was whole, and its body."""
    found: list[tuple[float, bytes]] = []

    async def endpoint(request: requests.Request) -> Response:
        body = await request.body()
        found.append((asyncio.get_running_loop().time(), body))
        return Response()

    async def run() -> tuple[int, float, bytes]:
        app = endpoints.bare_app()
        app.add_route("/v1/evidence", endpoint, methods=["POST"])
        server = Server(app)
        line = server.config.http(config=server.config, server_state=server.server_state, app_state={})
        kernel, whole = Kernel(line), head("/v1/evidence", f"Content-Length: {of}") + b"." * of
        for start in range(0, len(whole), size):
            kernel.arrives(whole[start : start + size])
            await asyncio.sleep(seconds * size / len(whole))
        while not found and not kernel.cut:
            await asyncio.sleep(0.001)
        line.connection_lost(None)
        return (kernel.reads, *found[0])

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(run())


@pytest.mark.parametrize("size", [100, 258, 1460])
@pytest.mark.parametrize("seconds", [0.0, 0.6, 5.0, 10.0])
def test_a_request_is_read_in_few_pieces_however_its_sender_parts_it(size: int, seconds: float) -> None:
    """Each piece costs the loop a turn: 124 KB in pieces of 258 bytes cost the broker seven times the whole."""
    reads, whole_s, body = sent_in_pieces(size, seconds)
    assert body == b"." * 124_000
    assert reads <= 40
    assert whole_s <= 1.25 * seconds + 0.05, "and an honest sender on a slow line waits little longer than for the line"


@pytest.mark.parametrize("sent", [b"a: b\r\nTransfer-Encoding: chunked", b"a: \x01", b"no header", b"a: b"])
def test_a_connection_that_was_just_answered_keeps_no_broker_from_its_end(sent: bytes) -> None:
    """Between an answer and its last byte the server is told to stop: the error of one ended both listeners."""

    async def run() -> None:
        server = Server(endpoints.bare_app())
        line = server.config.http(config=server.config, server_state=server.server_state, app_state={})
        kernel = Kernel(line)
        kernel.arrives(head("/v1/heads", sent.decode()))
        await asyncio.sleep(0.1)
        assert kernel.cut
        line.shutdown()
        line.connection_lost(None)

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        runner.run(run())


@pytest.mark.skipif(sys.platform != "linux", reason="where the kernel does not wait for bytes, the loop pauses")
def test_the_kernel_joins_the_pieces_of_a_body(broker: LocalBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    received = bounded.BoundedProtocol.data_received

    def count(line: bounded.BoundedProtocol, data: bytes) -> None:
        reads.append(len(data))
        received(line, data)

    monkeypatch.setattr(bounded.BoundedProtocol, "data_received", count)
    start = head("/v1/receipt", "Content-Type: application/json", "Content-Length: 124000")
    host, _, port = broker.runtime_url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.sendall(start)
        for _ in range(400):
            client.sendall(b" " * 310)
            time.sleep(0.0005)  # so that each could be read by itself
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert problem(answer).code is Code.SCHEMA
    assert sum(reads) == len(start) + 124_000
    assert len(reads) <= bounded.FREE_PIECES


@pytest.mark.skipif(sys.platform != "linux", reason="where the kernel does not wait for bytes, none are left there")
def test_a_body_in_pieces_too_small_for_the_kernels_window_is_answered(
    broker: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces fill the window sooner than their bytes would; the rest, below the last mark, was left in the kernel."""
    monkeypatch.setattr(endpoints, "BODY_TIMEOUT_S", 60.0)
    monkeypatch.setattr(bounded, "CONNECTION_TIMEOUT_S", 120.0)
    host, _, port = broker.runtime_url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.sendall(head("/v1/receipt", "Content-Type: application/json", "Content-Length: 66000"))
        for start in range(0, 66_000, 64):
            client.sendall(b" " * min(64, 66_000 - start))
            time.sleep(0.0005)  # so that each takes a buffer of its own
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert problem(answer).detail != "the body did not arrive in time"
    assert problem(answer).code is Code.SCHEMA


def test_after_each_read_the_kernel_is_to_wait_for_no_more_than_is_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    marks: list[int] = []
    monkeypatch.setattr(bounded.BoundedProtocol, "_wake_for", lambda _line, count: marks.append(count))
    whole = len(head("/v1/evidence", "Content-Length: 66000")) + 66_000
    sent_in_pieces(10_000, 0.0, of=66_000)
    left = [whole - 10_000 * reads for reads in range(1, 7)]
    parts = [10_000 * reads for reads in range(6)]  # what came with the head was handed on
    assert marks == [*(min(rest, bounded.PART_BYTES - part) for rest, part in zip(left, parts, strict=True)), 0]


def test_a_request_in_a_few_pieces_is_read_at_once() -> None:
    """As clients and networks part what a runtime sends: head and body, or segments."""
    assert sent_in_pieces(1460, 0.0, of=1460 * bounded.FREE_PIECES - 100) == (
        bounded.FREE_PIECES,
        0.0,
        b"." * (1460 * bounded.FREE_PIECES - 100),
    )
