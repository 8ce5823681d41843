"""The gate's port as strangers and thieves of recordings meet it."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from glasshouse.broker.client.gate_client import GateClient, _GateConnection
from glasshouse.broker.client.owner_client import Reply, exchange, request
from glasshouse.broker.http import tls
from glasshouse.broker.http.connections import MOST_CONNECTIONS, MOST_OF_ADDRESS
from glasshouse.broker.http.tls import CERTIFICATE_NAME, Certificate, TlsProtocol
from glasshouse.broker.http_api import Problem
from glasshouse.errors import Code, FormatError, PeerError, RefusedError, UsageError
from glasshouse.handshake.owner_api import sign_request
from glasshouse.providers.protocol.line import GateLine
from glasshouse.tamper.stage import clock_us
from glasshouse.wire.canonical import decode
from glasshouse.wire.crypto import SigningKey
from simulators.local_broker import LocalBroker

ALICE = SigningKey.generate()
RUN = "/v1/runs/" + "ab" * 16


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[LocalBroker]:
    with LocalBroker(tmp_path, owners=(ALICE.public,)) as running:
        yield running


def line(gate: LocalBroker) -> GateLine:
    return GateLine(url=gate.gate_url, certificate=gate.certificate.sha256.hex())


def send(gate: LocalBroker, authorization: str | None, path: str = RUN) -> Reply:
    named = {} if authorization is None else {"Authorization": authorization}
    return exchange(_GateConnection("gate", line(gate).connect), gate.gate_url, "GET", path, None, named)


def signed(gate: LocalBroker, key: SigningKey = ALICE, serial_us: int | None = None) -> str:
    return sign_request(
        key,
        gate_public=gate.broker_public,
        method="GET",
        target=RUN,
        body=b"",
        serial_us=clock_us() if serial_us is None else serial_us,
    )


def test_anyone_may_know_the_gates_key_and_that_it_lives(gate: LocalBroker) -> None:
    gate.gate(None).check_known()
    assert decode(send(gate, None, "/health").content(), max_bytes=100) == {"status": "ok"}
    other = gate.gate(None, key=SigningKey.generate().public)
    with pytest.raises(PeerError) as caught:
        other.check_known()
    assert caught.value.code is Code.BROKER_UNTRUSTED


def test_what_it_counts_is_told_on_its_own_socket_and_to_no_stranger(gate: LocalBroker) -> None:
    told = request(gate.client()._url, "GET", "/metrics").content().decode()
    assert "glasshouse_releases 0\n" in told
    assert all(line.rpartition(" ")[2].isdigit() for line in told.splitlines())
    assert send(gate, None, "/metrics").status == 404


def test_who_is_not_enrolled_gets_one_answer_to_everything(gate: LocalBroker) -> None:
    stranger = SigningKey.generate()
    replies = [send(gate, authorization) for authorization in (None, "Glasshouse x", signed(gate, stranger))]
    assert {reply.status for reply in replies} == {401}
    assert len({reply.body for reply in replies}) == 1
    assert gate.count("owners") == 0


def test_a_recorded_request_is_taken_once_also_across_restarts(tmp_path: Path) -> None:
    with LocalBroker(tmp_path, owners=(ALICE.public,)) as gate:
        recorded = signed(gate)
        assert send(gate, recorded).problem().code is Code.RUN_UNKNOWN
        assert send(gate, recorded).problem().code is Code.OWNER_STALE
    with LocalBroker(tmp_path, owners=(ALICE.public,)) as gate:
        assert send(gate, recorded).problem().code is Code.OWNER_STALE
        gate.advance(3600)
        assert send(gate, recorded).problem().code is Code.OWNER_STALE


def test_the_body_of_a_stranger_is_not_waited_for(gate: LocalBroker) -> None:
    head = (
        b"POST /v1/deployments HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 200000\r\n\r\n"
    )
    with line(gate).connect() as connection:
        connection.settimeout(10)
        connection.sendall(head)
        answer = b""
        with contextlib.suppress(ssl.SSLError, ConnectionResetError):
            while part := connection.recv(65536):
                answer += part
    assert Problem.parse(answer.partition(b"\r\n\r\n")[2]).code is Code.OWNER_REQUEST


def test_another_certificate_than_the_pinned_one_is_told_nothing(gate: LocalBroker, tmp_path: Path) -> None:
    other = Certificate(tmp_path / "other.pem")
    wrong = GateLine(url=gate.gate_url, certificate=other.sha256.hex())
    client = GateClient(gate.gate_url, wrong.connect, gate.broker_public, ALICE)
    with pytest.raises(PeerError) as caught:
        client.run("ab" * 16)
    assert caught.value.code is Code.BROKER_UNTRUSTED
    assert gate.count("owners") == 0
    unpinned = GateLine(url=gate.gate_url, certificate=None)
    with pytest.raises(ssl.SSLCertVerificationError):
        unpinned.connect()


def test_nothing_older_than_tls_1_3_is_spoken(gate: LocalBroker) -> None:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    host, _, port = gate.gate_url.removeprefix("https://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as plain, pytest.raises(ssl.SSLError):
        context.wrap_socket(plain)


def test_those_who_never_shake_hands_give_way(gate: LocalBroker) -> None:
    host, _, port = gate.gate_url.removeprefix("https://").rpartition(":")
    with contextlib.ExitStack() as idle:
        held = [
            idle.enter_context(socket.create_connection((host, int(port)), timeout=10))
            for _ in range(MOST_OF_ADDRESS + 8)
        ]
        gate.gate(None).check_known()
        # The first were cut for those that came later.
        assert held[0].recv(1) == b""


def test_those_who_have_their_answer_and_do_not_hang_up_give_way(
    gate: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "_GOODBYE_S", 600)  # however slow the machine of the test is
    with contextlib.ExitStack() as held:
        for _ in range(MOST_OF_ADDRESS + 8):
            connection = held.enter_context(line(gate).connect())
            connection.settimeout(10)
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        gate.gate(None).check_known()


def test_connections_keep_little_memory_and_long_messages_still_pass(gate: LocalBroker) -> None:
    assert TlsProtocol.max_size * MOST_CONNECTIONS <= 8 * 1024 * 1024
    with pytest.raises(FormatError) as caught:
        gate.gate(ALICE)._send("POST", "/v1/launches", b'{"padding":"%b"}' % (b"x" * 200_000)).content()
    assert caught.value.code is Code.SCHEMA


def test_requests_that_overtake_each_other_are_made_again(gate: LocalBroker) -> None:
    ahead = GateClient(gate.gate_url, line(gate).connect, gate.broker_public, ALICE, lambda: clock_us() + 60 * 10**6)
    behind = gate.gate(ALICE)
    for client in (ahead, behind, ahead, behind):
        with pytest.raises(UsageError) as caught:
            client.run("ab" * 16)
        assert caught.value.code is Code.RUN_UNKNOWN


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_an_hour_off_is_named(gate: LocalBroker, hours: int) -> None:
    gate.advance(3600 * hours)
    client = GateClient(gate.gate_url, line(gate).connect, gate.broker_public, ALICE)
    with pytest.raises(RefusedError, match="clock") as caught:
        client.run("ab" * 16)
    assert caught.value.code is Code.OWNER_STALE


def test_a_certificate_is_made_once_and_refused_when_others_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / CERTIFICATE_NAME
    assert Certificate(path).sha256 == Certificate(path).sha256
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(UsageError, match="0640"):
        Certificate(path)
    path.chmod(0o600)
    path.write_bytes(b"nothing")
    with pytest.raises(UsageError, match="certificate"):
        Certificate(path)
