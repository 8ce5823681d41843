"""The hardening report: what was observed of agent and worker, and what each profile demands.

Laws: every check has an answer, for both processes; `unavailable` is never `passed`; a profile is
claimed only when all its checks passed. The names are those of spec/key-release.md section 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Literal, TypeAlias

from glasshouse.errors import Code, FormatError
from glasshouse.wire.policy import Profile
from glasshouse.wire.record import IDENTIFIER, Record, choice, raw, table, text

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
