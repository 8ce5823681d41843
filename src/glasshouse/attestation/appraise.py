"""Is it acceptable? The checks of the gate that compare claims with policy and records: 5–8, 10–12.

The numbers are those of spec/key-release.md section 6; `handshake.broker_side` calls them in order.
Everything compared here was authenticated by checks 3 and 4 before.
"""

from __future__ import annotations

from glasshouse.attestation.claims import Claims, ContainerSource, HardeningReport, consistent, missing
from glasshouse.attestation.measurements.measured import Measured, References
from glasshouse.attestation.refusal import CheckFailedError, check_same
from glasshouse.errors import Code
from glasshouse.wire.policy import Assurance, Profile
from glasshouse.wire.states import State


def check_5_time(claims: Claims, *, challenge_issued_us: int, now_us: int, skew_us: int) -> None:
    """Made after the challenge was, and not in the future, give or take the policy's skew.

    Raises:
        CheckFailedError: `evidence-stale`.
    """
    earliest, latest = challenge_issued_us - skew_us, now_us + skew_us
    if not earliest <= claims.issued_us <= latest:
        raise CheckFailedError(
            "5",
            Code.EVIDENCE_STALE,
            "evidence made outside the challenge's time window",
            expected=f"from {earliest} to {latest} µs",
            actual=f"{claims.issued_us} µs",
        )


def check_6_manifest(claims: Claims, *, manifest_sha256: bytes, package_id: str) -> None:
    """For the package of the deployment's record; raises `CheckFailedError`, `manifest-mismatch`."""
    check_same("6", Code.MANIFEST_MISMATCH, "another manifest", manifest_sha256.hex(), claims.manifest_sha256.hex())
    check_same("6", Code.MANIFEST_MISMATCH, "another package", package_id, claims.package_id)


def check_7_container(
    claims: Claims, *, container_id: str, container_source: ContainerSource, run_id: str, deployment: str
) -> None:
    """From the container, run and deployment of the launch record; raises `CheckFailedError`, `container-mismatch`."""
    check_same("7", Code.CONTAINER_MISMATCH, "another container id", container_id, claims.container_id)
    check_same(
        "7", Code.CONTAINER_MISMATCH, "another container source", container_source.value, claims.container_source.value
    )
    check_same("7", Code.CONTAINER_MISMATCH, "another run", run_id, claims.run_id)
    check_same("7", Code.CONTAINER_MISMATCH, "another deployment", deployment, claims.deployment)


def check_8_measurement(claims: Claims, references: References) -> None:
    """Each part of the runtime measurement is one that the owner recorded; a measurement without parts is refused.

    Raises:
        CheckFailedError: `measurement-unknown`.
    """
    measured = claims.measurement
    if not isinstance(measured, Measured):
        raise CheckFailedError(
            "8", Code.MEASUREMENT_UNKNOWN, "a runtime that does not name the parts of its measurement"
        )
    part = references.unknown(measured)
    if part is not None:
        first, *others = references.parts()[part]
        raise CheckFailedError(
            "8",
            Code.MEASUREMENT_UNKNOWN,
            f"a runtime whose part {part} is not among the deployment's references",
            expected=f"one of {1 + len(others)} references of {part}" if others else f"{part} {first.hex()}",
            actual=f"{part} {measured.parts()[part].hex()}",
        )


def check_10_state(claims: Claims) -> None:
    """Exactly `measured`: not before its hardening, and not once it was attested.

    Raises:
        CheckFailedError: `state-mismatch`.
    """
    check_same("10", Code.STATE_MISMATCH, "another state", State.MEASURED.value, claims.state.value)


def check_11_hardening(report: HardeningReport, *, least: Profile) -> None:
    """Anti-debug enabled (11a), profile at least the policy's (11b), answers that bear out the claim (11c).

    Raises:
        CheckFailedError: `anti-debug-disabled`, `anti-debug-downgraded` or `anti-debug-inconsistent`.
    """
    if not report.anti_debug:
        raise CheckFailedError(
            "11a", Code.ANTI_DEBUG_DISABLED, "a runtime without anti-debug", expected="enabled", actual="disabled"
        )
    _check_level("11b", Code.ANTI_DEBUG_DOWNGRADED, "a hardening profile", least, report.profile)
    if not consistent(report):
        raise CheckFailedError(
            "11c",
            Code.ANTI_DEBUG_INCONSISTENT,
            "observed checks that do not bear out the claimed profile",
            expected=report.profile.value,
            actual=", ".join(missing(report, report.profile)) or "a means that contradicts its check",
        )


def check_12_assurance(claims: Claims, *, least: Assurance) -> None:
    """A claimed level of at least the policy's; whether it is proven is `roots.root_table.check_12_hardware`.

    Raises:
        CheckFailedError: `assurance-too-low`.
    """
    _check_level("12", Code.ASSURANCE_TOO_LOW, "a level of assurance", least, claims.assurance)


def _check_level(check: str, code: Code, what: str, least: Assurance | Profile, claimed: Assurance | Profile) -> None:
    if not claimed.at_least(least):
        raise CheckFailedError(
            check, code, f"{what} below the policy's", expected=f"at least {least}", actual=claimed.value
        )
