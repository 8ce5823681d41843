"""Check 14 of the gate: a group's machines are released to all together, or none of them is.

Pure rules of spec/key-release.md sections 6.1 and 7.3; the broker brings what its store holds of the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from glasshouse.attestation.refusal import CheckFailedError, check_1, check_signed
from glasshouse.errors import Code
from glasshouse.handshake.messages import MAX_RELEASE_REQUEST_BYTES, RELEASE_REQUEST_TYPE, ReleaseRequest
from glasshouse.wire.dsse import Envelope


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
