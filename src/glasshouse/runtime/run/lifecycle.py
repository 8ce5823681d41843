"""The middle of a run, told in order: from a started process to sealed outputs."""

from __future__ import annotations

import time
from functools import partial

from glasshouse.attestation.claims import Claims, composite
from glasshouse.attestation.evidence import Blob
from glasshouse.attestation.hardening import CheckResult, HardeningReport, WorkspaceKind, anti_debug, missing
from glasshouse.attestation.measurement import measure_environment, measure_runtime
from glasshouse.custodian.residue_patterns import ResiduePatterns
from glasshouse.errors import Code, InternalError, PackageError, PlatformError, RefusedError, RunError, UsageError
from glasshouse.evidence.events import EventType
from glasshouse.handshake.messages import Challenge
from glasshouse.handshake.runtime_side import CLOCK_LEEWAY_S
from glasshouse.package.manifest import Manifest
from glasshouse.runtime.confine import mounts
from glasshouse.runtime.gate.attest import attest, now_us
from glasshouse.runtime.gate.gate_client import Gate
from glasshouse.runtime.gate.head_keeper import HeadKeeper, Trust
from glasshouse.runtime.keys.custodian import Custodian, Regions
from glasshouse.runtime.keys.sealed_log import SealedLog
from glasshouse.runtime.keys.sealing import Outputs, Sealing
from glasshouse.runtime.keys.shared_files import look_before
from glasshouse.runtime.roots import software
from glasshouse.runtime.run import checks, probes
from glasshouse.runtime.run.run_state import Identity, Run
from glasshouse.runtime.watchdog.session_record import SessionRecord
from glasshouse.runtime.watchdog.watchdog import Sentinel
from glasshouse.runtime.worker import gpus, named_directory
from glasshouse.runtime.worker.sandbox import Worker
from glasshouse.runtime.worker.worker_session import Stage, WorkerSession
from glasshouse.wire.kdf import sha256
from glasshouse.wire.policy import GROUP_EGRESS, Assurance
from glasshouse.wire.states import State

__all__ = ["tell"]

SANDBOX_PATIENCE_S = 60.0
IMPORT_PATIENCE_S = 900.0
OPEN_PATIENCE_S = 300.0
EXIT_PATIENCE_S = 15.0
DURATION_GRACE_S = 5.0


def tell(run: Run) -> None:
    """Run the job up to the moment at which its outputs are sealed and the worker is gone.

    Raises:
        GlasshouseError: how it ended otherwise.
    """
    parts = _Parts(run)
    run.shared_before = look_before(now_ns=time.time_ns())
    _check_launch(run, parts)
    _harden(run, parts)
    _attest(run, parts)
    _open(run, parts)
    _work(run, parts)


class _Parts:
    """What the story needs and has from the start, without a None in sight."""

    def __init__(self, run: Run) -> None:
        begun = run.begun
        if not (run.identity and begun.package and begun.package_file and begun.sentinel):
            raise InternalError(Code.INTERNAL, "a story that begins in the middle")
        if not (begun.worker and begun.regions and begun.custodian):
            raise InternalError(Code.INTERNAL, "a story without all its processes")
        self.identity: Identity = run.identity
        self.manifest: Manifest = begun.package.manifest
        self.regions: Regions = begun.regions
        self.custodian: Custodian = begun.custodian
        self.sentinel: Sentinel = begun.sentinel
        self.worker: Worker = begun.worker
        self.sealing = Sealing(
            recipients=self.manifest.recipients,
            run_id=self.identity.launch.run_id,
            manifest_sha256=self.manifest.sha256,
        )

    def session(self, run: Run) -> WorkerSession:
        if run.session is None:
            raise InternalError(Code.INTERNAL, "a worker that was never started")
        return run.session


