"""The owner's client of a gate that is reached over the network: each request is signed (spec/owner-api.md)."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Callable

from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.broker.client.owner_client import OwnerClient, Reply, another_gate, exchange
from glasshouse.broker.http_api import GENESIS, verify_chain
from glasshouse.errors import Code, UsageError, VerificationError
from glasshouse.handshake.owner_api import WINDOW_S, AuditHead, SignedPolicy, sign_request
from glasshouse.package.manifest import parse_signed
from glasshouse.wire.canonical import Json
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.dsse import Envelope

_TRIES = 5
_TIMEOUT_S = 30.0


class _GateConnection(http.client.HTTPConnection):
    """A request over a connection that the caller makes."""

    def __init__(self, host: str, connect: Callable[[], socket.socket]) -> None:
        super().__init__(host)
        self._connect = connect

    def connect(self) -> None:
        self.sock = self._connect()
        self.sock.settimeout(_TIMEOUT_S)


class GateClient(OwnerClient):
    """Calls a gate that several owners share.

    Args:
        url: of the gate, for errors and the Host field.
        connect: returns a connection to it whose other end was checked to be it.
        owner: signs the requests; None for requests that need no signature.
    """

    def __init__(
        self,
        url: str,
        connect: Callable[[], socket.socket],
        gate_public: bytes,
        owner: SigningKey | None,
        clock_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self._url = url
        self._connect = connect
        self._public = gate_public
        self._owner = owner
        self._clock_us = clock_us
        self._last_us = 0

    def _policy(self, manifest_envelope: bytes, policy: DeploymentPolicy) -> Json:
        if self._owner is None:
            raise UsageError(Code.IDENTITY, "a policy for a gate is signed by its owner, who is not here")
        manifest_sha256 = parse_signed(manifest_envelope, self._owner.public).sha256
        signed = SignedPolicy(broker_public=self._public, manifest_sha256=manifest_sha256, policy=policy)
        return signed.sign(self._owner).to_json()

    def _send(self, method: str, path: str, body: bytes | None) -> Reply:
        """Send a request; sign it again where a later one of the same owner overtook it on its way."""
        for _ in range(_TRIES):
            reply = self._once(method, path, body)
            if self._owner is None or not self._overtaken(reply):
                break
        return reply

    def _once(self, method: str, path: str, body: bytes | None) -> Reply:
        headers = {}
        if self._owner is not None:
            self._last_us = max(self._clock_us(), self._last_us + 1)
            headers["Authorization"] = sign_request(
                self._owner,
                gate_public=self._public,
                method=method,
                target=path,
                body=body or b"",
                serial_us=self._last_us,
            )
        host = self._url.removeprefix("https://").rstrip("/")
        return exchange(_GateConnection(host, self._connect), self._url, method, path, body, headers)

    def _overtaken(self, reply: Reply) -> bool:
        """Return whether a request came out of order, and could come again; its successor has a later time."""
        if reply.status != http.HTTPStatus.CONFLICT:
            return False
        problem = reply.problem()
        if problem.code is not Code.OWNER_STALE or not problem.expected.isdigit():
            return False
        expected_us = int(problem.expected[:16])
        if expected_us <= self._last_us or expected_us > self._clock_us() + WINDOW_S * 1_000_000:
            return False
        self._last_us = expected_us - 1
        return True

    def own_audit(
        self, *, kept: tuple[int, bytes] = (0, GENESIS), newer: bool = False
    ) -> tuple[list[Json], tuple[int, bytes]]:
        """Return all records of this owner's audit log, verified, and number and hash of the last.

        Args:
            kept: what an earlier call returned so.
            newer: whether to request only the records after that, which follow it or do not hold.

        Raises:
            FormatError: a head that the gate did not sign.
            VerificationError: `log-invalid`: records that do not follow each other or do not lead to the signed head,
                or a log that is not the one of which a head was kept.
        """
        owner = b"" if self._owner is None else self._owner.public
        records: list[Json] = []
        (number, sha256), seen = kept if newer else (0, GENESIS), newer or kept[0] == 0
        while True:
            page, signed = self._page(number)
            head = AuditHead.from_envelope(Envelope.from_json(signed), self._public)
            for record in page:
                sha256, number = verify_chain([record], previous=sha256, sequence=number), number + 1
                seen = seen or (number, sha256) == kept
            records += page
            if not page or number >= head.records:
                break
        leads = (head.owner, head.records, head.sha256) == (owner, number, sha256)
        if not leads and not newer:
            raise VerificationError(Code.LOG_INVALID, "the gate's audit log does not lead to the head that it signed")
        if not leads or not seen:
            raise VerificationError(
                Code.LOG_INVALID,
                f"the gate's audit log is not the one of which it showed {kept[0]} records before",
                hint="its database was edited, or an older one was put back: it lacks what was revoked since",
            )
        return records, (number, sha256)

    def check_known(self) -> None:
        """See that the gate answers, and that its key is the pinned one.

        Raises:
            PeerError: `broker-unreachable`, or `broker-untrusted` for another key.
        """
        if self.broker_public() != self._public:
            raise another_gate(self._url, "key")
