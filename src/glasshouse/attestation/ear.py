"""The attestation result: an EAR (draft-ietf-rats-ear-04) as a JWT of the type `ear+jwt`.

Laws: at the level `software` the status is `warning`, and no claim is made about hardware or
instance identity; a result that says otherwise is refused by its parser, whichever key signed it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from glasshouse import __version__
from glasshouse.attestation.claims import ID_BYTES, NONCE_BYTES
from glasshouse.attestation.confirmation import confirmation, confirmed_key
from glasshouse.errors import Code, FormatError
from glasshouse.wire import jwt, signing
from glasshouse.wire.canonical import Json
from glasshouse.wire.fields import Fields, b64encode
from glasshouse.wire.policy import Assurance, Profile

__all__ = ["EAR_PROFILE", "EAR_TYPE", "SOFTWARE_VECTOR", "Ear", "EarStatus"]

EAR_TYPE = "ear+jwt"
EAR_PROFILE = "tag:ietf.org,2026:rats/ear#04"
_DEVELOPER = "glasshouse"
_POLICY_PREFIX = "urn:glasshouse:policy:sha256:"
_ASPECTS = (
    "configuration",
    "executables",
    "file-system",
    "hardware",
    "instance-identity",
    "runtime-opaque",
    "sourced-data",
    "storage-opaque",
)

SOFTWARE_VECTOR: Mapping[str, int] = MappingProxyType({"configuration": 32, "executables": 32})
"""What `software` may say: recognised executables and configuration, for which the verifier cannot vouch."""


class EarStatus(StrEnum):
    """The tiers of AR4SI, best first."""

    AFFIRMING = "affirming"
    WARNING = "warning"
    CONTRAINDICATED = "contraindicated"
    NONE = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ear:
    """The broker's verdict on one piece of evidence.

    Law: ``Ear.parse(e.issue(k), ...) == e`` while it is valid.

    Attributes:
        issued_s, expires_s: validity, whole seconds.
        nonce: the challenge's.
        evidence_public: the key that the verdict is about and for (`cnf`; `aud` is its key id).
        deployment, run_id: what was released to.
        manifest_sha256, floor_sha256, policy_sha256, evidence_sha256: what was judged, and by what.
        assurance: the level that the evidence proved.
        profile: the hardening profile that it showed.
        status: the overall tier.
        vector: AR4SI trustworthiness claims.
        lease_s, max_duration_s: the policy's limits, told to the runtime.
        build: the verifier's version.
    """

    issued_s: int
    expires_s: int
    nonce: bytes
    evidence_public: bytes
    deployment: str
    run_id: str
    manifest_sha256: bytes
    floor_sha256: bytes
    policy_sha256: bytes
    evidence_sha256: bytes
    assurance: Assurance
    profile: Profile
    status: EarStatus
    vector: Mapping[str, int]
    lease_s: int
    max_duration_s: int
    build: str = __version__

    def __post_init__(self) -> None:
        if not self.vector or not self.vector.keys() <= set(_ASPECTS):
            raise FormatError(Code.SCHEMA, "a trustworthiness vector that is empty or says what AR4SI does not know")
        if self.status is not _tier(self.vector):
            raise FormatError(Code.SCHEMA, "an attestation result whose status is not that of its vector")
        if self.assurance is Assurance.SOFTWARE and dict(self.vector) != dict(SOFTWARE_VECTOR):
            # The threat model's promise: software evidence never looks like hardware evidence.
            raise FormatError(Code.SCHEMA, "a software attestation result that claims more than software can show")

    def issue(self, broker: signing.SigningKey) -> str:
        """Return the signed token."""
        submodule: dict[str, Json] = {
            "ear_appraisal_policy_ids": [_POLICY_PREFIX + self.policy_sha256.hex()],
            "ear_status": self.status.value,
            "ear_trustworthiness_vector": dict(self.vector),
        }
        claims: dict[str, Json] = {
            "aud": signing.key_id(self.evidence_public),
            "cnf": confirmation(self.evidence_public),
            "ear_status": self.status.value,
            "ear_verifier_id": {"build": self.build, "developer": _DEVELOPER},
            "eat_nonce": b64encode(self.nonce),
            "eat_profile": EAR_PROFILE,
            "exp": self.expires_s,
            "glasshouse": {
                "assurance": self.assurance.value,
                "deployment": self.deployment,
                "evidence_sha256": self.evidence_sha256.hex(),
                "floor_sha256": self.floor_sha256.hex(),
                "lease_s": self.lease_s,
                "manifest_sha256": self.manifest_sha256.hex(),
                "max_duration_s": self.max_duration_s,
                "policy_sha256": self.policy_sha256.hex(),
                "profile": self.profile.value,
                "run_id": self.run_id,
            },
            "iat": self.issued_s,
            "iss": broker.key_id,
            "submods": {"runtime": submodule},
        }
        return jwt.issue(broker, typ=EAR_TYPE, claims=claims)

    @classmethod
    def parse(cls, text: str, *, broker_public: bytes, evidence_public: bytes, now_us: int, leeway_s: int = 0) -> Ear:
        """Parse and verify a token: signed by this broker, about and for this evidence key, valid at this time.

        Args:
            text: the compact token.
            broker_public: the only key whose verdict counts.
            evidence_public: the key that the verdict must be about.
            now_us: the time at which it must be valid.
            leeway_s: by how much the caller's clock may be off.

        Raises:
            FormatError: `wrong-type`, `signature-invalid`, `token-claim-mismatch`, `token-expired`,
                `schema-invalid`, `too-large` or `not-canonical`.
        """
        token = jwt.parse(text)
        claims = token.verify(
            public=broker_public,
            typ=EAR_TYPE,
            audience=signing.key_id(evidence_public),
            now_s=now_us // 1_000_000,
            leeway_s=leeway_s,
        )
        ear = cls._from_claims(Fields(dict(claims), "ear"), issuer=signing.key_id(broker_public))
        if ear.evidence_public != evidence_public:
            raise FormatError(Code.TOKEN_CLAIM, "an attestation result about another evidence key")
        return ear

    @classmethod
    def _from_claims(cls, fields: Fields, *, issuer: str) -> Ear:
        fields.text("aud", max_chars=64)
        fields.choice("iss", [issuer])
        fields.choice("eat_profile", [EAR_PROFILE])
        verifier, ours, submods = fields.child("ear_verifier_id"), fields.child("glasshouse"), fields.child("submods")
        verifier.choice("developer", [_DEVELOPER])
        runtime = submods.child("runtime")
        submods.end()
        status = fields.choice("ear_status", list(EarStatus))
        runtime.choice("ear_status", [status])
        policy_sha256 = ours.digest("policy_sha256")
        if runtime.texts("ear_appraisal_policy_ids", max_items=1) != [_POLICY_PREFIX + policy_sha256.hex()]:
            raise FormatError(Code.SCHEMA, "an attestation result that names another policy than it applied")
        vector = runtime.child("ear_trustworthiness_vector")
        ear = cls(
            issued_s=fields.integer("iat"),
            expires_s=fields.integer("exp"),
            nonce=fields.octets("eat_nonce", length=NONCE_BYTES),
            evidence_public=confirmed_key(fields),
            deployment=ours.digest("deployment", length=ID_BYTES).hex(),
            run_id=ours.digest("run_id", length=ID_BYTES).hex(),
            manifest_sha256=ours.digest("manifest_sha256"),
            floor_sha256=ours.digest("floor_sha256"),
            policy_sha256=policy_sha256,
            evidence_sha256=ours.digest("evidence_sha256"),
            assurance=Assurance(ours.choice("assurance", list(Assurance))),
            profile=Profile(ours.choice("profile", list(Profile))),
            status=EarStatus(status),
            vector={name: vector.integer(name, low=-128, high=127) for name in _ASPECTS if vector.has(name)},
            lease_s=ours.integer("lease_s", low=1),
            max_duration_s=ours.integer("max_duration_s", low=1),
            build=verifier.text("build", max_chars=64),
        )
        for part in (vector, runtime, verifier, ours, fields):
            part.end()
        return ear


def _tier(vector: Mapping[str, int]) -> EarStatus:
    """Return the worst tier in a vector."""
    order = (EarStatus.CONTRAINDICATED, EarStatus.WARNING, EarStatus.NONE, EarStatus.AFFIRMING)
    tiers = {_tier_of(value) for value in vector.values()}
    return next(tier for tier in order if tier in tiers)


def _tier_of(value: int) -> EarStatus:
    """Return the tier of one trustworthiness claim (draft-ietf-rats-ar4si section 2.3.2)."""
    if -1 <= value <= 1:
        return EarStatus.NONE
    if -32 <= value <= 31:
        return EarStatus.AFFIRMING
    return EarStatus.WARNING if -96 <= value <= 95 else EarStatus.CONTRAINDICATED
