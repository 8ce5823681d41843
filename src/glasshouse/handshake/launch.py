"""A launch: the broker's token for it, and the file that placement hands to the rented machine.

The token, a JWT of the type `glasshouse-launch+jwt`, states that a launch key belongs to one run of one deployment. On
its own it gets nothing: challenge request and evidence are signed by the launch key that its `cnf` names. The file, by
standard input or 0600 on disk, holds a secret, the launch key's seed; nothing here prints it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated

from glasshouse.attestation.claims import CONFIRMATION, Confirmed, ContainerSource
from glasshouse.attestation.roots.kinds import KINDS
from glasshouse.attestation.roots.levels import level_of
from glasshouse.errors import Code, FormatError
from glasshouse.handshake.delegation import Delegation, Use
from glasshouse.wire import dsse, jwt
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.group import Group
from glasshouse.wire.lines.line_start import LineStart
from glasshouse.wire.policy import Assurance, Profile
from glasshouse.wire.record import (
    IDENTIFIER,
    LEFT_OUT,
    Id,
    Identifier,
    Member,
    Record,
    Sha256,
    choice,
    items,
    octets,
    text,
)

TOKEN_TYPE = "glasshouse-launch+jwt"  # noqa: S105 — a media type
TOKEN_AUDIENCE = "glasshouse-broker"  # noqa: S105 — an audience
CLOCK_STEP_S = 60
"""How far a broker's clock may have stepped back since it issued a token, before the token is of another time."""
MAX_LAUNCH_BYTES = 64 * 1024
_URL = re.compile(r"http://[A-Za-z0-9.\[\]:-]{1,255}:[0-9]{1,5}|unix:/[\x21-\x7e]{1,107}")


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
    line: Annotated[LineStart | None, LEFT_OUT] = None  # the leg that it begins; left out for a run of no line

    def __post_init__(self) -> None:
        if not IDENTIFIER.fullmatch(self.container_id):
            raise FormatError(Code.SCHEMA, "token.container.id is not an identifier")
        if self.line is not None and self.line.previous is not None:
            raise FormatError(Code.SCHEMA, "a token that names the holder of the leg before")


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


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchFile(Record, name="launch", max_bytes=MAX_LAUNCH_BYTES):
    """Everything a runtime starts from, beside the package."""

    token: Annotated[str, text(jwt.MAX_TOKEN_BYTES)] = field(repr=False)  # the launch token, compact
    launch_seed: Annotated[bytes, octets(32)] = field(repr=False)  # the launch key's private half
    broker_public: Annotated[bytes, octets(32)]  # pinned: the only broker whose answers count
    broker_url: Annotated[str, text(512)]  # ``http://host:port`` or ``unix:/path``; called, never trusted
    delegation: dsse.Envelope  # of the owner to that broker
    run_id: Id
    container_id: Annotated[Identifier, Member("container", "id")]
    container_source: Annotated[ContainerSource, Member("container", "source")]
    profile: Profile  # the hardening to reach and claim
    # The kinds of hardware evidence to collect, sorted; left out at the level `software`.
    hardware: Annotated[tuple[str, ...], items(len(KINDS), choice(KINDS)), LEFT_OUT] = ()

    def __post_init__(self) -> None:
        if not _URL.fullmatch(self.broker_url):
            raise FormatError(Code.SCHEMA, "launch.broker_url is not http://host:port or unix:/path")
        if len(self.launch_seed) != 32 or len(self.broker_public) != 32:
            raise FormatError(Code.SCHEMA, "a launch file with keys of the wrong length")
        if not IDENTIFIER.fullmatch(self.container_id) or self.profile is Profile.OFF:
            raise FormatError(Code.SCHEMA, "a launch file without a container or without hardening")
        if level_of(self.hardware) is None or list(self.hardware) != sorted(self.hardware):
            raise FormatError(Code.SCHEMA, "a launch file whose kinds of hardware complete no level")

    @property
    def assurance(self) -> Assurance:
        """The level that the kinds of hardware complete, which the runtime claims."""
        return level_of(self.hardware) or Assurance.SOFTWARE

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview) -> LaunchFile:  # type: ignore[override]  # no field apart
        """Inverse of `encode`; also checks that token, keys and binding belong together.

        Raises:
            FormatError: `too-large`, `not-canonical`, `schema-invalid`, `wrong-type`,
                `signature-invalid`, `token-key-mismatch` or `token-claim-mismatch`.
        """
        launch = super(LaunchFile, cls).parse(data)
        claims = launch.claims()
        if claims.launch_public != launch.key().public:
            raise FormatError(Code.TOKEN_KEY, "a launch file whose token is for another launch key")
        if (claims.run_id, claims.container_id, claims.container_source) != (
            launch.run_id,
            launch.container_id,
            launch.container_source,
        ):
            raise FormatError(Code.TOKEN_CLAIM, "a launch file whose token is for another run or container")
        return launch

    def key(self) -> SigningKey:
        """Return the launch key."""
        return SigningKey(self.launch_seed)

    def claims(self) -> TokenClaims:
        """Return the token's claims, signed by the pinned broker; expiry is the broker's to judge.

        Raises:
            FormatError: as `parse_token`.
        """
        return parse_token_at_issue(self.token, broker_public=self.broker_public)

    def check_delegation(self, *, owner_public: bytes, now_us: int, leeway_us: int) -> None:
        """Check that the package's owner delegated release to the pinned broker, by a clock that may be off a little.

        Raises:
            FormatError: as `Delegation.from_envelope`.
            VerificationError: `delegation-invalid`.
        """
        delegation = Delegation.from_envelope(self.delegation, owner_public)
        delegation.check(Use.RELEASE, broker_public=self.broker_public, at_us=now_us, leeway_us=leeway_us)
