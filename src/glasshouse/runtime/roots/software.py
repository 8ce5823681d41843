"""The root `software`: there is nothing to collect."""

from __future__ import annotations

from glasshouse.attestation.roots.appraised import Blob


def collect(*, composite: bytes) -> tuple[Blob, ...]:
    """Return the evidence of this machine's hardware that binds the composite; here none."""
    del composite
    return ()
