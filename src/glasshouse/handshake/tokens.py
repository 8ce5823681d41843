"""The launch token: the broker's statement that a launch key belongs to one run of one deployment.

A JWT of the type `glasshouse-launch+jwt`. On its own it gets nothing: the challenge request and the
evidence are signed by the launch key that its `cnf` names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from glasshouse.attestation.claims import CONFIRMATION, Confirmed, ContainerSource
from glasshouse.errors import Code, FormatError
from glasshouse.wire import jwt
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.group import Group
from glasshouse.wire.record import IDENTIFIER, LEFT_OUT, Id, Identifier, Member, Record, Sha256

TOKEN_TYPE = "glasshouse-launch+jwt"  # noqa: S105 — a media type
TOKEN_AUDIENCE = "glasshouse-broker"  # noqa: S105 — an audience
CLOCK_STEP_S = 60
"""How far a broker's clock may have stepped back since it issued a token, before the token is of another time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenClaims(Record, name="token", constants=CONFIRMATION):
    """The claims of a launch token, but for `aud` and `iss`."""

    jti: Id  # the token's own
    # What is launched.
    deployment: Id
    run_id: Id
    # The package that it may ask the key of.
    package_id: Id
    manifest_sha256: Sha256
    # The demands that it will be judged by.
    floor_sha256: Sha256
    policy_sha256: Sha256
    # Where it must run.
    container_id: Annotated[Identifier, Member("container", "id")]
    container_source: Annotated[ContainerSource, Member("container", "source")]
    launch_public: Confirmed  # the key that must sign beside the token
    # Validity, whole seconds.
    issued_s: Annotated[int, Member("iat")]
    expires_s: Annotated[int, Member("exp")]
    group: Annotated[Group | None, LEFT_OUT] = None  # the ranks that it belongs to; left out for an ordinary run

    def __post_init__(self) -> None:
        if not IDENTIFIER.fullmatch(self.container_id):
            raise FormatError(Code.SCHEMA, "token.container.id is not an identifier")


def issue_token(broker: SigningKey, token: TokenClaims) -> str:
    """Return the signed compact token."""
    parties = {"aud": TOKEN_AUDIENCE, "iss": broker.key_id}
    return jwt.issue(broker, typ=TOKEN_TYPE, claims=token.to_json() | parties)


def parse_token(text: str, *, broker_public: bytes, now_us: int) -> TokenClaims:
    """Parse and verify a launch token at a time: signature, type, audience, validity, schema.

    Raises:
        FormatError: `wrong-type`, `signature-invalid`, `token-claim-mismatch`, `token-expired`,
            `schema-invalid`, `too-large` or `not-canonical`.
    """
    return _verified(jwt.parse(text), broker_public, now_us // 1_000_000)


def parse_token_at_issue(text: str, *, broker_public: bytes) -> TokenClaims:
    """Parse and verify a launch token as of the second in which it was issued.

    For a runtime reading its own launch file by a clock that nothing vouches for; the broker judges
    expiry by its own.

    Raises:
        FormatError: as `parse_token`.
    """
    token = jwt.parse(text)
    issued = token.claims.get("iat")
    return _verified(token, broker_public, issued if isinstance(issued, int) else -1)


def _verified(token: jwt.Token, broker_public: bytes, now_s: int) -> TokenClaims:
    claims = token.verify(
        public=broker_public, typ=TOKEN_TYPE, audience=TOKEN_AUDIENCE, now_s=now_s, early_s=CLOCK_STEP_S
    )
    return TokenClaims.from_json(jwt.stated(claims, issuer=broker_public))
