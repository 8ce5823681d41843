"""What launch file and machine must give before anything is asked of the broker, and what to do where they do not."""

from __future__ import annotations

from glasshouse.attestation.claims import CheckResult, HardeningReport, WorkspaceKind, missing
from glasshouse.errors import Code, PackageError, PlatformError, RefusedError, RunError, UsageError
from glasshouse.handshake.launch import LaunchFile, TokenClaims
from glasshouse.handshake.runtime_side import CLOCK_LEEWAY_S
from glasshouse.package.manifest import Manifest
from glasshouse.runtime.confine import mounts
from glasshouse.runtime.gate.attest import now_us
from glasshouse.runtime.gate.relay import Relay
from glasshouse.runtime.run.start_processes import AgentOptions
from glasshouse.runtime.worker import named_directory
from glasshouse.runtime.worker.sandbox import Worker
from glasshouse.wire.policy import GROUP_EGRESS

# What fails where a file system's server sees what is asked of it.
_FILES = {"worker.landlock", "worker.metadata-closed"}


def demand_launch(
    options: AgentOptions, relay: Relay | None, launch: LaunchFile, token: TokenClaims, manifest: Manifest
) -> None:
    """Demand that the package is the one of this launch, its owner delegated to this broker, and the ranks fit.

    Raises `GlasshouseError`: they do not, or the relay cannot listen.
    """
    group = token.group
    if options.ranks != (None if group is None else group.ranks):
        raise UsageError(Code.USAGE, "this launch is for another number of ranks than the runtime was started for")
    if group is not None and group.machines > 1:
        if GROUP_EGRESS not in manifest.floor.egress:
            raise PlatformError(
                Code.POLICY_IMPOSSIBLE,
                "the owner lets nothing leave this job, and its ranks are on several machines",
                hint=f'seal the job with egress = ["{GROUP_EGRESS}"], or run it on one machine',
            )
        if relay is None or len(options.peers) != group.machines:
            raise UsageError(Code.USAGE, "this runtime was not started with the addresses of all machines of its group")
        relay.listen(group.machine)
    if manifest.sha256 != token.manifest_sha256:
        raise PackageError(Code.MANIFEST_MISMATCH, "the package is another than the launch token's")
    launch.check_delegation(owner_public=manifest.owner_signing, now_us=now_us(), leeway_us=CLOCK_LEEWAY_S * 1_000_000)


def demand_profile(report: HardeningReport) -> None:
    """Demand every check of the profile.

    Raises:
        RunError: `debugger-detected`: a process is traced or not watched.
        RefusedError: `hardening-missing`: another check does not hold.
    """
    lacking = missing(report, report.profile)
    if any(name.endswith((".not-traced", ".watched")) for name in lacking):
        raise RunError(Code.DEBUGGER, "a process of this run is traced, or not watched")
    if lacking:
        raise RefusedError(
            Code.HARDENING_MISSING,
            "this machine lacks what the profile demands",
            hint=f"missing for {report.profile}: {', '.join(lacking)}{_advice(report, lacking)}",
        )


def _advice(report: HardeningReport, lacking: list[str]) -> str:
    if "worker.egress-closed" in lacking and "shown-processes" in report.details:
        return (
            " (other processes are in the worker's sight, and this kernel has no Landlock, which keeps their files "
            "closed; rent a machine with Linux 5.13 or later, or one whose containers may have process namespaces)"
        )
    kinds = ", ".join(sorted(name for name in report.details if mounts.is_remote([name])))
    if not kinds or _FILES.isdisjoint(lacking):
        return ""
    return (
        f" ({kinds}: a server besides this machine's kernel sees each name that a script looks up there, which "
        "Landlock does not keep it from; put the interpreter, its environment, the model cache and the package on a "
        "local disk of this machine)"
    )


def demand_workspace(worker: Worker, least_bytes: int, *, disk: bool) -> None:
    """Demand room for the worker's files, where they have no mount: in memory, or on a disk if the owner allows it.

    Raises `PlatformError`: `platform-unsupported`.
    """
    if worker.report is None or worker.report.workspace is not WorkspaceKind.DIRECTORY:
        return
    in_memory, free_bytes = named_directory.room(worker.named_path)
    if (in_memory or disk) and free_bytes >= least_bytes:
        return
    place = "memory that is there" if not disk else "memory that is there and its disk"
    most = f"{free_bytes / 1e6:.0f} MB" if in_memory or disk else "nothing"
    # Nothing but the hint reaches the person who started the run.
    raise PlatformError(
        Code.PLATFORM,
        "this machine lets nothing be mounted, and has too little room for the worker's files",
        hint=f"the job's files take {least_bytes / 1e6:.0f} MB, and {place} has {most}: take another offer or more "
        "GPUs, with which more shared memory comes (docker: --shm-size)"
        + ("" if disk else '; or let them lie on the machine\'s disk: workspace = "disk" in [policy]'),
    )


def demand_ranks(worker: Worker, machines: int) -> None:
    """Demand for several ranks a network that leads nowhere, or that they are handed their connections.

    Raises:
        PlatformError: `platform-unsupported`: they would be on the machine's network.
    """
    report = worker.report
    notes = report.notes if report is not None else ()
    if "loopback" in notes:
        return
    # Without the filter they would be on the machine's network, at a profile that does not ask for it too.
    observed = {} if report is None else report.observed
    kept_in = all(observed.get(name) is CheckResult.PASSED for name in ("egress-closed", "seccomp-filter"))
    if machines == 1 and kept_in:
        return
    lacking = ", ".join(note.removeprefix("no-") for note in notes if note.startswith("no-")) or "loopback"
    if kept_in:
        why, instead = "over which they reach those of other machines", "on one machine"
    else:
        why, instead = "and nothing keeps them off the machine's", "in one process"
    raise PlatformError(
        Code.PLATFORM,
        f"this machine gives the worker no network of its own for its ranks, {why}",
        hint=f"missing for a network of ranks, {why}: {lacking}; run the job {instead}, or elsewhere",
    )
