"""The claims of the runtime's evidence with its hardening report, and the composite digest that binds them to hardware.

An EAT claims set (RFC 9711 names where one exists: `eat_nonce`, `eat_profile`, `cnf`); the rest is defined in
spec/key-release.md sections 4 and 5. Laws: parse then encode reproduces the input; every hardening check has an answer,
for both processes; `unavailable` is never `passed`; a profile is claimed only when all its checks passed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Literal, TypeAlias

from glasshouse.attestation.measurements.measured import Measured
from glasshouse.errors import Code, FormatError
from glasshouse.wire import jwt
from glasshouse.wire.canonical import Codec
from glasshouse.wire.crypto import HPKE_PUBLIC_BYTES, lengths_prefixed, sha256
from glasshouse.wire.policy import Assurance, Profile
from glasshouse.wire.record import (
    IDENTIFIER,
    Id,
    Identifier,
    Member,
    Record,
    Sha256,
    choice,
    digest,
    items,
    octets,
    raw,
    table,
    text,
)
from glasshouse.wire.states import State

EAT_PROFILE = "urn:glasshouse:evidence:2"
EAT_PROFILE_1 = "urn:glasshouse:evidence:1"
"""Of evidence whose measurement has no parts: receipts of that time are still read, and no gate releases to it."""

NONCE_BYTES = 32
ID_BYTES = 16
MAX_GPUS = 64
_PRINTABLE = re.compile(r"[ -~]*")  # shown to people: no control characters
_COMPOSITE_LABEL = b"glasshouse composite v1"

# The claim `cnf` (RFC 7800), a raw public key as an Ed25519 JWK (RFC 8037), and the constants of a record that has it.
Confirmed: TypeAlias = Annotated[bytes, octets(32), Member("cnf", "jwk", "x")]
CONFIRMATION = {"cnf": {"jwk": {"crv": "Ed25519", "kty": "OKP"}}}

Process: TypeAlias = Literal["agent", "worker"]

MAX_DETAILS = 32


class CheckResult(StrEnum):
    """The result of an observation; `unavailable` where the kernel does not offer the means."""

    PASSED = "passed"
    FAILED = "failed"
    UNAVAILABLE = "unavailable"


class WorkspaceKind(StrEnum):
    """Where the worker's files live, strongest first."""

    TMPFS_NOSWAP = "tmpfs-noswap"
    TMPFS = "tmpfs"
    DIRECTORY = "directory"


class SecretMemoryKind(StrEnum):
    """Where keys live that two processes share, strongest first."""

    MEMFD_SECRET = "memfd-secret"  # noqa: S105 — a kernel facility, not a password
    LOCKED = "locked-memory"
    UNLOCKED = "unlocked-memory"


_BOTH = frozenset(
    {
        "core-limit-zero",
        "debug-env-clean",
        "no-new-privs",
        "not-dumpable",
        "not-traced",
        "preload-clean",
        "seccomp-filter",
        "watched",
    }
)
_STRICT_BOTH = _BOTH | {"no-swap", "secret-memory"}

CHECKS: Mapping[Process, frozenset[str]] = MappingProxyType(
    {
        "agent": _STRICT_BOTH | {"memory-locked"},
        "worker": _STRICT_BOTH | {"egress-closed", "landlock", "metadata-closed", "workspace-in-memory"},
    }
)
"""Every check there is, for each process."""

REQUIRED: Mapping[Profile, Mapping[Process, frozenset[str]]] = MappingProxyType(
    {
        Profile.OFF: MappingProxyType({"agent": frozenset(), "worker": frozenset()}),
        Profile.STANDARD: MappingProxyType({"agent": _BOTH, "worker": _BOTH | {"egress-closed", "metadata-closed"}}),
        Profile.STRICT: CHECKS,
    }
)
"""What each profile demands of each process."""

_ANTI_DEBUG = frozenset({"not-dumpable", "not-traced", "watched"})


@dataclass(frozen=True, kw_only=True, slots=True)
class HardeningReport(Record, name="hardening"):
    """What the runtime observed of its own processes; data, not a judgement.

    A report may contradict itself: `consistent` finds that out, and check 11c refuses it.
    """

    profile: Profile  # that the runtime claims
    anti_debug: bool  # whether it claims that debuggers are kept out of, or noticed in, both processes
    # An answer for each check of `CHECKS`, no more and no fewer.
    agent: Annotated[Mapping[str, CheckResult], table(len(CHECKS["agent"]), choice(CHECKS["agent"]))]
    worker: Annotated[Mapping[str, CheckResult], table(len(CHECKS["worker"]), choice(CHECKS["worker"]))]
    workspace: WorkspaceKind
    secret_memory: SecretMemoryKind
    # Small facts (kernel feature versions), for people; identifiers or integers.
    details: Annotated[Mapping[str, str | int], table(MAX_DETAILS, text(), raw())] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.agent.keys() != CHECKS["agent"] or self.worker.keys() != CHECKS["worker"]:
            raise FormatError(Code.SCHEMA, "hardening does not answer exactly the known checks of both processes")
        if len(self.details) > MAX_DETAILS:
            raise FormatError(Code.SCHEMA, f"hardening.details has more than {MAX_DETAILS} entries")
        for name, value in self.details.items():
            if not IDENTIFIER.fullmatch(name) or not (
                IDENTIFIER.fullmatch(value) if isinstance(value, str) else type(value) is int
            ):
                raise FormatError(Code.SCHEMA, "hardening.details holds more than identifiers and integers")


