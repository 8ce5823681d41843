"""The listeners as a stranger meets them: what exists, how much is read, how long is waited."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from starlette import requests
from starlette.routing import Route

from glasshouse.broker.client.owner_client import request
from glasshouse.broker.http import bounded, connections, endpoints, intake, listeners
from glasshouse.errors import Code, UsageError
from glasshouse.handshake.messages import MAX_REQUEST_BYTES, ReleaseRequest
from glasshouse.handshake.runtime_side import challenge_request
from glasshouse.tamper.stage import Actor, Owner
from glasshouse.wire.crypto import SigningKey
from simulators.local_broker import LocalBroker
from simulators.reporting import Reporter
from tools.raw_http import head, problem, raw
from tools.waiting import wait_for

RUNTIME_ROUTES = [
    ("POST", "/v1/challenge"),
    ("POST", "/v1/evidence"),
    ("POST", "/v1/heads"),
    ("POST", "/v1/receipt"),
    ("POST", "/v1/release"),
]
CALLS = [
    ("GET", "/v1/audit"),
    ("GET", "/v1/deployments/{deployment}"),
    ("GET", "/v1/groups/{group}"),
    ("GET", "/v1/lines/{line}"),
    ("GET", "/v1/runs/{run_id}"),
    ("POST", "/v1/collateral"),
    ("POST", "/v1/deployments"),
    ("POST", "/v1/groups"),
    ("POST", "/v1/groups/{group}/refuse"),
    ("POST", "/v1/launches"),
    ("POST", "/v1/lines/{line}/lost"),
    ("POST", "/v1/packages/{package_id}/revoke"),
    ("PUT", "/v1/delegation"),
]
OWNER_ROUTES = sorted([*CALLS, ("GET", "/metrics"), ("GET", "/v1/broker")])
# A bare route that answers GET has HEAD too, which no owner can sign.
_ANYONES = [("GET", "/health"), ("GET", "/v1/broker")]
_HEADS = [("HEAD", path) for method, path in (*CALLS, *_ANYONES) if method == "GET"]
GATE_ROUTES = sorted([*RUNTIME_ROUTES, *CALLS, *_ANYONES, *_HEADS])


def test_each_listener_has_exactly_its_routes(broker: LocalBroker) -> None:
    for (app, _), expected in zip(broker._listeners, (RUNTIME_ROUTES, OWNER_ROUTES, GATE_ROUTES), strict=True):
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
    monkeypatch.setattr(endpoints, "BODY_TIMEOUT_S", 0.2)
    start = head("/v1/challenge", "Content-Type: application/json", "Content-Length: 2000")
    assert problem(raw(broker, start + b"{")).detail == "the body did not arrive in time"


def test_a_client_that_never_ends_its_headers_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "HEADER_TIMEOUT_S", 0.2)
    with LocalBroker(tmp_path) as broker:
        assert raw(broker, b"POST /v1/evidence HTTP/1.1\r\nX-Slow: ") == b""
        assert raw(broker, b"") == b""
    assert bounded.CONNECTION_TIMEOUT_S > 10, "which is not what cut them off"


def test_a_client_that_never_ends_its_body_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "HEADER_TIMEOUT_S", 0.1)
    monkeypatch.setattr(bounded, "CONNECTION_TIMEOUT_S", 0.3)
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


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("X-Forwarded-For: " + "2001:db8::1, " * 64, b""),
        ("X: " + "a" * 3900, b""),
        ("X: " + "a" * 4096, b"more than 4096 bytes of headers"),
        ("Connection: " + "a," * 65, b"too many commas among the headers"),
    ],
    ids=["a chain of proxies", "long", "too long", "a list that is parted again and again"],
)
def test_a_head_has_room_for_what_proxies_add_and_no_more(broker: LocalBroker, line: str, reason: bytes) -> None:
    answer = raw(broker, head("/v1/evidence", "Content-Type: application/json", "Content-Length: 2", line) + b"{}")
    assert (reason or b"check 1") in answer


@pytest.mark.parametrize("character", [b"\x00", b"\x0b", b"\x0c", b"\r", b"\x1f"])
def test_a_line_that_costs_the_parser_the_square_of_its_length_does_not_reach_it(
    broker: LocalBroker, monkeypatch: pytest.MonkeyPatch, character: bytes
) -> None:
    parsed: list[bytes] = []
    monkeypatch.setattr(bounded._Requests, "receive_data", lambda _connection, data: parsed.append(data))
    line = b"a:" + b" " * 4000 + character + b"b\r\n\r\n"
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
    """Each of 1,500 parameters in a line of 3 KB has its cost, before anything is known of who asks."""

    def parse(*_arguments: object) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr(requests, "QueryParams", parse)
    monkeypatch.setattr(requests, "cookie_parser", parse)
    answer = raw(broker, head(f"{path}?{'a&' * 1500}a", f"Cookie: {'a=b;' * 100}", "Content-Length: 0"))
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
    monkeypatch.setattr(connections if limit == "MOST_CONNECTIONS" else listeners, limit, 4)
    monkeypatch.setattr(bounded, "HEADER_TIMEOUT_S", 600.0)
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
                ReleaseRequest(nonce=bytes(32), evidence_sha256=bytes(32)).sign(actor.evidence).encode(),
                Code.NONCE_UNKNOWN,
            ),
        ):
            assert actor.post(path, message).problem().code is code
        assert not held.is_set()
        held.set()


def test_no_environment_makes_the_broker_export_what_it_sees() -> None:
    """A framework that exports stack traces to a collector which an environment variable names is not loaded."""
    told = (
        "import sys; from glasshouse.broker.serving import bare_app; bare_app(); "
        "print(*sorted({name.partition('.')[0] for name in sys.modules} & {'fastapi', 'opentelemetry', 'starlette'}))"
    )
    names = {"FASTAPI_OTEL_AUTO_CONFIGURE": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-I", "-c", told], env=os.environ | names, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["starlette"]


@pytest.mark.parametrize("bind", ["", "127.0.0.1", ":80", "host:", "host:99999", "host:x", "unix:relative", "unix:"])
def test_an_address_that_is_none_is_refused(bind: str) -> None:
    with pytest.raises(UsageError):
        listeners.parse_bind(bind)


def test_addresses_are_read() -> None:
    assert listeners.parse_bind("127.0.0.1:0") == ("127.0.0.1", 0)
    assert listeners.parse_bind("[::1]:8443") == ("::1", 8443)
    assert listeners.parse_bind("unix:/run/x") == Path("/run/x")


def test_an_address_in_use_is_refused() -> None:
    first, url = listeners.bind_tcp("127.0.0.1", 0)
    first.listen()
    with first, pytest.raises(UsageError, match="cannot listen"):
        listeners.bind_tcp("127.0.0.1", int(url.rpartition(":")[2]))
    with pytest.raises(UsageError, match="cannot listen"):
        listeners.bind_tcp("no.such.host.invalid", 1)


@pytest.fixture
def private(tmp_path: Path) -> Path:
    path = tmp_path / "s"
    path.mkdir(mode=0o700)
    return path


def test_a_socket_that_somebody_listens_on_is_left_alone(private: Path) -> None:
    first, _ = listeners.bind_unix(private / "x")
    first.listen()
    with first, pytest.raises(UsageError, match="another process listens"):
        listeners.bind_unix(private / "x")


def test_a_socket_that_a_dead_process_left_is_replaced(private: Path) -> None:
    first, _ = listeners.bind_unix(private / "x")
    first.close()
    again, url = listeners.bind_unix(private / "x")
    with again:
        assert url == f"unix:{private / 'x'}"
        assert stat.S_IMODE((private / "x").stat().st_mode) == 0o600


def test_a_socket_is_its_owners_alone_and_the_umask_of_other_threads_is_left_alone(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0)
    try:
        with monkeypatch.context() as patch:
            # Two threads that set it and set it back may leave the other's.
            patch.setattr(os, "umask", lambda _: pytest.fail("the umask was changed"))
            listener, _ = listeners.bind_unix(private / "x")
    finally:
        os.umask(before)
    with listener:
        assert stat.S_IMODE((private / "x").stat().st_mode) == 0o600


def test_a_socket_that_others_could_use_is_refused(private: Path) -> None:
    first, _ = listeners.bind_unix(private / "x")
    first.close()
    (private / "x").chmod(0o660)
    with pytest.raises(UsageError, match="0660") as caught:
        listeners.bind_unix(private / "x")
    assert f"rm {private / 'x'}" in caught.value.hint


def test_what_is_not_a_socket_is_not_removed(private: Path) -> None:
    (private / "x").write_text("precious")
    with pytest.raises(UsageError, match="not a socket"):
        listeners.bind_unix(private / "x")
    assert (private / "x").read_text() == "precious"


def test_a_directory_that_others_can_enter_is_refused(private: Path) -> None:
    private.chmod(0o755)
    with pytest.raises(UsageError, match="0755"):
        listeners.bind_unix(private / "x")


def test_a_path_that_is_too_long_is_refused(private: Path) -> None:
    with pytest.raises(UsageError, match="too long"):
        listeners.bind_unix(private / ("x" * 100))
