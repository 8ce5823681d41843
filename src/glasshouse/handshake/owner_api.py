"""What an owner and a gate that others use too sign for each other (spec/owner-api.md).

A request of an owner: by whom, for what, when and in which order. A deployment's policy, signed for one gate: who edits
that gate's database cannot change it. The head of an owner's audit log, signed by the gate: who keeps one notices when
the log is another later.

Laws: what is not signed by an owner who is enrolled is refused before anything of it is acted on, and every such
refusal is the same; a request is for one gate, one method, one target and one body; it is taken once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from glasshouse.attestation.policy import MAX_POLICY_BYTES, DeploymentPolicy
from glasshouse.errors import Code, FormatError, RefusedError
from glasshouse.wire import dsse, jwt
from glasshouse.wire.canonical import Json
from glasshouse.wire.crypto import SigningKey, key_id, sha256
from glasshouse.wire.record import Member, Record, Sha256, choice, integer, octets, text

AUDIT_HEAD_TYPE = "application/vnd.glasshouse.audit-head+json"
SIGNED_POLICY_TYPE = "application/vnd.glasshouse.deployment+json"
REQUEST_TYPE = "glasshouse-owner-request+jwt"
WINDOW_S = 300
_SCHEME = "Glasshouse "
_MAX_CHARS = 1024
_METHODS = ("GET", "POST", "PUT")
_TARGET = re.compile(r"/v1/[a-z0-9/]{1,160}(\?after=[0-9]{1,15})?")
_SECOND_US = 1_000_000


class StaleRequestError(RefusedError):
    """A request that an enrolled owner signed, and that comes too late, too early or not in order; in microseconds."""

    def __init__(self, message: str, *, expected: int, actual: int) -> None:
        super().__init__(Code.OWNER_STALE, message, hint="set the clock that is wrong: timedatectl set-ntp true")
        self.expected = str(expected)
        self.actual = str(actual)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Claims(Record, name="owner request"):
    """The claims of the token, but for `aud`."""

    issued_s: Annotated[int, Member("iat")]
    ends_s: Annotated[int, Member("exp")]
    serial_us: int
    method: Annotated[str, choice(_METHODS)]
    target: Annotated[str, text()]
    body_sha256: Sha256


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnerRequest:
    """What was asked for, and by which owner."""

    owner: bytes  # their public signing key
    body_sha256: bytes  # of the body that belongs to it
    serial_us: int  # when it was made; an owner's requests have it in ascending order, none twice


def sign_request(
    owner: SigningKey, *, gate_public: bytes, method: str, target: str, body: bytes, serial_us: int
) -> str:
    """Return the value of the ``Authorization`` field for one request.

    Args:
        target: path and query, as they stand in the request line.
        serial_us: the time in microseconds, and more than any before.

    Raises:
        ValueError: a method or target that no gate has.
    """
    if method not in _METHODS or not _TARGET.fullmatch(target):
        raise ValueError("a method or target that no gate has")
    issued_s = serial_us // _SECOND_US
    claims = _Claims(
        issued_s=issued_s,
        ends_s=issued_s + WINDOW_S,
        serial_us=serial_us,
        method=method,
        target=target,
        body_sha256=sha256(body),
    )
    return _SCHEME + jwt.issue(owner, typ=REQUEST_TYPE, claims=claims.to_json() | {"aud": key_id(gate_public)})


def authenticate(
    authorization: str | None,
    *,
    owners: Mapping[str, bytes],
    gate_public: bytes,
    method: str,
    target: str,
    now_us: int,
) -> OwnerRequest:
    """Make checks 1 to 5 of spec/owner-api.md, before anything of the body is read.

    Args:
        owners: public signing keys of those who are enrolled, by their key ids.

    Raises:
        RefusedError: `owner-request-invalid`, whatever it is that does not hold.
        StaleRequestError: `owner-request-stale`: signed, and of another time.
    """
    try:
        # 1: bounded, and of the one form.
        if authorization is None or len(authorization) > _MAX_CHARS or not authorization.startswith(_SCHEME):
            raise _invalid()
        token = jwt.parse(authorization.removeprefix(_SCHEME))
        # 2: nothing is computed for a key that is not enrolled.
        owner = owners.get(token.kid)
        if owner is None:
            raise _invalid()
        # 3: signature, type and gate.
        claims = _Claims.from_json(_verified(token, owner, gate_public, now_us))
    except FormatError:
        raise _invalid() from None
    if claims.ends_s != claims.issued_s + WINDOW_S or claims.serial_us // _SECOND_US != claims.issued_s:
        raise _invalid()
    # 5: this request and no other.
    if (claims.method, claims.target) != (method, target) or not _TARGET.fullmatch(target):
        raise _invalid()
    return OwnerRequest(owner=owner, body_sha256=claims.body_sha256, serial_us=claims.serial_us)


def _verified(token: jwt.Token, owner: bytes, gate_public: bytes, now_us: int) -> dict[str, Json]:
    """Make checks 3 and 4 on a token; its date is looked at only once its signature holds."""
    try:
        verified = token.verify(
            public=owner,
            typ=REQUEST_TYPE,
            audience=key_id(gate_public),
            now_s=now_us // _SECOND_US,
            early_s=WINDOW_S,
        )
    except FormatError as error:
        if error.code is not Code.TOKEN_EXPIRED:
            raise
        made_us = integer().read(token.claims.get("serial_us"), "owner request.serial_us")
        raise StaleRequestError(
            "the request was not made now: this clock and the gate's differ", expected=now_us, actual=made_us
        ) from None
    return {name: claim for name, claim in verified.items() if name != "aud"}


def check_body(request: OwnerRequest, body: bytes) -> None:
    """Make check 6: the body is the one that was signed; raises `RefusedError`, `owner-request-invalid`."""
    if sha256(body) != request.body_sha256:
        raise _invalid()


def check_serial(request: OwnerRequest, last_us: int) -> None:
    """Make check 7: the request is later than the last one of its owner that was taken.

    Raises:
        StaleRequestError: `owner-request-stale`: it was taken before, or a later one was.
    """
    if request.serial_us <= last_us:
        raise StaleRequestError(
            "this request, or a later one, was taken before", expected=last_us + 1, actual=request.serial_us
        )


def _invalid() -> RefusedError:
    return RefusedError(
        Code.OWNER_REQUEST,
        "not a request that an owner who is enrolled at this gate signed for it",
        hint="its operator enrols you: glasshouse broker serve --owner owner.pub",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SignedPolicy(dsse.Signed, name="signed policy", max_bytes=2 * MAX_POLICY_BYTES, payload_type=SIGNED_POLICY_TYPE):
    """A policy, of which package, at which gate; signed by the owner."""

    broker_public: Annotated[bytes, octets(32)]  # the gate's signing key
    manifest_sha256: Sha256  # of the package
    policy: DeploymentPolicy  # what a release demands


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditHead(dsse.Signed, name="audit head", max_bytes=2048, payload_type=AUDIT_HEAD_TYPE):
    """Where an owner's audit log ends, signed by the gate."""

    owner: Annotated[bytes, octets(32)]  # whose log it is, their public signing key
    records: int  # how many it has
    sha256: Sha256  # the hash of the last one, or 32 zero bytes
    time_us: int  # when the gate signed this
