"""The life of a run, top to bottom, from the moment at which its processes exist (`start_processes`).

Read the launch file → check it → harden and measure → attest → open the release → work. Whatever raises on the way
leads to the end (`zeroize.end_run`: worker gone, keys wiped, probes, receipt).
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from functools import partial
from typing import BinaryIO

from glasshouse.attestation.claims import Claims, HardeningReport, anti_debug
from glasshouse.attestation.measurements.measured import Measured
from glasshouse.attestation.measurements.measurement import measure_environment, measure_runtime
from glasshouse.custodian.exchange import Request
from glasshouse.custodian.residue_patterns import ResiduePatterns
from glasshouse.errors import Code, PeerError, RunError, UsageError
from glasshouse.evidence.events import EventType
from glasshouse.evidence.log import EventLog
from glasshouse.handshake.launch import MAX_LAUNCH_BYTES, LaunchFile
from glasshouse.handshake.messages import Challenge
from glasshouse.package.manifest import Manifest
from glasshouse.runtime import gpus
from glasshouse.runtime.gate.attest import attest, now_us
from glasshouse.runtime.gate.broker_client import BrokerClient
from glasshouse.runtime.gate.head_keeper import HeadKeeper
from glasshouse.runtime.keys.sealed_log import SealedLog
from glasshouse.runtime.keys.sealing import Outputs, Sealing
from glasshouse.runtime.keys.shared_files import look_before
from glasshouse.runtime.roots.collectors import Collecting
from glasshouse.runtime.run import checks, probes
from glasshouse.runtime.run.demands import demand_launch, demand_profile, demand_ranks, demand_workspace
from glasshouse.runtime.run.run_state import Run, RunIdentity, have
from glasshouse.runtime.run.start_processes import seal_agent
from glasshouse.runtime.watchdog.session_record import SessionRecord
from glasshouse.runtime.worker.worker_session import Stage, WorkerSession
from glasshouse.wire.crypto import SigningKey, sha256
from glasshouse.wire.states import State

LAUNCH_PATIENCE_S = 120.0
SANDBOX_PATIENCE_S = 60.0
IMPORT_PATIENCE_S = 900.0
OPEN_PATIENCE_S = 300.0
EXIT_PATIENCE_S = 15.0
DURATION_GRACE_S = 5.0
# How a job itself fails, or the hardware beneath it: no reason to wipe a moment sooner.
_OF_THE_JOB = frozenset({Code.SCRIPT_FAILED, Code.OUT_OF_MEMORY, Code.NONFINITE_LOSS, Code.RANK_LOST})


def live(run: Run, stdin: BinaryIO) -> None:
    """Run the job whose launch file is all of `stdin`, up to its sealed outputs; whatever is raised ends the run."""
    launch, key = _read_launch(run, stdin), SigningKey.generate()
    log = EventLog(run_id=launch.run_id, evidence_key=key, clock_us=now_us, sink=partial(run.write, run.out.event))
    run.identity = identity = RunIdentity(launch=launch, token=launch.claims(), evidence_key=key, log=log)
    if run.processes.error is not None:
        raise run.processes.error
    manifest = have(run.processes.package).manifest
    run.shared_before = look_before(now_ns=time.time_ns())
    try:
        # While the worker starts, and the custodian makes its key.
        measured = measure_runtime(), measure_environment()
    finally:
        # Before anything is refused: with its key the custodian leaves the pattern that the memory is searched for.
        hpke_public = have(run.processes.custodian).public()
    demand_launch(run.options, run.processes.relay, launch, identity.token, manifest)
    _harden(run, identity, manifest, *measured)
    _attest(run, identity, manifest, hpke_public)
    try:
        _open(run, identity, manifest)
        _work(run)
    except RunError as error:
        # What the worker did may have come at once, from its first word to its failure.
        if run.leg is not None and error.code in _OF_THE_JOB:
            have(run.session).end()
            run.leg.finish()  # what it had saved is what it can go on from
        raise


def _read_launch(run: Run, stdin: BinaryIO) -> LaunchFile:
    """Read standard input to its end, in the loop: what holds the other end may take its time."""
    pieces: list[bytes] = []
    descriptor = stdin.fileno()

    def done() -> bool:
        return bool(pieces) and (not pieces[-1] or sum(map(len, pieces)) > MAX_LAUNCH_BYTES)

    run.loop.watch(descriptor, lambda: pieces.append(os.read(descriptor, MAX_LAUNCH_BYTES + 1)))
    in_time = run.loop.run_until(done, within_s=LAUNCH_PATIENCE_S)
    run.loop.unwatch(descriptor)
    if not in_time:
        raise UsageError(Code.USAGE, "no launch file came over standard input")
    return LaunchFile.parse(b"".join(pieces))


def _sealing(identity: RunIdentity, manifest: Manifest) -> Sealing:
    return Sealing(recipients=manifest.recipients, run_id=identity.launch.run_id, manifest_sha256=manifest.sha256)


def _harden(run: Run, identity: RunIdentity, manifest: Manifest, measurement: Measured, environment: bytes) -> None:
    """Take the worker over once it is confined, and observe both processes."""
    watchdog, worker = have(run.processes.watchdog), have(run.processes.worker)
    run.session = session = WorkerSession(
        worker,
        run.loop,
        # At once: what the worker sends behind it belongs behind that in the log.
        on_stage=lambda stage: run.enter(State.OPENED if stage is Stage.OPENED else State.RUNNING),
        on_progress=lambda progress: run.record(EventType.PROGRESS, asdict(progress)),
        on_output=run.output,
        sealing=partial(run.times.step, "seal_outputs"),
    )
    streams = worker.stdout, worker.stderr
    run.sealed_log = SealedLog(streams, run.loop, out=run.out, sealing=_sealing(identity, manifest), sealed=run.segment)
    run.gpus = gpus.in_sight()
    # Its devices are opened while this process may still do all that it was started with.
    run.collecting = Collecting(identity.launch.hardware)
    run.collecting.prepare()
    session.reach(Stage.CONFIRMED, within_s=SANDBOX_PATIENCE_S)
    demand_workspace(worker, run.processes.least_bytes, disk=manifest.floor.disk)
    if identity.token.group is not None:
        demand_ranks(worker, identity.token.group.machines)
    group = not worker.own_process_namespace
    if worker.pid is None or not watchdog.watch(worker.pid, init=worker.init_pid, group=group):
        raise RunError(Code.DEBUGGER, "the worker cannot be watched")
    # Before it gets anything: were all its keepers killed, it is found by that. The first process of a namespace ends
    # when all memory in it has gone back, and begins a session of its own, as the worker does elsewhere.
    try:
        session_of = SessionRecord.of(worker.pid if group or worker.init_pid is None else worker.init_pid)
    except OSError:
        raise RunError(Code.WORKER_FAILED, "the worker ended before it was confirmed") from None
    run.out.worker(session_of)
    seal_agent()
    session.reach(Stage.READY, within_s=SANDBOX_PATIENCE_S)
    run.report = _observe(run, identity)
    for process, results in (("agent", run.report.agent), ("worker", run.report.worker)):
        for name in sorted(results):
            run.record(EventType.CHECK, {"name": name, "process": process, "result": results[name].value})
    demand_profile(run.report)
    run.enter(State.HARDENED)
    run.times.since_start("harden")
    run.measurement, run.environment_sha256 = measurement, environment
    _record_digests(
        run,
        environment=environment,
        manifest=manifest.sha256,
        measurement=measurement.sha256,
        token=sha256(identity.launch.token.encode()),
    )
    run.enter(State.MEASURED)


def _record_digests(run: Run, **digests: bytes) -> None:
    for subject, digest in digests.items():
        run.record(EventType.DIGEST, {"sha256": digest.hex(), "subject": subject})


def _observe(run: Run, identity: RunIdentity) -> HardeningReport:
    worker, secret = have(run.session).worker, have(run.processes.regions).grant
    of_agent = checks.observe_agent(watchdog=run.processes.watchdog, secret=secret)
    of_worker = checks.observe_worker(worker, watchdog=run.processes.watchdog, secret=secret)
    details = checks.details(worker)
    # Never both: a relay is for ranks on several machines, and those have a private root.
    if run.processes.relay is not None:
        details["group-relay"] = 1
    elif worker.on_disk:
        details["workspace-on-disk"] = 1
    return HardeningReport(
        profile=identity.launch.profile,
        anti_debug=anti_debug(of_agent, of_worker),
        agent=of_agent,
        worker=of_worker,
        workspace=have(worker.report).workspace,
        secret_memory=secret.kind,
        details=details,
    )


def _attest(run: Run, identity: RunIdentity, manifest: Manifest, hpke_public: bytes) -> None:
    """Obtain the release, and from then on publish the log's heads to the broker."""
    launch, key, collecting = identity.launch, identity.evidence_key, have(run.collecting)
    run.gate = BrokerClient(launch.broker_url, run.loop)

    def attester(challenge: Challenge, time_us: int) -> tuple[Claims, dict[str, bytes]]:
        claims = Claims(
            nonce=challenge.nonce,
            issued_us=time_us,
            started_us=min(run.started_us, time_us),
            manifest_sha256=manifest.sha256,
            package_id=manifest.package_id,
            deployment=identity.token.deployment,
            run_id=launch.run_id,
            container_id=launch.container_id,
            container_source=launch.container_source,
            measurement=have(run.measurement),
            environment_sha256=have(run.environment_sha256),
            hardening=have(run.report),
            state=identity.log.state,
            gpus=run.gpus,
            assurance=launch.assurance,
            hpke_public=hpke_public,
            evidence_public=key.public,
            token=launch.token,
        )
        return claims, collecting.collect(claims, challenge.credential)

    def sent(evidence: bytes, hardware: tuple[bytes, ...]) -> None:
        run.evidence, run.hardware = evidence, hardware

    with run.times.step("attest"):
        run.evidence, run.release, since_s = attest(
            loop=run.loop,
            gate=run.gate,
            launch=launch,
            manifest=manifest,
            evidence_key=key,
            attester=attester,
            tpm=collecting.keys,
            sent=sent,
        )
    collecting.close()
    _record_digests(run, evidence=sha256(run.evidence), ear=sha256(run.release.ear_text.encode()))
    run.enter(State.ATTESTED)
    ear = run.release.ear
    run.heads = HeadKeeper(
        run.loop,
        run.gate,
        identity.log,
        broker_public=launch.broker_public,
        evidence_public=key.public,
        countersigned=partial(run.write, run.out.head),
        trouble=lambda code: run.notice(code.value),
        lease_s=ear.lease_s,
        since_s=since_s,
        leg=ear.line is not None,
    )
    seconds = min(ear.max_duration_s, run.options.max_seconds or ear.max_duration_s)
    over = RunError(Code.DURATION_EXCEEDED, "the run took longer than it may")
    run.loop.after(seconds, lambda: run.stop(over, grace_s=DURATION_GRACE_S))