def _check_launch(run: Run, parts: _Parts) -> None:
    """The package in hand is the one that this launch is for, its owner sent us to this broker, and the ranks fit."""
    group = parts.identity.token.group
    if run.options.ranks != (None if group is None else group.ranks):
        raise UsageError(Code.USAGE, "this launch is for another number of ranks than the runtime was started for")
    if group is not None and group.machines > 1:
        if GROUP_EGRESS not in parts.manifest.floor.egress:
            raise PlatformError(
                Code.POLICY_IMPOSSIBLE,
                "the owner lets nothing leave this job, and its ranks are on several machines",
                hint=f'seal the job with egress = ["{GROUP_EGRESS}"], or run it on one machine',
            )
        if run.begun.relay is None or len(run.options.peers) != group.machines:
            raise UsageError(Code.USAGE, "this runtime was not started with the addresses of all machines of its group")
        run.begun.relay.listen(group.machine)
    if parts.manifest.sha256 != parts.identity.token.manifest_sha256:
        raise PackageError(Code.MANIFEST_MISMATCH, "the package is another than the launch token's")
    parts.identity.launch.check_delegation(
        owner_public=parts.manifest.owner_signing, now_us=now_us(), leeway_us=CLOCK_LEEWAY_S * 1_000_000
    )


def _harden(run: Run, parts: _Parts) -> None:
    """Measure while the worker starts, and observe both processes."""
    run.session = session = _listen_to_worker(run, parts)
    measurement, environment = measure_runtime(), measure_environment()
    run.gpus = gpus.in_sight()
    session.reach(Stage.CONFIRMED, within_s=SANDBOX_PATIENCE_S)
    worker = session.worker
    _demand_workspace(worker, run.begun.least_bytes, disk=parts.manifest.floor.disk)
    if parts.identity.token.group is not None:
        _demand_ranks(worker, parts.identity.token.group.machines)
    group = not worker.own_process_namespace
    if worker.pid is None or not parts.sentinel.watch(worker.pid, init=worker.init_pid, group=group):
        raise RunError(Code.DEBUGGER, "the worker cannot be watched")
    # Before it gets anything: were all its keepers killed, it is found by that. The first process of a namespace ends
    # when all memory in it has gone back, and begins a session of its own, as the worker does elsewhere.
    run.out.worker(_session(worker.pid if group or worker.init_pid is None else worker.init_pid))
    checks.seal_agent()
    session.reach(Stage.READY, within_s=SANDBOX_PATIENCE_S)
    run.report = _observe(run, parts)
    for process, results in (("agent", run.report.agent), ("worker", run.report.worker)):
        for name in sorted(results):
            run.record(EventType.CHECK, {"name": name, "process": process, "result": results[name].value})
    _demand(run.report)
    run.go(State.HARDENED)
    run.lifecycle.since_start("harden")
    run.measurement, run.environment_sha256 = measurement, environment
    for subject, digest in (
        ("environment", environment),
        ("manifest", parts.manifest.sha256),
        ("measurement", measurement.sha256),
        ("token", sha256(parts.identity.launch.token.encode())),
    ):
        run.record(EventType.DIGEST, {"sha256": digest.hex(), "subject": subject})
    run.go(State.MEASURED)


def _listen_to_worker(run: Run, parts: _Parts) -> WorkerSession:
    worker = parts.worker
    session = WorkerSession(
        worker,
        run.loop,
        on_stage=partial(_follow, run),
        on_progress=run.progress,
        on_output=run.output,
        sealing=partial(run.lifecycle.step, "seal_outputs"),
    )
    run.sealed_log = SealedLog(
        (worker.stdout, worker.stderr), run.loop, out=run.out, sealing=parts.sealing, sealed=run.segment
    )
    return session


def _follow(run: Run, stage: Stage) -> None:
    """Record a state as the worker enters it: what it says in the same breath belongs behind that in the log."""
    run.go({Stage.OPENED: State.OPENED, Stage.RUNNING: State.RUNNING}[stage])


def _observe(run: Run, parts: _Parts) -> HardeningReport:
    session = parts.session(run)
    report = session.worker.report
    if report is None:
        raise InternalError(Code.INTERNAL, "a worker without a report")
    secret = parts.regions.grant
    agent = checks.observe_agent(sentinel=parts.sentinel, secret=secret)
    worker = checks.observe_worker(session.worker, sentinel=parts.sentinel, secret=secret)
    return HardeningReport(
        profile=parts.identity.launch.profile,
        anti_debug=anti_debug(agent, worker),
        agent=agent,
        worker=worker,
        workspace=report.workspace,
        secret_memory=secret.kind,
        details=checks.details(session.worker) | _further_details(run, session.worker),
    )


