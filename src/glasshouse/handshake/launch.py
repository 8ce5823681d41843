"""The launch file: what placement hands to the rented machine, by standard input or a 0600 file.

It holds a secret, the launch key's seed; nothing here prints it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated

from glasshouse.attestation.claims import ContainerSource
from glasshouse.errors import Code, FormatError
from glasshouse.handshake.delegation import Delegation, Use
from glasshouse.handshake.tokens import TokenClaims, parse_token_at_issue
from glasshouse.wire import dsse, jwt
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.policy import Profile
from glasshouse.wire.record import IDENTIFIER, Id, Identifier, Member, Record, octets, text

MAX_LAUNCH_BYTES = 64 * 1024
_URL = re.compile(r"http://[A-Za-z0-9.\[\]:-]{1,255}:[0-9]{1,5}|unix:/[\x21-\x7e]{1,107}")


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

    def __post_init__(self) -> None:
        if not _URL.fullmatch(self.broker_url):
            raise FormatError(Code.SCHEMA, "launch.broker_url is not http://host:port or unix:/path")
        if len(self.launch_seed) != 32 or len(self.broker_public) != 32:
            raise FormatError(Code.SCHEMA, "a launch file with keys of the wrong length")
        if not IDENTIFIER.fullmatch(self.container_id) or self.profile is Profile.OFF:
            raise FormatError(Code.SCHEMA, "a launch file without a container or without hardening")

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
            FormatError: as `tokens.parse_token`.
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