def _open(run: Run, identity: RunIdentity, manifest: Manifest) -> None:
    """Have the release opened by the custodian, observe both processes again, and hand over the asset keys."""
    session, release, regions = have(run.session), have(run.release), have(run.processes.regions)
    group, relay, line = identity.token.group, run.processes.relay, release.ear.line
    with run.times.step("release"):
        if line is not None:
            from glasshouse.runtime.lines.leg_run import LegRun  # few runs have a line

            run.leg = LegRun(
                run.loop,
                have(run.gate),
                run.out,
                identity.launch,
                manifest,
                line,
                evidence_key=identity.evidence_key,
                environment_sha256=have(run.environment_sha256),
                lease_s=release.ear.lease_s,
                record=run.record,
                notice=run.notice,
                tell=session.tell,
            )
            run.leg.hand_over(regions.checkpoint)
        opened = have(run.processes.custodian).open(
            Request(
                deployment=identity.token.deployment,
                group=group,
                info=release.info,
                line=line,
                manifest_sha256=manifest.sha256,
                sealed_key=release.sealed_key,
            )
        )
        _drop_public_text(run)
    if (line is None) != (opened.checkpoints is None):
        raise PeerError(Code.RELEASE_INVALID, "the broker's release is a leg for a job without checkpoints, or none")
    run.enter(State.RELEASED)
    if run.leg is not None:
        with run.times.step("open"):
            run.leg.fetch()  # while the worker imports
    session.reach(Stage.IMPORTED, within_s=IMPORT_PATIENCE_S)
    with run.times.step("open"):
        demand_profile(_observe(run, identity))
        run.notice("observed-again")
        machines = None
        if group is not None and group.machines > 1 and relay is not None:
            machines = group.machine, group.machines, relay.worker_end.fileno()
        # From here on its init counts for how long this process is silent: not before it has anything.
        session.worker.beat()
        session.give(
            regions.grant.fd,
            regions.grant.size,
            session.worker.package,
            Outputs(run.out, _sealing(identity, manifest), opened.limits),
            parts=None if run.leg is None else run.leg.begin(opened),
            resumed=None if run.leg is None else run.leg.resumed,
            machines=machines,
        )
        if run.leg is not None:
            run.leg.permit()
        session.reach(Stage.OPENED, within_s=OPEN_PATIENCE_S + (0.0 if run.leg is None else run.leg.restoring_s))
        if run.leg is not None:
            run.leg.restored()


