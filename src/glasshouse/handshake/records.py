"""What the broker's store holds of deployments, launches and groups, and the checks of the gate against it: 3 and 14.

Laws: a token is compared with the broker's own records and challenge, never with what evidence claims; the challenge
request is judged by the same rules; a group's machines are released to all together, or none of them is
(spec/key-release.md sections 6.1 and 7.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from glasshouse.attestation.claims import ContainerSource
from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.attestation.refusal import CheckFailedError, check_1, check_same, check_signed
from glasshouse.errors import Code, FormatError, VerificationError
from glasshouse.handshake.delegation import Delegation, Use
from glasshouse.handshake.launch import TokenClaims, parse_token
from glasshouse.handshake.messages import (
    MAX_RELEASE_REQUEST_BYTES,
    MAX_REQUEST_BYTES,
    RELEASE_REQUEST_TYPE,
    REQUEST_TYPE,
    ChallengeRequest,
    ReleaseRequest,
    TpmKeys,
)
from glasshouse.wire.crypto import key_id, sha256
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.group import Group
from glasshouse.wire.lines.line_start import LineStart
from glasshouse.wire.policy import Floor

_CODES = {
    Code.WRONG_TYPE: Code.TOKEN_TYPE,
    Code.TOKEN_EXPIRED: Code.TOKEN_EXPIRED,
    Code.TOKEN_CLAIM: Code.TOKEN_CLAIM,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentRecord:
    """What the owner recorded of a deployment.

    Law: a record whose policy loosens its floor does not exist.
    """

    deployment: str  # its id
    # The package.
    package_id: str
    manifest_sha256: bytes
    key_commitment: bytes
    floor: Floor  # the floor that the owner signed into the manifest
    policy: DeploymentPolicy  # what this deployment demands
    revoked: bool  # whether the package's key may no longer be released
    delegation: Delegation | None  # what the package's owner lets this broker do now; None when there is no delegation

    def __post_init__(self) -> None:
        self.policy.tightens(self.floor)

    @property
    def floor_sha256(self) -> bytes:
        """The floor's digest, as in token and EAR."""
        return _digest(self.floor)

    @property
    def policy_sha256(self) -> bytes:
        """The policy's digest, as in token and EAR."""
        # One with hardware has tables of reference values, by which nothing can be looked up.
        return _digest(self.policy) if self.policy.hardware is None else self.policy.sha256


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRecord:
    """What the owner recorded of one launch."""

    jti: str  # the token's id
    # What was launched.
    deployment: str
    run_id: str
    # Where.
    container_id: str
    container_source: ContainerSource
    launch_public: bytes  # the launch key
    expires_us: int  # the end of the token's validity
    created_us: int = 0  # when it was recorded; nothing of it is dated before
    group: Group | None = None  # its place among the machines of one group; None for an ordinary run
    line: LineStart | None = None  # the leg that it begins, as its token has it; None for a run of no line


class GroupState(StrEnum):
    """How a group stands at the gate; from the last two there is no way back."""

    OPEN = "open"
    RELEASED = "released"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRecord:
    """What the broker's store holds of a group."""

    id: bytes  # 32 bytes
    deployment: str  # of all its launches
    # As its owner announced it.
    machines: int
    ranks: int
    state: GroupState
    deadline_us: int | None = None  # until when all must have been accepted; None before the first was
    # Of a refused group: which machine, and why.
    culprit: int | None = None
    code: Code | None = None

    def over(self, now_us: int) -> bool:
        """Whether it waits for machines that can no longer come in time."""
        return self.state is GroupState.OPEN and self.deadline_us is not None and now_us >= self.deadline_us


@lru_cache(maxsize=128)
def _digest(part: Floor | DeploymentPolicy) -> bytes:
    # Of equal values, and so of equal canonical bytes: a gate asks for the same few a dozen times a release.
    return part.sha256


def check_challenge_request(message: bytes, *, broker_public: bytes, now_us: int) -> tuple[TokenClaims, TpmKeys | None]:
    """Check a challenge request on its own: size, schema, token, and the launch key's signature.

    The caller then looks up the records that the token names and calls `check_standing`. The same
    request sent again has the same bytes, so that a broker may answer it with the same challenge. Beside the token's
    claims the keys of a TPM are returned where some are named, which were not looked into.

    Raises:
        CheckFailedError: `message-too-large`, `message-invalid` (1), or a token code (3).
    """
    request, envelope = check_1("a challenge request", message, MAX_REQUEST_BYTES, ChallengeRequest.open)
    token = _token(request.token, broker_public=broker_public, now_us=now_us)
    unsigned = "a challenge request that the token's launch key did not sign"
    check_signed(envelope, REQUEST_TYPE, token.launch_public, check="3", code=Code.TOKEN_KEY, message=unsigned)
    return token, request.tpm


def check_standing(
    token: TokenClaims, *, record: DeploymentRecord, launch: LaunchRecord, broker_public: bytes, now_us: int
) -> None:
    """The token's claims are those of the records, and the deployment may still release.

    Raises:
        CheckFailedError: `token-expired`, `token-key-mismatch`, `token-claim-mismatch`,
            `deployment-expired`, `package-revoked` or `delegation-invalid`.
    """
    _check_records(token, record=record, launch=launch, now_us=now_us)
    _check_deployment(record, broker_public=broker_public, now_us=now_us)


def check_releasable(record: DeploymentRecord, launch: LaunchRecord, *, broker_public: bytes, now_us: int) -> None:
    """What was decided for a launch may still be handed to it: neither it nor its deployment is over.

    Raises:
        CheckFailedError: `token-expired`, `deployment-expired`, `package-revoked` or `delegation-invalid`.
    """
    _check_launch(launch, now_us)
    _check_deployment(record, broker_public=broker_public, now_us=now_us)


