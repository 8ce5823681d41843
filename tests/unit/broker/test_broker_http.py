"""The listeners as a stranger meets them: what exists, how much is read, how long is waited."""

from __future__ import annotations

import asyncio
import selectors
import socket
import stat
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from starlette import requests
from starlette.responses import Response
from starlette.routing import Route

from glasshouse.broker import http, intake, listen, room
from glasshouse.broker.client import request
from glasshouse.broker.listen import Server
from glasshouse.broker.problems import PROBLEM_TYPE, Problem
from glasshouse.errors import Code, UsageError
from glasshouse.handshake.messages import MAX_REQUEST_BYTES, ReleaseRequest
from glasshouse.handshake.runtime_side import challenge_request
from glasshouse.tamper.stage import Actor, Owner
from glasshouse.wire.signing import SigningKey
from simulators.local_broker import LocalBroker
from simulators.reporting import Reporter
from tools.waiting import wait_for

RUNTIME_ROUTES = [
    ("POST", "/v1/challenge"),
    ("POST", "/v1/evidence"),
    ("POST", "/v1/heads"),
    ("POST", "/v1/receipt"),
    ("POST", "/v1/release"),
]
OWNER_ROUTES = [
    ("GET", "/v1/audit"),
    ("GET", "/v1/broker"),
    ("GET", "/v1/deployments/{deployment}"),
    ("GET", "/v1/groups/{group}"),
    ("GET", "/v1/runs/{run_id}"),
    ("POST", "/v1/deployments"),
    ("POST", "/v1/groups"),
    ("POST", "/v1/groups/{group}/refuse"),
    ("POST", "/v1/launches"),
    ("POST", "/v1/packages/{package_id}/revoke"),
    ("PUT", "/v1/delegation"),
]


def raw(broker: LocalBroker, data: bytes, *, close: bool = False) -> bytes:
    """Send bytes and return whatever comes back until the other side hangs up."""
    host, _, port = broker.runtime_url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(data)
        if close:
            connection.shutdown(socket.SHUT_WR)
        received = b""
        try:
            while part := connection.recv(65536):
                received += part
        except ConnectionResetError:
            pass
        return received