def _drop_public_text(run: Run) -> None:
    """Drop patterns of the owner's files that this process holds although it has never seen those files.

    A script may begin as half of all scripts do; finding that in memory at the end would mean nothing.
    """
    regions = have(run.processes.regions)
    patterns = ResiduePatterns(regions.patterns.view)
    windows = [window for _, window in patterns]
    own = [regions.grant, regions.patterns, have(run.sealed_log).memory]
    try:
        found = probes.scan_self(windows, own=own, between=lambda: run.loop.step(0))
    finally:
        for window in windows:
            window.release()
    patterns.drop(set(found))


def _work(run: Run) -> None:
    """Wait until the outputs are sealed and the worker is gone."""
    session = have(run.session)
    session.reach(Stage.RUNNING, within_s=OPEN_PATIENCE_S)
    begun_us = run.times.now_us()
    try:
        run.loop.run_until(lambda: session.stage is Stage.FINISHED)
    finally:
        run.times.work_us = run.times.now_us() - begun_us
    if run.leg is not None:
        run.leg.finish()
    session.wait_for_end(within_s=EXIT_PATIENCE_S)
    session.end()  # whatever still lives could write to the log for as long as it likes
    with run.times.step("seal_outputs"):
        have(run.sealed_log).finish()
    if run.stopping is not None:
        raise run.stopping
    run.enter(State.SEALED)
