"""A runtime with hardware whose evidence is any bytes, and a kind whose appraiser only writes down what it is asked."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from glasshouse.attestation.detached import LENGTH_BYTES
from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots import root_table
from glasshouse.attestation.roots.appraised import Appraised, Blob
from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.collateral import Pack
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.attestation.roots.tpm.tpm_policy import TpmPolicy
from glasshouse.broker.decide import challenges
from glasshouse.broker.http_api import Problem
from glasshouse.errors import Code
from glasshouse.handshake.messages import Challenge, TpmKeys
from glasshouse.handshake.runtime_side import with_blobs
from glasshouse.tamper.stage import Actor
from glasshouse.wire.canonical import Json
from glasshouse.wire.policy import Assurance
from simulators.local_broker import LocalBroker
from tools.raw_http import head

KEYS = TpmKeys(ak=b"attestation key", ek=b"endorsement key")
GENUINE = {"hardware": 2, "instance-identity": 2}
POLICY = HardwarePolicy(
    tpm=TpmPolicy(aks=("000b" + "ab" * 32,), chain="image", pcrs=dict.fromkeys("024789", (bytes(32),)))
)


@dataclass
class Shelf:
    """What the appraiser was asked, and what it answers."""

    asked: list[tuple[bytes, Bound, Pack]] = field(default_factory=list)
    secrets: list[bytes] = field(default_factory=list)  # of credentials
    not_after_us: int = 2**53 - 1
    refusal: Code | None = None
    claims: Mapping[str, Json] = field(default_factory=dict)

    def appraise(
        self, blob: bytes, *, bound: Bound, now_us: int, collateral: Pack, policy: HardwarePolicy
    ) -> Appraised:
        assert policy == POLICY
        assert now_us > 0
        self.asked.append((blob, bound, collateral))
        if self.refusal is not None:
            raise CheckFailedError("12", self.refusal, "as the story wants it")
        return Appraised(vector=GENUINE, not_after_us=self.not_after_us, claims=self.claims)

    def credential(self, ak: bytes, ek: bytes, secret: bytes, *, policy: TpmPolicy, now_us: int) -> bytes | None:
        assert (ak, policy) == (KEYS.ak, POLICY.tpm)
        assert now_us > 0
        if ek != KEYS.ek:
            raise CheckFailedError("12", Code.TPM_ENDORSEMENT, "another endorsement key")
        self.secrets.append(secret)
        return b"credential"


def registered(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """Put the kind in the place of a TPM's."""
    shelf = Shelf()
    monkeypatch.setattr(root_table, "_appraiser", lambda _kind: shelf.appraise)
    monkeypatch.setattr(challenges, "credential_for", shelf.credential)
    return shelf


def evidence(actor: Actor, challenge: Challenge, *blobs: bytes, level: Assurance = Assurance.TPM) -> bytes:
    """Return the envelope of evidence at a level that a TPM proves."""
    named = [Blob.of("tpm", blob) for blob in blobs]
    return actor.sign(replace(actor.claims(challenge), assurance=level), named)


def framed(envelope: bytes, rest: bytes) -> bytes:
    return with_blobs(envelope, [rest])


def first_of(message: bytes) -> int:
    """Return how many bytes of a body in two parts are the first."""
    return LENGTH_BYTES + int.from_bytes(message[:LENGTH_BYTES])


def post(broker: LocalBroker, body: bytes, *, length: int | None = None, tls: bool = False) -> tuple[int, bytes]:
    """Send evidence as far as it is taken, and return status and body of the answer."""
    start = head("/v1/evidence", "Content-Type: application/json", f"Content-Length: {length or len(body)}")
    host, _, port = (broker.gate_url if tls else broker.runtime_url).rpartition("//")[2].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as plain:
        connection: socket.socket = plain
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection = context.wrap_socket(plain)
        connection.settimeout(0.1)
        rest = memoryview(start + body)
        with connection:
            with contextlib.suppress(TimeoutError):  # nothing more is read of it
                while rest:
                    rest = rest[connection.send(rest[:65536]) :]
            connection.settimeout(10)
            return _answer(connection)


def _answer(connection: socket.socket) -> tuple[int, bytes]:
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(65536) or b"\r\n\r\n"
    top, _, body = received.partition(b"\r\n\r\n")
    lines: Sequence[bytes] = top.split(b"\r\n")
    size = next(int(line[16:]) for line in lines if line.startswith(b"content-length: "))
    while len(body) < size:
        body += connection.recv(65536)
    return int(lines[0].split(b" ")[1]), body


def refusal(answer: tuple[int, bytes]) -> Code:
    """Return why something was refused."""
    assert answer[0] != 200
    return Problem.parse(answer[1]).code