def head(path: str, *lines: str, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode()


def problem(answer: bytes) -> Problem:
    top, _, body = answer.partition(b"\r\n\r\n")
    assert f"content-type: {PROBLEM_TYPE}".encode() in top
    assert b"connection: close" in top
    return Problem.parse(body)


def test_each_listener_has_exactly_its_routes(broker: LocalBroker) -> None:
    for (app, _), expected in zip(broker._listeners, (RUNTIME_ROUTES, OWNER_ROUTES), strict=True):
        assert all(isinstance(route, Route) for route in app.routes)
        found = [(m, route.path) for route in app.routes if isinstance(route, Route) for m in route.methods or ()]
        assert sorted(found) == expected


@pytest.mark.parametrize(
    "path", ["/", "/docs", "/redoc", "/openapi.json", "/health", "/v1/broker", "/v1/audit", "/v1/challenge/", "//"]
)
def test_nothing_else_is_there_for_a_runtime(broker: LocalBroker, path: str) -> None:
    for method in ("GET", "POST", "PUT"):
        assert request(broker.runtime_url, method, path).status == 404


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"])
def test_a_resource_answers_by_its_method_only(broker: LocalBroker, method: str) -> None:
    answer = raw(broker, head("/v1/evidence", method=method))
    assert answer.startswith(b"HTTP/1.1 405")
    assert b"allow: POST" in answer


def test_the_owners_socket_is_for_the_owner_alone(broker: LocalBroker) -> None:
    path = Path(broker.client()._url.removeprefix("unix:"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(broker.data.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in broker.data.iterdir()} == {0o600}


def test_a_body_that_says_it_is_too_long_is_not_read(broker: LocalBroker) -> None:
    answer = raw(broker, head("/v1/challenge", "Content-Type: application/json", "Content-Length: 99999999999999999"))
    assert problem(answer).code is Code.MESSAGE_TOO_LARGE


def test_a_body_in_chunks_is_refused_before_the_first(broker: LocalBroker) -> None:
    """Its sender chooses how many there are: a body of 128 KiB in chunks of a byte held the loop up for a second."""
    start = head("/v1/challenge", "Content-Type: application/json", "Transfer-Encoding: chunked")
    assert problem(raw(broker, start)).code is Code.MESSAGE_INVALID
    assert problem(raw(broker, start + b"2\r\n{}\r\n0\r\n\r\n")).code is Code.MESSAGE_INVALID


def test_a_body_longer_than_it_may_be_is_refused_by_its_length(broker: LocalBroker) -> None:
    for length in (MAX_REQUEST_BYTES, MAX_REQUEST_BYTES + 1):
        start = head("/v1/challenge", "Content-Type: application/json", f"Content-Length: {length}")
        found = problem(raw(broker, start + b" " * length)).code
        assert found is (Code.MESSAGE_TOO_LARGE if length > MAX_REQUEST_BYTES else Code.MESSAGE_INVALID)


def test_a_body_longer_than_it_says_is_cut_where_it_said(broker: LocalBroker) -> None:
    start = head("/v1/challenge", "Content-Type: application/json", "Content-Length: 2")
    assert problem(raw(broker, start + b"{}" + b"x" * 1000)).code is Code.MESSAGE_INVALID


def test_a_body_shorter_than_it_says_is_never_acted_on(broker: LocalBroker) -> None:
    start = head("/v1/challenge", "Content-Type: application/json", "Content-Length: 2000")
    assert b"200 OK" not in raw(broker, start + b"{}", close=True)
    assert broker.count("audit") == 0


def test_a_client_that_dribbles_its_body_is_cut_off(broker: LocalBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_TIMEOUT_S", 0.2)
    start = head("/v1/challenge", "Content-Type: application/json", "Content-Length: 2000")
    assert problem(raw(broker, start + b"{")).detail == "the body did not arrive in time"


def test_a_client_that_never_ends_its_headers_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "HEADER_TIMEOUT_S", 0.2)
    with LocalBroker(tmp_path) as broker:
        assert raw(broker, b"POST /v1/evidence HTTP/1.1\r\nX-Slow: ") == b""
        assert raw(broker, b"") == b""
    assert listen.CONNECTION_TIMEOUT_S > 10, "which is not what cut them off"


def test_a_client_that_never_ends_its_body_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "HEADER_TIMEOUT_S", 0.1)
    monkeypatch.setattr(listen, "CONNECTION_TIMEOUT_S", 0.3)
    with LocalBroker(tmp_path) as broker:
        start = head("/v1/challenge", "Content-Type: application/json", "Content-Length: 2000")
        assert raw(broker, start + b"{") == b""


@pytest.mark.parametrize(
    "headers",
    [
        b"X: " + b"a" * 40_000,
        b"X: " + b"a" * 40_000 + b"\r\n\r\n",
        b"a:\r\n" * 100,
        b"a:\r\n" * 100 + b"\r\n",
        b"no header\r\n\r\n",
    ],
    ids=["endless", "long and an end", "many", "many and an end", "not one"],
)
def test_headers_that_cost_too_much_are_refused(broker: LocalBroker, headers: bytes) -> None:
    answer = raw(broker, b"POST /v1/evidence HTTP/1.1\r\n" + headers)
    assert answer.startswith(b"HTTP/1.1 400")
    assert problem(answer).code is Code.MESSAGE_INVALID


@pytest.mark.parametrize("character", [b"\x00", b"\x0b", b"\x0c", b"\r", b"\x1f"])
def test_a_line_that_costs_the_parser_the_square_of_its_length_does_not_reach_it(
    broker: LocalBroker, monkeypatch: pytest.MonkeyPatch, character: bytes
) -> None:
    parsed: list[bytes] = []
    monkeypatch.setattr(listen._Requests, "receive_data", lambda _connection, data: parsed.append(data))
    line = b"a:" + b" " * 10_000 + character + b"b\r\n\r\n"
    answer = raw(broker, b"POST /v1/heads HTTP/1.1\r\n" + line)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"".join(parsed) == b""


def test_a_head_may_come_in_pieces_that_part_its_line_ends(broker: LocalBroker) -> None:
    host, _, port = broker.runtime_url.removeprefix("http://").rpartition(":")
    whole = head("/v1/challenge", "Content-Type: application/json", "Content-Length: 2") + b"{}"
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in whole.replace(b"\r", b"\r|").replace(b"\n", b"\n|").split(b"|"):
            client.sendall(piece)
            time.sleep(0.01)  # so that each is read by itself
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert problem(answer).code is Code.MESSAGE_INVALID


@pytest.mark.parametrize(("lines", "refused"), [(64, False), (65, True)])
@pytest.mark.parametrize("pieces", [1, 2])
def test_a_head_has_as_many_lines_as_it_may_however_it_comes(
    broker: LocalBroker, lines: int, refused: bool, pieces: int
) -> None:
    host, _, port = broker.runtime_url.removeprefix("http://").rpartition(":")
    start = head("/v1/challenge", "Content-Type: application/json", "Content-Length: 2").removesuffix(b"\r\n")
    start += b"a: b\r\n" * (lines - start.count(b"\n"))
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in [start, b"\r\n{}"] if pieces == 2 else [start + b"\r\n{}"]:
            client.sendall(piece)
            time.sleep(0.05)
        answer = client.recv(65536)
    assert (b"too many header lines" in answer) is refused


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
        app = http.bare_app()
        app.add_route("/v1/evidence", endpoint, methods=["POST"])
        server = Server(app)
        line = server.config.http(config=server.config, server_state=server.server_state, app_state={})
        kernel, whole = Kernel(line), head("/v1/evidence", f"Content-Length: {of}") + bytes(of)
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
    assert body == bytes(124_000)
    assert reads <= 40
    assert whole_s <= 1.25 * seconds + 0.05, "and an honest sender on a slow line waits little longer than for the line"


@pytest.mark.skipif(sys.platform != "linux", reason="where the kernel does not wait for bytes, the loop pauses")
def test_the_kernel_joins_the_pieces_of_a_body(broker: LocalBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    received = listen._BoundedProtocol.data_received

    def count(line: listen._BoundedProtocol, data: bytes) -> None:
        reads.append(len(data))
        received(line, data)

    monkeypatch.setattr(listen._BoundedProtocol, "data_received", count)
    start = head("/v1/evidence", "Content-Type: application/json", "Content-Length: 124000")
    host, _, port = broker.runtime_url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.sendall(start)
        for _ in range(400):
            client.sendall(b" " * 310)
            time.sleep(0.0005)  # so that each could be read by itself
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert problem(answer).code is Code.MESSAGE_INVALID
    assert sum(reads) == len(start) + 124_000
    assert len(reads) <= listen.FREE_PIECES


@pytest.mark.skipif(sys.platform != "linux", reason="where the kernel does not wait for bytes, none are left there")
def test_a_body_in_pieces_too_small_for_the_kernels_window_is_answered(
    broker: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces fill the window sooner than their bytes would; the rest, below the last mark, was left in the kernel."""
    monkeypatch.setattr(http, "BODY_TIMEOUT_S", 60.0)
    monkeypatch.setattr(listen, "CONNECTION_TIMEOUT_S", 120.0)
    host, _, port = broker.runtime_url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.sendall(head("/v1/evidence", "Content-Type: application/json", "Content-Length: 66000"))
        for start in range(0, 66_000, 64):
            client.sendall(b" " * min(64, 66_000 - start))
            time.sleep(0.0005)  # so that each takes a buffer of its own
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert problem(answer).detail != "the body did not arrive in time"
    assert problem(answer).code is Code.MESSAGE_INVALID


def test_after_each_read_the_kernel_is_to_wait_for_no_more_than_is_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    marks: list[int] = []
    monkeypatch.setattr(listen._BoundedProtocol, "_wake_for", lambda _line, count: marks.append(count))
    whole = len(head("/v1/evidence", "Content-Length: 66000")) + 66_000
    sent_in_pieces(10_000, 0.0, of=66_000)
    left = [whole - 10_000 * reads for reads in range(1, 7)]
    parts = [10_000 * reads for reads in range(6)]  # what came with the head was handed on
    assert marks == [*(min(rest, listen.PART_BYTES - part) for rest, part in zip(left, parts, strict=True)), 0]


def test_a_request_in_a_few_pieces_is_read_at_once() -> None:
    """As clients and networks part what a runtime sends: head and body, or segments."""
    assert sent_in_pieces(1460, 0.0, of=1460 * listen.FREE_PIECES - 100) == (
        listen.FREE_PIECES,
        0.0,
        bytes(1460 * listen.FREE_PIECES - 100),
    )


def test_only_json_is_taken(broker: LocalBroker) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        answer = raw(broker, head("/v1/evidence", f"Content-Type: {kind}", "Content-Length: 2") + b"{}")
        assert problem(answer).detail == "a body that is not application/json"


def test_query_parameters_are_refused_where_none_are_meant(broker: LocalBroker) -> None:
    assert problem(raw(broker, head("/v1/evidence?a=b"))).code is Code.USAGE


@pytest.mark.parametrize("path", [path for _, path in RUNTIME_ROUTES])
def test_neither_query_nor_cookies_of_a_stranger_are_parsed(
    broker: LocalBroker, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Each of 7,000 parameters in a line of 14 KB has its cost, before anything is known of who asks."""

    def parse(*_arguments: object) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr(requests, "QueryParams", parse)
    monkeypatch.setattr(requests, "cookie_parser", parse)
    answer = raw(broker, head(f"{path}?{'a&' * 7000}a", f"Cookie: {'a=b;' * 100}", "Content-Length: 0"))
    assert answer.startswith(b"HTTP/1.1 422")
    assert problem(answer).code is Code.USAGE
    answer = raw(broker, head(path, f"Cookie: {'a=b;' * 100}", "Content-Length: 0"))
    assert answer.startswith(b"HTTP/1.1 400")


def test_every_answer_closes_its_connection(broker: LocalBroker) -> None:
    once = head("/v1/evidence", "Content-Type: application/json", "Content-Length: 2") + b"{}"
    answer = raw(broker, once + once)
    assert answer.count(b"HTTP/1.1") == 1


def sockets(broker: LocalBroker, number: int) -> list[socket.socket]:
    host, _, port = broker.runtime_url.removeprefix("http://").rpartition(":")
    return [socket.create_connection((host, int(port)), timeout=10) for _ in range(number)]


@pytest.mark.parametrize("limit", ["MOST_CONNECTIONS", "MOST_OF_ADDRESS"])
def test_connections_that_say_nothing_give_way_to_one_that_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """A hundred and forty open sockets ended every run that had to report."""
    monkeypatch.setattr(room if limit == "MOST_CONNECTIONS" else listen, limit, 4)
    monkeypatch.setattr(listen, "HEADER_TIMEOUT_S", 600.0)
    with LocalBroker(tmp_path) as broker:
        owner = Owner(broker)
        idle = sockets(broker, 4)
        actor = Actor.enter(owner)
        challenge = actor.challenge()
        evidence = actor.sign(actor.claims(challenge))
        assert actor.open(actor.send(evidence).content(), challenge, evidence) == owner.package_key
        assert [one for one in idle if ended(one)] == idle[:1], "the oldest; the second request found its place free"
        for one in idle:
            one.close()


def ended(connection: socket.socket) -> bool:
    """Whether the other side hung up; it has, or it will not."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except BlockingIOError:
        return False


def test_too_many_requests_are_turned_away_with_a_reason_and_room_is_kept_for_a_known_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "MOST_REQUESTS", 2)
    monkeypatch.setattr(intake, "RESERVED_REQUESTS", 2)
    with LocalBroker(tmp_path) as broker:
        launches = [Owner(broker).launch() for _ in range(5)]
        held = threading.Event()
        broker._executor.submit(held.wait, 30)
        with ThreadPoolExecutor(4) as pool:
            waiting = [
                pool.submit(Actor.enter(None, one).post, "/v1/challenge", challenge_request(one))
                for one in launches[:2]
            ]  # type: ignore[arg-type]
            wait_for(lambda: broker._intake._requests == 2)
            wait_for(lambda: broker._intake._shares.rank("127.0.0.1") == 0)
            # What was authentic came from this address: it has more room than a stranger, and not without end.
            waiting += [
                pool.submit(Actor.enter(None, one).post, "/v1/challenge", challenge_request(one))
                for one in launches[2:4]
            ]  # type: ignore[arg-type]
            wait_for(lambda: broker._intake._requests == 4)
            reply = request(broker.runtime_url, "POST", "/v1/challenge", challenge_request(launches[4]))
            held.set()
            assert [one.result().status for one in waiting] == [200] * 4
        assert (reply.status, reply.problem().code) == (503, Code.BROKER_UNREACHABLE)
        assert reply.problem().detail == "the broker is busy; nothing was read, try again"


def test_what_nobody_signed_never_reaches_the_thread_that_decides(tmp_path: Path) -> None:
    with LocalBroker(tmp_path) as broker:
        owner = Owner(broker)
        actor = Actor.enter(owner)
        challenge = actor.challenge()
        stranger = replace(actor, launch=owner.launch(), evidence=SigningKey.generate())
        unsigned = stranger.sign(replace(actor.claims(challenge), evidence_public=stranger.evidence.public))
        reporter = Reporter(replace(actor, evidence=SigningKey.generate()))
        held = threading.Event()
        broker._executor.submit(held.wait, 30)
        for path, message, code in (
            ("/v1/evidence", b"{}", Code.MESSAGE_INVALID),
            ("/v1/evidence", unsigned, Code.EVIDENCE_SIGNATURE),
            ("/v1/challenge", challenge_request(replace(actor.launch, launch_seed=bytes(32))), Code.TOKEN_KEY),
            ("/v1/heads", reporter.submission(), Code.RUN_UNKNOWN),
            (
                "/v1/release",
                ReleaseRequest(nonce=bytes(32), evidence_sha256=bytes(32)).sign(actor.evidence),
                Code.NONCE_UNKNOWN,
            ),
        ):
            assert actor.post(path, message).problem().code is code
        assert not held.is_set()
        held.set()


def test_no_environment_makes_the_broker_export_what_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTAPI_OTEL_AUTO_CONFIGURE", "true")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    app = http.bare_app()
    assert app._native_telemetry.enabled() is False
    assert not any(value for name, value in app._telemetry.items() if isinstance(value, bool)), app._telemetry


@pytest.mark.parametrize("bind", ["", "127.0.0.1", ":80", "host:", "host:99999", "host:x", "unix:relative", "unix:"])
def test_an_address_that_is_none_is_refused(bind: str) -> None:
    with pytest.raises(UsageError):
        listen.parse_bind(bind)


def test_addresses_are_read() -> None:
    assert listen.parse_bind("127.0.0.1:0") == ("127.0.0.1", 0)
    assert listen.parse_bind("[::1]:8443") == ("::1", 8443)
    assert listen.parse_bind("unix:/run/x") == Path("/run/x")


def test_an_address_in_use_is_refused() -> None:
    first, url = listen.bind_tcp("127.0.0.1", 0)
    first.listen()
    with first, pytest.raises(UsageError, match="cannot listen"):
        listen.bind_tcp("127.0.0.1", int(url.rpartition(":")[2]))
    with pytest.raises(UsageError, match="cannot listen"):
        listen.bind_tcp("no.such.host.invalid", 1)


@pytest.fixture
def private(tmp_path: Path) -> Path:
    path = tmp_path / "s"
    path.mkdir(mode=0o700)
    return path


def test_a_socket_that_somebody_listens_on_is_left_alone(private: Path) -> None:
    first, _ = listen.bind_unix(private / "x")
    first.listen()
    with first, pytest.raises(UsageError, match="another process listens"):
        listen.bind_unix(private / "x")


def test_a_socket_that_a_dead_process_left_is_replaced(private: Path) -> None:
    first, _ = listen.bind_unix(private / "x")
    first.close()
    again, url = listen.bind_unix(private / "x")
    with again:
        assert url == f"unix:{private / 'x'}"
        assert stat.S_IMODE((private / "x").stat().st_mode) == 0o600


def test_a_socket_that_others_could_use_is_refused(private: Path) -> None:
    first, _ = listen.bind_unix(private / "x")
    first.close()
    (private / "x").chmod(0o660)
    with pytest.raises(UsageError, match="0660") as caught:
        listen.bind_unix(private / "x")
    assert f"rm {private / 'x'}" in caught.value.hint


def test_what_is_not_a_socket_is_not_removed(private: Path) -> None:
    (private / "x").write_text("precious")
    with pytest.raises(UsageError, match="not a socket"):
        listen.bind_unix(private / "x")
    assert (private / "x").read_text() == "precious"


def test_a_directory_that_others_can_enter_is_refused(private: Path) -> None:
    private.chmod(0o755)
    with pytest.raises(UsageError, match="0755"):
        listen.bind_unix(private / "x")


def test_a_path_that_is_too_long_is_refused(private: Path) -> None:
    with pytest.raises(UsageError, match="too long"):
        listen.bind_unix(private / ("x" * 100))
