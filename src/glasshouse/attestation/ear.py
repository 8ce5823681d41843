"""The attestation result: an EAR (draft-ietf-rats-ear-04) as a JWT of the type `ear+jwt`.

Laws: at the level `software` the status is `warning`, and no claim is made about hardware or
instance identity; a result that claims more is refused by its parser, whichever key signed it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from glasshouse import __version__
from glasshouse.attestation.claims import CONFIRMATION, NONCE_BYTES, Confirmed
from glasshouse.attestation.roots.appraised import ASPECTS, SOFTWARE_VECTOR, EarStatus, status_of
from glasshouse.errors import Code, FormatError
from glasshouse.wire import jwt
from glasshouse.wire.crypto import SigningKey, key_id
from glasshouse.wire.lines.line_start import LineStart
from glasshouse.wire.policy import Assurance, Profile
from glasshouse.wire.record import LEFT_OUT, Id, Member, Record, Sha256, choice, integer, octets, table, text

EAR_TYPE = "ear+jwt"
EAR_PROFILE = "tag:ietf.org,2026:rats/ear#04"
_DEVELOPER = "glasshouse"
_POLICY_PREFIX = "urn:glasshouse:policy:sha256:"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ear(
    Record,
    name="ear",
    constants={**CONFIRMATION, "eat_profile": EAR_PROFILE, "ear_verifier_id": {"developer": _DEVELOPER}},
    derived={
        ("submods", "runtime", "ear_appraisal_policy_ids"): "policy_ids",
        ("submods", "runtime", "ear_status"): "status",
    },
):
    """The broker's verdict on one piece of evidence.

    Law: ``Ear.parse_token(e.issue(k), ...) == e`` while it is valid.
    """

    # Validity, whole seconds.
    issued_s: Annotated[int, Member("iat")]
    expires_s: Annotated[int, Member("exp")]
    nonce: Annotated[bytes, octets(NONCE_BYTES), Member("eat_nonce")]  # the challenge's
    evidence_public: Confirmed  # the key that the verdict is about and for; `aud` is its key id
    # What was released to.
    deployment: Annotated[Id, Member("glasshouse", "deployment")]
    run_id: Annotated[Id, Member("glasshouse", "run_id")]
    # What was judged, and by what.
    manifest_sha256: Annotated[Sha256, Member("glasshouse", "manifest_sha256")]
    floor_sha256: Annotated[Sha256, Member("glasshouse", "floor_sha256")]
    policy_sha256: Annotated[Sha256, Member("glasshouse", "policy_sha256")]
    evidence_sha256: Annotated[Sha256, Member("glasshouse", "evidence_sha256")]
    assurance: Annotated[Assurance, Member("glasshouse", "assurance")]  # that the evidence proved
    profile: Annotated[Profile, Member("glasshouse", "profile")]  # the hardening that it showed
    status: Annotated[EarStatus, Member("ear_status")]  # the overall tier
    # AR4SI trustworthiness claims.
    vector: Annotated[
        Mapping[str, int],
        table(len(ASPECTS), choice(ASPECTS), integer(-128, 127)),
        Member("submods", "runtime", "ear_trustworthiness_vector"),
    ]
    # The policy's limits, for the runtime.
    lease_s: Annotated[int, integer(1), Member("glasshouse", "lease_s")]
    max_duration_s: Annotated[int, integer(1), Member("glasshouse", "max_duration_s")]
    # The leg that was released; left out for a run of no line.
    line: Annotated[LineStart | None, Member("glasshouse", "line"), LEFT_OUT] = None
    build: Annotated[str, text(64), Member("ear_verifier_id", "build")] = __version__  # the verifier's version

    def __post_init__(self) -> None:
        if not self.vector or not self.vector.keys() <= set(ASPECTS):
            raise FormatError(Code.SCHEMA, "a trustworthiness vector that is empty or has an aspect that AR4SI lacks")
        if self.status is not status_of(self.vector):
            raise FormatError(Code.SCHEMA, "an attestation result whose status is not that of its vector")
        if self.assurance is Assurance.SOFTWARE and dict(self.vector) != dict(SOFTWARE_VECTOR):
            # The threat model's promise: software evidence never looks like hardware evidence.
            raise FormatError(Code.SCHEMA, "a software attestation result that claims more than software can show")
        if self.line is not None and (self.line.previous is None) != (self.line.leg == 1):
            raise FormatError(Code.SCHEMA, "a leg without the holder of the one before, or a first one with it")

    @property
    def policy_ids(self) -> list[str]:
        """The policy as an EAR names it."""
        return [_POLICY_PREFIX + self.policy_sha256.hex()]

    def issue(self, broker: SigningKey) -> str:
        """Return the signed token."""
        parties = {"aud": key_id(self.evidence_public), "iss": broker.key_id}
        return jwt.issue(broker, typ=EAR_TYPE, claims=self.to_json() | parties)

    @classmethod
    def parse_token(
        cls, text: str, *, broker_public: bytes, evidence_public: bytes, now_us: int, leeway_s: int = 0
    ) -> Ear:
        """Parse and verify a token: signed by this broker, about and for this evidence key, valid at this time.

        Args:
            leeway_s: by how much the caller's clock may be off.

        Raises:
            FormatError: `wrong-type`, `signature-invalid`, `token-claim-mismatch`, `token-expired`,
                `schema-invalid`, `too-large` or `not-canonical`.
        """
        token = jwt.parse(text)
        claims = token.verify(
            public=broker_public,
            typ=EAR_TYPE,
            audience=key_id(evidence_public),
            now_s=now_us // 1_000_000,
            leeway_s=leeway_s,
        )
        ear = cls.from_json(jwt.stated(claims, issuer=broker_public))
        if ear.evidence_public != evidence_public:
            raise FormatError(Code.TOKEN_CLAIM, "an attestation result about another evidence key")
        return ear
