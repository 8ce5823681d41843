"""The attestation result: an EAR (draft-ietf-rats-ear-04) as a JWT of the type `ear+jwt`.

Laws: at the level `software` the status is `warning`, and no claim is made about hardware or
instance identity; above it each kind of hardware evidence that the level wants has a submodule, and the overall status
is the worst of all. A result that claims more than its kinds is refused by its parser, whichever key signed it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from glasshouse import __version__
from glasshouse.attestation.claims import CONFIRMATION, NONCE_BYTES, Confirmed
from glasshouse.attestation.roots.appraised import (
    ASPECTS,
    CHAINED_VECTOR,
    SOFTWARE_VECTOR,
    EarStatus,
    status_of,
    worst_of,
)
from glasshouse.attestation.roots.kinds import KINDS
from glasshouse.attestation.roots.levels import LEVELS, words_among
from glasshouse.errors import Code, FormatError
from glasshouse.wire import jwt
from glasshouse.wire.crypto import SigningKey, key_id
from glasshouse.wire.lines.line_start import LineStart
from glasshouse.wire.policy import Assurance, Profile
from glasshouse.wire.record import (
    LEFT_OUT,
    Id,
    Member,
    Record,
    Sha256,
    choice,
    digest,
    integer,
    items,
    octets,
    table,
    text,
)

EAR_TYPE = "ear+jwt"
EAR_PROFILE = "tag:ietf.org,2026:rats/ear#04"
RUNTIME = "runtime"
_DEVELOPER = "glasshouse"
_POLICY_PREFIX = "urn:glasshouse:policy:sha256:"


@dataclass(frozen=True, kw_only=True, slots=True)
class Submodule(Record, name="ear.submods", derived={"ear_status": "status"}):
    """The verdict on the runtime, or on one kind of hardware evidence."""

    policy_ids: Annotated[tuple[str, ...], items(1, text()), Member("ear_appraisal_policy_ids")]
    # AR4SI trustworthiness claims.
    vector: Annotated[
        Mapping[str, int],
        table(len(ASPECTS), choice(ASPECTS), integer(-128, 127), min_items=1),
        Member("ear_trustworthiness_vector"),
    ]

    def __post_init__(self) -> None:
        if not self.vector or not self.vector.keys() <= set(ASPECTS):
            raise FormatError(Code.SCHEMA, "a trustworthiness vector that is empty or has an aspect that AR4SI lacks")

    @property
    def status(self) -> EarStatus:
        """Its tier, that of the vector."""
        return status_of(self.vector)

    @classmethod
    def all_of(cls, vectors: Mapping[str, Mapping[str, int]], policy_sha256: bytes) -> dict[str, Submodule]:
        """Return the submodules of a result, by name, from their vectors."""
        ids = (_POLICY_PREFIX + policy_sha256.hex(),)
        return {name: cls(policy_ids=ids, vector=vector) for name, vector in vectors.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ear(
    Record,
    name="ear",
    constants={**CONFIRMATION, "eat_profile": EAR_PROFILE, "ear_verifier_id": {"developer": _DEVELOPER}},
    derived={"ear_status": "status"},
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
    # Of the runtime, and of each kind of hardware evidence.
    submodules: Annotated[Mapping[str, Submodule], table(1 + len(KINDS), choice((RUNTIME, *KINDS))), Member("submods")]
    # The policy's limits, for the runtime.
    lease_s: Annotated[int, integer(1), Member("glasshouse", "lease_s")]
    max_duration_s: Annotated[int, integer(1), Member("glasshouse", "max_duration_s")]
    # The leg that was released; left out for a run of no line.
    line: Annotated[LineStart | None, Member("glasshouse", "line"), LEFT_OUT] = None
    # The pack that was at hand for the hardware evidence, and whether a TPM opened the challenge's credential.
    collateral_sha256: Annotated[bytes | None, digest(), Member("glasshouse", "collateral_sha256"), LEFT_OUT] = None
    tpm_activated: Annotated[bool, Member("glasshouse", "tpm_activated"), LEFT_OUT] = False
    build: Annotated[str, text(64), Member("ear_verifier_id", "build")] = __version__  # the verifier's version

    def __post_init__(self) -> None:
        kinds, is_software = self.submodules.keys() - {RUNTIME}, self.assurance is Assurance.SOFTWARE
        # The threat model's promise: software evidence never looks like hardware evidence, nor one kind like another.
        if RUNTIME not in self.submodules or not LEVELS[self.assurance].complete(kinds):
            raise FormatError(Code.SCHEMA, f"an attestation result of other kinds than {self.assurance} is proven by")
        if dict(self.submodules[RUNTIME].vector) != dict(SOFTWARE_VECTOR if is_software else CHAINED_VECTOR):
            raise FormatError(Code.SCHEMA, "an attestation result that claims of the runtime what its level does not")
        if any(submodule.policy_ids != (self.policy_id,) for submodule in self.submodules.values()):
            raise FormatError(Code.SCHEMA, "an attestation result by two policies")
        if any(self.submodules[kind].status is EarStatus.AFFIRMING for kind in words_among(kinds)):
            raise FormatError(Code.SCHEMA, "an attestation result that affirms what is somebody's word")
        if self.status in (EarStatus.NONE, EarStatus.CONTRAINDICATED):
            raise FormatError(Code.SCHEMA, f"an attestation result that is {self.status}, which is a refusal")
        if (is_software and self.collateral_sha256 is not None) or (self.tpm_activated and "tpm" not in kinds):
            raise FormatError(Code.SCHEMA, "an attestation result that tells of hardware that is not in it")
        if self.line is not None and (self.line.previous is None) != (self.line.leg == 1):
            raise FormatError(Code.SCHEMA, "a leg without the holder of the one before, or a first one with it")

    @property
    def status(self) -> EarStatus:
        """The overall tier: that of the worst submodule."""
        return worst_of(submodule.status for submodule in self.submodules.values())

    @property
    def policy_id(self) -> str:
        """The policy as an EAR names it."""
        return _POLICY_PREFIX + self.policy_sha256.hex()

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