def _further_details(run: Run, worker: Worker) -> dict[str, str | int]:
    # Never both: a relay is for ranks on several machines, and those have a private root.
    if run.begun.relay is not None:
        return {"group-relay": 1}
    return {"workspace-on-disk": 1} if worker.on_disk else {}


# What fails where a file system's server sees what is asked of it.
_FILES = {"worker.landlock", "worker.metadata-closed"}


def _demand(report: HardeningReport) -> None:
    """A profile is claimed only when all its checks hold."""
    lacking = missing(report, report.profile)
    if any(name.endswith((".not-traced", ".watched")) for name in lacking):
        raise RunError(Code.DEBUGGER, "a process of this run is traced, or not watched")
    if lacking:
        raise RefusedError(
            Code.HARDENING_MISSING,
            "this machine lacks what the profile demands",
            hint=f"missing for {report.profile}: {', '.join(lacking)}{_where(report, lacking)}",
        )


def _where(report: HardeningReport, lacking: list[str]) -> str:
    """Return what to do about what the worker would see."""
    if "worker.egress-closed" in lacking and "shown-processes" in report.details:
        return (
            " (other processes are in the worker's sight, and this kernel has no Landlock, which keeps their files "
            "closed; rent a machine with Linux 5.13 or later, or one whose containers may have process namespaces)"
        )
    return _remote(report) if _FILES & {*lacking} else ""


def _remote(report: HardeningReport) -> str:
    """Return what to do where what the worker is shown, or its package, does not lie on this machine."""
    if not mounts.is_remote(report.details):
        return ""
    kinds = ", ".join(sorted(name for name in report.details if mounts.is_remote([name])))
    return (
        f" ({kinds}: a server besides this machine's kernel sees each name that a script looks up there, which "
        "Landlock does not keep it from; put the interpreter, its environment, the model cache and the package on a "
        "local disk of this machine)"
    )


def _session(pid: int) -> SessionRecord:
    try:
        return SessionRecord.of(pid)
    except OSError:
        raise RunError(Code.WORKER_FAILED, "the worker ended before it was confirmed") from None


def _demand_workspace(worker: Worker, least_bytes: int, *, disk: bool) -> None:
    """Where the worker's files can have no mount of their own, memory has room for them, or the owner allows a disk."""
    if worker.report is None or worker.report.workspace is not WorkspaceKind.DIRECTORY:
        return
    in_memory, free_bytes = named_directory.room(worker.named_path)
    if (in_memory or disk) and free_bytes >= least_bytes:
        return
    place = "memory that is there" if not disk else "memory that is there and its disk"
    most = f"{free_bytes / 1e6:.0f} MB" if in_memory or disk else "nothing"
    # The hint is all that is said where the run was started.
    raise PlatformError(
        Code.PLATFORM,
        "this machine lets nothing be mounted, and has too little room for the worker's files",
        hint=f"the job's files take {least_bytes / 1e6:.0f} MB, and {place} has {most}: take another offer or more "
        "GPUs, with which more shared memory comes (docker: --shm-size)"
        + ("" if disk else '; or let them lie on the machine\'s disk: workspace = "disk" in [policy]'),
    )


def _demand_ranks(worker: Worker, machines: int) -> None:
    """Several ranks talk over a network that leads nowhere, or over pairs that they are handed: never the machine's."""
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


def _attest(run: Run, parts: _Parts) -> None:
    launch, key = parts.identity.launch, parts.identity.evidence_key
    run.gate = Gate(launch.broker_url, run.loop)
    hpke_public = parts.custodian.public()
    with run.lifecycle.step("attest"):
        attested = attest(
            loop=run.loop,
            gate=run.gate,
            launch=launch,
            manifest=parts.manifest,
            evidence_key=key,
            attester=partial(_attester, run, parts, hpke_public),
            sent=partial(setattr, run, "evidence"),
        )
    run.evidence, run.release = attested.evidence, attested.release
    for subject, data in (("evidence", attested.evidence), ("ear", attested.release.ear_text.encode())):
        run.record(EventType.DIGEST, {"sha256": sha256(data).hex(), "subject": subject})
    run.go(State.ATTESTED)
    ear = attested.release.ear
    run.keeper = HeadKeeper(
        run.loop,
        run.gate,
        parts.identity.log,
        Trust(broker_public=launch.broker_public, evidence_public=key.public),
        countersigned=run.countersigned,
        trouble=run.notice,
        lease_s=ear.lease_s,
    )
    seconds = min(ear.max_duration_s, run.options.max_seconds or ear.max_duration_s)
    over = RunError(Code.DURATION_EXCEEDED, "the run took longer than it may")
    run.loop.after(seconds, lambda: run.stop(over, grace_s=DURATION_GRACE_S))


