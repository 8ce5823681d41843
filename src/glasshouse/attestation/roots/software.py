"""The root `software`: nothing but the two signatures stands behind the evidence.

A host with root can read the run's memory and forge every measurement; see docs/security/threat-model.md.
"""

from __future__ import annotations

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.appraised import SOFTWARE_VECTOR, Appraised, Blob, status_of
from glasshouse.errors import Code


def appraise(blobs: tuple[Blob, ...], **_: object) -> Appraised:
    """Accept exactly the absence of hardware evidence; see `Appraise`.

    The composite is bound by the signatures. Evidence that was not asked for means that one of the two sides is
    confused about the level.
    """
    if blobs:
        raise CheckFailedError(
            "12",
            Code.HARDWARE_EVIDENCE,
            "hardware evidence beside a claim of the level software",
            expected="none",
            actual=f"{len(blobs)} attached",
        )
    return Appraised(status=status_of(SOFTWARE_VECTOR), vector=SOFTWARE_VECTOR)
