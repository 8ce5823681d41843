"""The owner's client: plain HTTP over the broker's 0600 Unix socket."""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.attestation.roots.collateral import Pack
from glasshouse.broker.http_api import (
    CollateralRequest,
    DelegationRequest,
    DeploymentRequest,
    ForgetRequest,
    GroupRefusal,
    GroupRequest,
    LaunchRequest,
    LegLostRequest,
    LineView,
    Problem,
    RevocationRequest,
    StoredFiles,
)
from glasshouse.errors import Code, FormatError, PeerError
from glasshouse.wire.canonical import Json, b64decode, decode
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.group import Group
from glasshouse.wire.record import Record

_TIMEOUT_S = 30.0
_MAX_REPLY_BYTES = 4 * 1024 * 1024
_MAX_ENVELOPE_BYTES = 1024 * 1024

Kind = TypeVar("Kind")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A status and a body, unread."""

    status: int
    body: bytes

    def content(self) -> bytes:
        """Return a good reply's body.

        Raises:
            GlasshouseError: the exception of the broker's problem document.
            PeerError: `broker-protocol` for anything else.
        """
        if self.status == 200:
            return self.body
        raise self.problem().to_error()

    def problem(self) -> Problem:
        """Return what went wrong.

        Raises:
            PeerError: `broker-unreachable` when the broker is too busy, `broker-protocol` when the reply is
                not a problem document.
        """
        try:
            return Problem.parse(self.body)
        except FormatError:
            busy = self.status == HTTPStatus.SERVICE_UNAVAILABLE  # answered before the request reaches any handler
            code = Code.BROKER_UNREACHABLE if busy else Code.BROKER_PROTOCOL
            raise PeerError(code, f"the broker answered HTTP {self.status} without a reason") from None


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def request(url: str, method: str, path: str, body: bytes | None = None) -> Reply:
    """Send one request.

    Args:
        url: ``http://host:port`` or ``unix:/path``.

    Raises:
        PeerError: `broker-unreachable` when no whole answer came, `broker-protocol` for one that is too long.
    """
    if url.startswith("unix:"):
        connection: http.client.HTTPConnection = _UnixConnection(url.removeprefix("unix:"))
    else:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=_TIMEOUT_S)
    return exchange(connection, url, method, path, body)


def exchange(
    connection: http.client.HTTPConnection,
    url: str,
    method: str,
    path: str,
    body: bytes | None,
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """Send one request over a connection of its own, and close it; arguments and errors as of `request`."""
    named = {"Content-Type": "application/json", "Connection": "close", **(headers or {})}
    try:
        connection.request(method, path, body, named)
        response = connection.getresponse()
        reply = Reply(status=response.status, body=response.read(_MAX_REPLY_BYTES + 1))
    except ssl.SSLCertVerificationError as error:
        raise another_gate(url, "certificate") from error
    except (OSError, http.client.HTTPException) as error:
        raise PeerError(
            Code.BROKER_UNREACHABLE,
            f"the broker at {url} does not answer ({type(error).__name__})",
            hint="is it running? glasshouse broker serve",
        ) from error
    finally:
        connection.close()
    if len(reply.body) > _MAX_REPLY_BYTES:
        raise PeerError(Code.BROKER_PROTOCOL, "an answer that is too long")
    return reply


def another_gate(url: str, what: str) -> PeerError:
    """Return the error of a gate whose key or certificate is not the pinned one."""
    return PeerError(
        Code.BROKER_UNTRUSTED,
        f"what answers at {url} is not the gate that was added: its {what} is another",
        hint="ask who runs it; if it has a new one: glasshouse gate add --force",
    )


class OwnerClient:
    """Calls the broker with what only its owner may request.

    Every method raises `PeerError` when the broker is away, and the broker's own refusal as the exception of its code.
    """

    def __init__(self, socket_path: Path | str) -> None:
        self._url = f"unix:{socket_path}"

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the broker answers.

        Raises:
            PeerError: `broker-unreachable` when it does not within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.broker_public()
            except PeerError as error:
                if error.code is not Code.BROKER_UNREACHABLE or time.monotonic() >= deadline:
                    raise
                time.sleep(0.02)
            else:
                return

    def broker_public(self) -> bytes:
        """Return the key that the owner delegates to."""
        return b64decode(_member(self._ask("GET", "/v1/broker"), "broker_public", str))

    def store_public(self) -> bytes | None:
        """Return the key of its store of checkpoints, for the owner's delegation; None where it keeps none."""
        answer = self._ask("GET", "/v1/broker")
        return b64decode(_member(answer, "store_public", str)) if "store_public" in answer else None

    def put_delegation(self, delegation: Envelope, owner_public: bytes) -> int:
        """Give the broker the owner's signed delegation; return the serial of the one that it keeps: a newer stays."""
        request = DelegationRequest(delegation=delegation, owner=owner_public)
        return _member(self._ask("PUT", "/v1/delegation", request), "serial_us", int)

    def put_collateral(self, pack: Pack, owner_public: bytes) -> str:
        """Give the broker the owner's collateral pack in the place of the last; return its digest, in hexadecimal."""
        request = CollateralRequest(collateral=pack, owner=owner_public)
        return _member(self._ask("POST", "/v1/collateral", request), "collateral_sha256", str)

    def add_deployment(self, manifest_envelope: bytes, package_key: bytes, policy: DeploymentPolicy) -> str:
        """Give the broker a package's signed manifest, its key and a policy; return the deployment's id."""
        policy_json = self._policy(manifest_envelope, policy)
        manifest = Envelope.parse(manifest_envelope, max_bytes=_MAX_ENVELOPE_BYTES)
        request = DeploymentRequest(manifest=manifest, package_key=package_key, policy=policy_json)
        return _member(self._ask("POST", "/v1/deployments", request), "deployment", str)

    def add_launch(self, request: LaunchRequest) -> str:
        """Record a launch and return its token."""
        return _member(self._ask("POST", "/v1/launches", request), "token", str)

    def add_group(self, deployment: str, *, machines: int, ranks: int) -> tuple[Group, ...]:
        """Announce a group; return the place of each of its machines, in order."""
        request = GroupRequest(deployment=deployment, machines=machines, ranks=ranks)
        text = _member(self._ask("POST", "/v1/groups", request), "group", str)
        try:
            places = range(machines)
            return tuple(Group(id=bytes.fromhex(text), machines=machines, machine=m, ranks=ranks) for m in places)
        except ValueError:
            raise PeerError(Code.BROKER_PROTOCOL, "an answer without the id of a group") from None

    def refuse_group(self, group_id: bytes, *, machine: int, code: Code) -> dict[str, Json]:
        """Report that a machine of a group has ended: no release is made to those that still wait."""
        return self._ask("POST", f"/v1/groups/{group_id.hex()}/refuse", GroupRefusal(code=code, machine=machine))

    def group(self, group_id: bytes) -> dict[str, Json]:
        """Return how a group stands."""
        return self._ask("GET", f"/v1/groups/{group_id.hex()}")

    def line(self, line: bytes) -> LineView:
        """Return how a line stands."""
        return _line_in(self._ask("GET", f"/v1/lines/{line.hex()}"))

    def leg_lost(self, line: bytes, lost: Envelope) -> LineView:
        """Report with a signed `LegLost` that a leg's machines do not exist any more; return how its line stands."""
        return _line_in(self._ask("POST", f"/v1/lines/{line.hex()}/lost", LegLostRequest(lost=lost)))

    def revoke(self, package_id: str, *, running: bool = False) -> dict[str, Json]:
        """Have a package's key released never again; with `running`, have its runs' leases run out too."""
        return self._ask("POST", f"/v1/packages/{package_id}/revoke", RevocationRequest(running=running))

    def deployment(self, deployment: str) -> dict[str, Json]:
        """Return a deployment's counters and standing."""
        return self._ask("GET", f"/v1/deployments/{deployment}")

    def run(self, run_id: str) -> dict[str, Json]:
        """Return what a run last reported, and whether it is lost."""
        return self._ask("GET", f"/v1/runs/{run_id}")

    def stores(self) -> bool:
        """Return whether this broker keeps what runs leave (spec/owner-api.md section 7)."""
        return self._ask("GET", "/v1/broker").get("store") is True

    def stored(self, run_id: str) -> dict[str, tuple[int, bytes]]:
        """Return what of a run is stored whole: size and SHA-256 by name; nothing where this broker keeps nothing."""
        if not self.stores():
            return {}
        try:
            listed = StoredFiles.from_json(self._ask("GET", f"/v1/runs/{run_id}/stored"))
        except FormatError as error:
            raise PeerError(Code.BROKER_PROTOCOL, f"an answer that is no list of files: {error.message}") from None
        return {file.name: (file.bytes, file.sha256) for file in listed.files}

    def stored_piece(self, run_id: str, sha256: bytes, after: int) -> bytes:
        """Return bytes of a stored file from the n-th on; none at its end."""
        answer = self._ask("GET", f"/v1/runs/{run_id}/stored/{sha256.hex()}?after={after}")
        try:
            return b64decode(_member(answer, "data", str))
        except FormatError:
            raise PeerError(Code.BROKER_PROTOCOL, "an answer without bytes of a file") from None

    def forget_stored(self, run_id: str) -> int:
        """Have nothing of a run stored any more; return how many files were."""
        return _member(self._ask("POST", f"/v1/runs/{run_id}/stored/forget", ForgetRequest()), "forgotten", int)

    def audit(self, after: int = 0) -> list[Json]:
        """Return a page of audit records with numbers greater than `after`."""
        return self._page(after)[0]

    def _page(self, after: int) -> tuple[list[Json], Json]:
        """Return a page of audit records, and the signed head that came with it."""
        answer = self._ask("GET", f"/v1/audit?after={after}")
        return _member(answer, "records", list), answer.get("head")

    def _policy(self, _manifest_envelope: bytes, policy: DeploymentPolicy) -> Json:
        """Return a policy as this broker takes it."""
        return policy.to_json()

    def _ask(self, method: str, path: str, value: Record | None = None) -> dict[str, Json]:
        content = self._send(method, path, None if value is None else value.encode()).content()
        try:
            answer = decode(content, max_bytes=_MAX_REPLY_BYTES)
        except FormatError:
            answer = None
        if not isinstance(answer, dict):
            raise PeerError(Code.BROKER_PROTOCOL, "an answer that is no JSON object")
        return answer

    def _send(self, method: str, path: str, body: bytes | None) -> Reply:
        return request(self._url, method, path, body)


def _line_in(answer: dict[str, Json]) -> LineView:
    try:
        return LineView.from_json(answer)
    except FormatError as error:
        raise PeerError(Code.BROKER_PROTOCOL, f"an answer that is no line: {error.message}") from None


def _member(answer: Mapping[str, Json], name: str, kind: type[Kind]) -> Kind:
    value = answer.get(name)
    if not isinstance(value, kind):
        raise PeerError(Code.BROKER_PROTOCOL, f"an answer without {name}")
    return value