def _attester(
    run: Run, parts: _Parts, hpke_public: bytes, challenge: Challenge, time_us: int
) -> tuple[Claims, tuple[Blob, ...]]:
    """Return the claims, and what the root of trust says of their composite."""
    if run.report is None or run.measurement is None or run.environment_sha256 is None:
        raise InternalError(Code.INTERNAL, "claims before there is anything to claim")
    launch = parts.identity.launch
    claims = Claims(
        nonce=challenge.nonce,
        issued_us=time_us,
        started_us=min(run.started_us, time_us),
        manifest_sha256=parts.manifest.sha256,
        package_id=parts.manifest.package_id,
        deployment=parts.identity.token.deployment,
        run_id=launch.run_id,
        container_id=launch.container_id,
        container_source=launch.container_source,
        measurement=run.measurement,
        environment_sha256=run.environment_sha256,
        hardening=run.report,
        state=parts.identity.log.state,
        gpus=run.gpus,
        assurance=Assurance.SOFTWARE,
        hpke_public=hpke_public,
        evidence_public=parts.identity.evidence_key.public,
        token=launch.token,
    )
    return claims, software.collect(composite=composite(claims), nonce=challenge.nonce)


def _open(run: Run, parts: _Parts) -> None:
    """Have the key opened by the custodian, look again at both processes, and hand over the asset keys."""
    session = parts.session(run)
    if run.release is None:
        raise InternalError(Code.INTERNAL, "nothing was released")
    group, relay = parts.identity.token.group, run.begun.relay
    with run.lifecycle.step("release"):
        opened = parts.custodian.open(
            sealed_key=run.release.sealed_key,
            info=run.release.info,
            manifest_sha256=parts.manifest.sha256,
            group=group,
        )
        _drop_public_text(run, parts.regions)
    run.go(State.RELEASED)
    session.reach(Stage.IMPORTED, within_s=IMPORT_PATIENCE_S)
    with run.lifecycle.step("open"):
        _demand(_observe(run, parts))
        run.record(EventType.NOTICE, {"code": "observed-again", "value": None})
        machines = None
        if group is not None and group.machines > 1 and relay is not None:
            machines = group.machine, group.machines, relay.worker_end.fileno()
        # From here on its init counts for how long this process has not come round: not before it has anything.
        session.worker.beat()
        session.give(
            parts.regions.grant.fd,
            parts.regions.grant.size,
            session.worker.package,
            Outputs(run.out, parts.sealing, opened.limits),
            machines=machines,
        )
        session.reach(Stage.OPENED, within_s=OPEN_PATIENCE_S)


def _drop_public_text(run: Run, regions: Regions) -> None:
    """Forget windows of the owner's files that this process holds although it has never seen those files.

    A script may begin as half of all scripts do; finding that in memory at the end would say nothing.
    """
    patterns = ResiduePatterns(regions.patterns.view)
    windows = [window for _, window in patterns]
    own = [regions.grant, regions.patterns, *([] if run.sealed_log is None else [run.sealed_log.memory])]
    try:
        found = probes.scan_self(windows, own=own, between=lambda: run.loop.step(0))
    finally:
        for window in windows:
            window.release()
    patterns.drop(set(found))


def _work(run: Run, parts: _Parts) -> None:
    session = parts.session(run)
    session.reach(Stage.RUNNING, within_s=OPEN_PATIENCE_S)
    begun_us = run.lifecycle.now_us()
    try:
        run.loop.run_until(lambda: session.stage is Stage.FINISHED)
    finally:
        run.lifecycle.worked(run.lifecycle.now_us() - begun_us)
    session.wait_for_end(within_s=EXIT_PATIENCE_S)
    session.end()  # whatever still lives could write to the log for as long as it likes
    if run.sealed_log is not None:
        with run.lifecycle.step("seal_outputs"):
            run.sealed_log.finish()
    if run.stopping is not None:
        raise run.stopping
    run.go(State.SEALED)