def check_3_token(
    text: str, *, record: DeploymentRecord, launch: LaunchRecord, deployment: str, broker_public: bytes, now_us: int
) -> TokenClaims:
    """The launch token is ours, valid, and agrees with launch record, deployment record and challenge.

    Raises:
        CheckFailedError: `token-type-mismatch`, `token-signature-invalid`, `token-expired`,
            `token-key-mismatch`, `token-claim-mismatch`, `deployment-expired`, `package-revoked` or
            `delegation-invalid`.
    """
    token = _token(text, broker_public=broker_public, now_us=now_us)
    _check_records(token, record=record, launch=launch, now_us=now_us)
    check_same("3", Code.TOKEN_CLAIM, "a token for another deployment", deployment, token.deployment)
    _check_deployment(record, broker_public=broker_public, now_us=now_us)
    return token


def _token(text: str, *, broker_public: bytes, now_us: int) -> TokenClaims:
    try:
        return parse_token(text, broker_public=broker_public, now_us=now_us)
    except FormatError as error:
        # What is not a token of ours at all has no signature of ours either.
        raise CheckFailedError("3", _CODES.get(error.code, Code.TOKEN_SIGNATURE), error.message) from None


def _check_records(token: TokenClaims, *, record: DeploymentRecord, launch: LaunchRecord, now_us: int) -> None:
    _check_launch(launch, now_us)
    if token.launch_public != launch.launch_public:
        raise CheckFailedError(
            "3",
            Code.TOKEN_KEY,
            "a token for another launch key than recorded",
            expected=key_id(launch.launch_public),
            actual=key_id(token.launch_public),
        )
    for what, expected, actual in (
        ("id", launch.jti, token.jti),
        ("deployment", launch.deployment, token.deployment),
        ("deployment", record.deployment, token.deployment),
        ("run", launch.run_id, token.run_id),
        ("container id", launch.container_id, token.container_id),
        ("container source", launch.container_source.value, token.container_source.value),
        ("package", record.package_id, token.package_id),
        ("manifest", record.manifest_sha256.hex(), token.manifest_sha256.hex()),
        ("floor", record.floor_sha256.hex(), token.floor_sha256.hex()),
        ("policy", record.policy_sha256.hex(), token.policy_sha256.hex()),
        ("group", _group_text(launch.group), _group_text(token.group)),
        ("leg of a line", _line_text(launch.line), _line_text(token.line)),
    ):
        check_same("3", Code.TOKEN_CLAIM, f"a token for another {what}", expected, actual)


def _check_launch(launch: LaunchRecord, now_us: int) -> None:
    if now_us >= launch.expires_us:
        raise CheckFailedError("3", Code.TOKEN_EXPIRED, "a launch that has expired")


def _check_deployment(record: DeploymentRecord, *, broker_public: bytes, now_us: int) -> None:
    if now_us >= record.policy.not_after_us:
        raise CheckFailedError("3", Code.DEPLOYMENT_EXPIRED, "a deployment that has expired")
    if record.revoked:
        raise CheckFailedError("3", Code.PACKAGE_REVOKED, "a package whose key the owner revoked")
    if record.delegation is None:
        raise CheckFailedError("3", Code.CHAIN_DELEGATION, "the package's owner delegated nothing to this broker")
    try:
        record.delegation.check(Use.RELEASE, broker_public=broker_public, at_us=now_us)
    except VerificationError as error:
        raise CheckFailedError("3", error.code, error.message) from None


def _group_text(group: Group | None) -> str:
    if group is None:
        return "none"
    return f"machine {group.machine} of {group.machines}, {group.ranks} ranks each, in {group.id.hex()}"


def _line_text(line: LineStart | None) -> str:
    if line is None:
        return "none"
    return f"leg {line.leg} from checkpoint {line.seq} of {line.counted or line.seq}, {sha256(line.encode()).hex()}"


def check_14_group(group: GroupRecord) -> None:
    """No machine of the group was refused; that none is missing at the deadline is for the caller to see first.

    Raises:
        CheckFailedError: `rank-refused`.
    """
    if group.state is GroupState.REFUSED:
        if group.culprit is None or group.code is None:
            raise ValueError("a refused group without its reason")
        raise rank_refused(group.culprit, group.code)


def rank_refused(machine: int, code: Code) -> CheckFailedError:
    """Return the refusal of a group's other machines, for the one that is to blame."""
    what = "is missing" if code is Code.RANK_LOST else "was refused"
    return CheckFailedError(
        "14",
        Code.RANK_REFUSED,
        f"machine {machine} of the group {what}, so none of its machines is released to",
        actual=f"machine {machine}: {code.value}",
    )


def check_release_request(message: bytes) -> tuple[ReleaseRequest, Envelope]:
    """Size and schema of a release request; `check_4_release_request` checks whose it is.

    Raises:
        CheckFailedError: `message-too-large` or `message-invalid`.
    """
    return check_1("a release request", message, MAX_RELEASE_REQUEST_BYTES, ReleaseRequest.open)


def check_4_release_request(envelope: Envelope, *, evidence_public: bytes) -> None:
    """Signed by the key of the evidence that it names, and by no other.

    Raises:
        CheckFailedError: `evidence-signature-invalid`.
    """
    check_signed(envelope, RELEASE_REQUEST_TYPE, evidence_public, check="4", code=Code.EVIDENCE_SIGNATURE)