def missing(report: HardeningReport, profile: Profile) -> list[str]:
    """Return what `profile` demands and `report` did not pass, as ``process.check``, sorted."""
    return sorted(
        f"{process}.{name}"
        for process, names in REQUIRED[profile].items()
        for name in names
        if getattr(report, process)[name] is not CheckResult.PASSED
    )


def anti_debug(agent: Mapping[str, CheckResult], worker: Mapping[str, CheckResult]) -> bool:
    """Return whether debuggers are kept out of, or noticed in, both processes."""
    return all(results.get(name) is CheckResult.PASSED for results in (agent, worker) for name in _ANTI_DEBUG)


def consistent(report: HardeningReport) -> bool:
    """Return whether the report's own answers bear out what it claims (check 11c)."""
    passed = CheckResult.PASSED
    if missing(report, report.profile) or report.anti_debug != anti_debug(report.agent, report.worker):
        return False
    # A means that is named must be the means whose check passed: a directory is not memory.
    if report.worker["workspace-in-memory"] is passed and report.workspace is WorkspaceKind.DIRECTORY:
        return False
    secret = SecretMemoryKind.MEMFD_SECRET
    return report.secret_memory is secret or passed not in (
        report.agent["secret-memory"],
        report.worker["secret-memory"],
    )


class ContainerSource(StrEnum):
    """Where the container id came from: placement minted it, or the platform gave it."""

    MINTED = "minted"
    PLATFORM = "platform"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu(Record, name="claims.gpus"):
    """One accelerator as the runtime sees it."""

    name: Annotated[str, text(128, _PRINTABLE)]  # of the product, by the driver
    memory_bytes: int
    driver: Annotated[str, text(64, _PRINTABLE)]  # its version
    uuid: Annotated[str, text(64, _PRINTABLE)]


_MEASUREMENT = Codec(
    lambda value, where: digest().read(value, where) if isinstance(value, str) else Measured.from_json(value),
    lambda measured: measured.to_json() if isinstance(measured, Measured) else measured.hex(),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Claims(Record, name="claims", constants=CONFIRMATION, derived={"eat_profile": "eat_profile"}):
    """The claims of a runtime about itself, unverified before the gate's checks."""

    nonce: Annotated[bytes, octets(NONCE_BYTES), Member("eat_nonce")]  # the challenge's
    issued_us: int  # when the claims were made, by the runtime's clock
    started_us: int  # when the runtime started
    # The package that it wants to open.
    manifest_sha256: Sha256
    package_id: Id
    # The launch that it belongs to.
    deployment: Id
    run_id: Id
    container_id: Annotated[Identifier, Member("container", "id")]
    container_source: Annotated[ContainerSource, Member("container", "source")]
    # By part (`measurement.measure_runtime`); of evidence of profile 1, which has no parts, one digest.
    measurement: Annotated[Measured | bytes, _MEASUREMENT]
    environment_sha256: Sha256  # of what else is installed
    hardening: HardeningReport  # as observed of agent and worker
    state: State  # `measured` in acceptable evidence
    gpus: Annotated[tuple[Gpu, ...], items(MAX_GPUS)]  # in sight
    assurance: Assurance  # that the hardware evidence beside the claims is to prove
    hpke_public: Annotated[bytes, octets(HPKE_PUBLIC_BYTES)]  # its private half never left the custodian
    evidence_public: Confirmed  # the key that signs this evidence and later the run's log and receipt
    token: Annotated[str, text(jwt.MAX_TOKEN_BYTES)]  # the launch token, compact

    def __post_init__(self) -> None:
        sizes = (
            (self.nonce, NONCE_BYTES),
            (self.manifest_sha256, 32),
            (self.measurement_sha256, 32),
            (self.environment_sha256, 32),
            (self.evidence_public, 32),
            (self.hpke_public, HPKE_PUBLIC_BYTES),
        )
        if any(len(value) != size for value, size in sizes):
            raise FormatError(Code.SCHEMA, "a claim that is a digest, key or nonce has the wrong length")
        if not IDENTIFIER.fullmatch(self.container_id):
            raise FormatError(Code.SCHEMA, "claims.container.id is not an identifier")

    @property
    def measurement_sha256(self) -> bytes:
        """One digest over the whole runtime measurement: what receipt and artifact name."""
        return self.measurement.sha256 if isinstance(self.measurement, Measured) else self.measurement

    @property
    def eat_profile(self) -> str:
        """The profile of the evidence, by whether its measurement has parts."""
        return EAT_PROFILE if isinstance(self.measurement, Measured) else EAT_PROFILE_1


def composite(claims: Claims) -> bytes:
    """Return the 32 bytes that each hardware root carries as user data: they cover all claims, with the keys."""
    return sha256(lengths_prefixed(_COMPOSITE_LABEL, claims.encode()))
