"""The listeners as a stranger meets them: what exists, how much is read, how long is waited."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from glasshouse.broker import http, listen
from glasshouse.broker.client import request
from glasshouse.broker.problems import PROBLEM_TYPE, Problem
from glasshouse.errors import Code, UsageError
from glasshouse.handshake.messages import MAX_REQUEST_BYTES
from simulators.local_broker import LocalBroker
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


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[LocalBroker]:
    with LocalBroker(tmp_path) as running:
        yield running


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
        assert all(isinstance(route, APIRoute) for route in app.routes)
        found = [(m, route.path) for route in app.routes if isinstance(route, APIRoute) for m in route.methods]
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


def test_a_body_in_chunks_is_counted_while_it_arrives(broker: LocalBroker) -> None:
    start = head("/v1/challenge", "Content-Type: application/json", "Transfer-Encoding: chunked")
    chunk = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
    answer = raw(broker, start + chunk * (MAX_REQUEST_BYTES // 0x4000 + 1))
    assert problem(answer).code is Code.MESSAGE_TOO_LARGE


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
    monkeypatch.setattr(listen, "CONNECTION_TIMEOUT_S", 0.2)
    with LocalBroker(tmp_path) as broker:
        assert raw(broker, b"POST /v1/evidence HTTP/1.1\r\nX-Slow: ") == b""
        assert raw(broker, b"") == b""


def test_endless_headers_are_refused(broker: LocalBroker) -> None:
    assert raw(broker, b"POST /v1/evidence HTTP/1.1\r\nX: " + b"a" * 40_000).startswith(b"HTTP/1.1 400")


def test_only_json_is_taken(broker: LocalBroker) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        answer = raw(broker, head("/v1/evidence", f"Content-Type: {kind}", "Content-Length: 2") + b"{}")
        assert problem(answer).detail == "a body that is not application/json"


def test_query_parameters_are_refused_where_none_are_meant(broker: LocalBroker) -> None:
    assert problem(raw(broker, head("/v1/evidence?a=b"))).code is Code.USAGE


def test_every_answer_closes_its_connection(broker: LocalBroker) -> None:
    once = head("/v1/evidence", "Content-Type: application/json", "Content-Length: 2") + b"{}"
    answer = raw(broker, once + once)
    assert answer.count(b"HTTP/1.1") == 1


def test_too_many_connections_are_turned_away_and_the_broker_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "MAX_CONNECTIONS", 4)
    with LocalBroker(tmp_path) as broker:
        host, _, port = broker.runtime_url.removeprefix("http://").rpartition(":")
        idle = [socket.create_connection((host, int(port))) for _ in range(4)]
        assert request(broker.runtime_url, "POST", "/v1/evidence", b"{}").status == 503
        for connection in idle:
            connection.close()
        wait_for(lambda: request(broker.runtime_url, "POST", "/v1/evidence", b"{}").status != 503)
        assert broker.client().broker_public() == broker.broker_public


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
