"""The launch token: the broker's word that a launch key belongs to one run of one deployment.

A JWT of the type `glasshouse-launch+jwt`. On its own it gets nothing: the challenge request and the
evidence are signed by the launch key that its `cnf` names.
"""

from __future__ import annotations

from dataclasses import dataclass

from glasshouse.attestation.claims import ID_BYTES, ContainerSource
from glasshouse.attestation.confirmation import confirmation, confirmed_key
from glasshouse.errors import Code, FormatError
from glasshouse.wire import jwt, signing
from glasshouse.wire.canonical import Json
from glasshouse.wire.fields import IDENTIFIER, Fields
from glasshouse.wire.group import Group

__all__ = ["TOKEN_AUDIENCE", "TOKEN_TYPE", "TokenClaims", "issue_token", "parse_token", "parse_token_at_issue"]

TOKEN_TYPE = "glasshouse-launch+jwt"  # noqa: S105 — a media type
TOKEN_AUDIENCE = "glasshouse-broker"  # noqa: S105 — an audience
CLOCK_STEP_S = 60
"""How far a broker's clock may have stepped back since it issued a token, before the token is of another time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenClaims:
    """What a launch token says.

    Attributes:
        jti: the token's id, 32 hex characters.
        deployment, run_id: what is launched.
        package_id, manifest_sha256: the package that it may ask the key of.
        floor_sha256, policy_sha256: the demands it will be judged by.
        container_id, container_source: where it must run.
        launch_public: the key that must sign beside the token (`cnf`).
        issued_s, expires_s: validity, whole seconds.
        group: the ranks that it belongs to; None for an ordinary run, whose token has no such claim.
    """

    jti: str
    deployment: str
    run_id: str
    package_id: str
    manifest_sha256: bytes
    floor_sha256: bytes
    policy_sha256: bytes
    container_id: str
    container_source: ContainerSource
    launch_public: bytes
    issued_s: int
    expires_s: int
    group: Group | None = None

    def __post_init__(self) -> None:
        if not IDENTIFIER.fullmatch(self.container_id):
            raise FormatError(Code.SCHEMA, "token.container.id is not an identifier")


def issue_token(broker: signing.SigningKey, token: TokenClaims) -> str:
    """Return the signed compact token."""
    claims: dict[str, Json] = {
        "aud": TOKEN_AUDIENCE,
        "cnf": confirmation(token.launch_public),
        "container": {"id": token.container_id, "source": token.container_source.value},
        "deployment": token.deployment,
        "exp": token.expires_s,
        "floor_sha256": token.floor_sha256.hex(),
        "iat": token.issued_s,
        "iss": broker.key_id,
        "jti": token.jti,
        "manifest_sha256": token.manifest_sha256.hex(),
        "package_id": token.package_id,
        "policy_sha256": token.policy_sha256.hex(),
        "run_id": token.run_id,
    }
    if token.group is not None:
        claims["group"] = token.group.to_json()
    return jwt.issue(broker, typ=TOKEN_TYPE, claims=claims)


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
    fields = Fields(dict(claims), "token")
    fields.text("aud", max_chars=64)
    fields.choice("iss", [signing.key_id(broker_public)])
    container = fields.child("container")
    parsed = TokenClaims(
        jti=fields.digest("jti", length=ID_BYTES).hex(),
        deployment=fields.digest("deployment", length=ID_BYTES).hex(),
        run_id=fields.digest("run_id", length=ID_BYTES).hex(),
        package_id=fields.digest("package_id", length=ID_BYTES).hex(),
        manifest_sha256=fields.digest("manifest_sha256"),
        floor_sha256=fields.digest("floor_sha256"),
        policy_sha256=fields.digest("policy_sha256"),
        container_id=container.identifier("id"),
        container_source=ContainerSource(container.choice("source", list(ContainerSource))),
        launch_public=confirmed_key(fields),
        issued_s=fields.integer("iat"),
        expires_s=fields.integer("exp"),
        group=Group.from_json(fields.any("group")) if fields.has("group") else None,
    )
    container.end()
    fields.end()
    return parsed
