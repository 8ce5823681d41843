"""The end of every run, however it came about, always in this order (spec/protocol.md, Evidence):

worker gone → keys wiped → probes → `zeroized` event → final head → receipt signed → countersigned →
bundle written → evidence key dropped.

Laws: no step is left out because one before it failed; what failed makes a run that had completed a
failed one; the keys are gone before anything is recorded about them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TypeVar

from glasshouse.attestation.claims import CheckResult, WorkspaceKind
from glasshouse.custodian.residue_patterns import ResiduePatterns
from glasshouse.errors import Code, GlasshouseError, PeerError
from glasshouse.evidence.bundle import Bundle, CountersignedReceipt, HardwareParts, ReceiptAnswer, ReceiptSubmission
from glasshouse.evidence.events import EventType, ProbeResult
from glasshouse.evidence.heads import MAX_HEAD_BYTES
from glasshouse.evidence.receipt import MAX_RECEIPT_BYTES, Leg, Loss, Probe, Receipt
from glasshouse.runtime.gate.attest import now_us
from glasshouse.runtime.keys.shared_files import Before
from glasshouse.runtime.run import probes
from glasshouse.runtime.run.run_state import Ending, Run, RunIdentity
from glasshouse.wire.canonical import decode
from glasshouse.wire.crypto import sha256
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.policy import Profile
from glasshouse.wire.states import Outcome, State

PATIENCE_S = 10.0
# A broker that was away for a whole lease is not expected back in the next seconds.
LOST_PATIENCE_S = 1.0

_MAX_EVIDENCE_BYTES = 256 * 1024
_NONE = "none"
_T = TypeVar("_T")


class _Steps:
    """Runs steps one after the other, whatever becomes of each."""

    def __init__(self) -> None:
        self.failed: Code | None = None

    def do(self, step: Callable[[], _T]) -> _T | None:
        try:
            return step()
        except GlasshouseError as error:
            self.failed = self.failed or error.code
        except Exception:
            self.failed = self.failed or Code.INTERNAL
        return None

    def raise_failed(self) -> None:
        if self.failed is not None:
            raise GlasshouseError(self.failed, "a step of zeroization failed")


def end_run(run: Run, ending: Ending) -> Ending:
    """End a run whose work ended as `ending`, whatever there is of it; return how it ended with all of this."""
    run.ending = ending
    if run.processes.watchdog is not None:
        # It watches to the end; an alarm from here on changes nothing that could still be done.
        run.loop.unwatch(run.processes.watchdog.alarm_fd)
    steps = _Steps()
    with run.times.step("zeroize"):
        steps.do(lambda: _announce(run, ending))
        steps.do(lambda: _end_worker(run))
        steps.do(lambda: _wipe_keys(run))
        answers = steps.do(lambda: _probe(run)) or [
            Probe(probe="zeroization", result=ProbeResult.UNVERIFIABLE, detail="probes-failed")
        ]
        steps.do(lambda: _wipe_patterns(run))
    final = ending
    if any(answer.result is ProbeResult.FOUND for answer in answers):
        final = Ending(outcome=Outcome.RESIDUE, code=Code.RESIDUE_FOUND)
    elif steps.failed is not None and ending.outcome is Outcome.COMPLETED:
        final = Ending(outcome=Outcome.FAILED, code=steps.failed)
    run.ending = final
    last = _Steps()
    last.do(lambda: write_receipt(run, final, answers))
    last.do(lambda: _forget(run))
    if last.failed is not None and final.outcome is Outcome.COMPLETED:
        # For what waits on this process: a run whose receipt cannot be written has not ended well.
        return Ending(outcome=Outcome.FAILED, code=last.failed)
    return final


def _announce(run: Run, ending: Ending) -> None:
    if run.identity is None:
        return
    log = run.identity.log
    if log.state is not State.ZEROIZING:
        log.transition(State.ZEROIZING, code=ending.code)
    if run.heads is not None:
        run.heads.rest()
    run.out.give_reserve()


def _end_worker(run: Run) -> None:
    """Leave nothing of the worker, but what it printed, sealed: there is why it failed."""
    steps = _Steps()
    worker = run.processes.worker
    if run.session is not None:
        steps.do(run.session.end)
    elif worker is not None:
        steps.do(worker.end)
    if run.leg is not None:
        steps.do(run.leg.close)
    if run.processes.relay is not None:
        steps.do(run.processes.relay.stop)
    if run.collecting is not None:
        steps.do(run.collecting.close)
    if run.sealed_log is not None:
        steps.do(run.sealed_log.finish)
        run.sealed_log.wipe()
    if worker is None or not worker.lives():
        steps.do(run.out.worker_gone)
    steps.raise_failed()


def _wipe_keys(run: Run) -> None:
    steps = _Steps()
    if run.processes.custodian is not None:
        steps.do(run.processes.custodian.dismiss)
    if run.processes.regions is not None:
        steps.do(run.processes.regions.grant.wipe)
    # Ciphers keep copies of their keys and cleanse them when they are deleted; the session held the sealers.
    if run.session is not None:
        run.session.outputs = run.session.parts = None
    gc.collect()
    steps.raise_failed()


def _probe(run: Run) -> list[Probe]:
    windows: list[memoryview] = []
    worker, regions = run.processes.worker, run.processes.regions
    if regions is not None:
        windows = [window for _, window in ResiduePatterns(regions.patterns.view)]
    agent, other = (run.report.agent, run.report.worker) if run.report is not None else ({}, {})
    answers = [
        probes.probe_workspace(worker),
        probes.probe_shared_memory(windows, before=_shared_before(run)),
        probes.probe_swap(
            agent=agent.get("no-swap", CheckResult.UNAVAILABLE), worker=other.get("no-swap", CheckResult.UNAVAILABLE)
        ),
        probes.probe_gpu(worker.pid if worker is not None else None),
    ]
    if regions is not None:
        wiped = [regions.grant, *([] if run.sealed_log is None else [run.sealed_log.memory])]
        answers.insert(0, probes.probe_memory(windows, wiped=wiped, needle_memory=regions.patterns))
    for window in windows:
        window.release()
    for answer in answers:
        run.record(EventType.PROBE, {"detail": answer.detail, "probe": answer.probe, "result": answer.result.value})
    return answers


def _shared_before(run: Run) -> Before:
    """Return what needs no search in shared memory: where the worker saw the machine's, that is nothing.

    A write through a mapping may leave a file's times as they were; only the worker of a run maps any.
    """
    report = run.processes.worker.report if run.processes.worker is not None else None
    return run.shared_before if report is not None and report.workspace is not WorkspaceKind.DIRECTORY else {}


def _wipe_patterns(run: Run) -> None:
    if run.processes.regions is not None:
        run.processes.regions.wipe()


def _forget(run: Run) -> None:
    """Drop the last keys and the watchdog; the process ends right after this."""
    if run.processes.watchdog is not None:
        run.processes.watchdog.stop()
    run.identity = run.gate = run.heads = run.leg = None
    if run.processes.regions is not None:
        run.processes.regions.close()
    if run.sealed_log is not None:
        run.sealed_log.memory.close()
    if run.processes.package_file is not None:
        run.processes.package_file.close()
    gc.collect()


def write_receipt(run: Run, ending: Ending, answers: Sequence[Probe]) -> None:
    """Write how the run ended; nothing where it never had a launch; raises `GlasshouseError`."""
    if run.identity is None:
        return
    launch, log, package = run.identity.launch, run.identity.log, run.processes.package
    log.transition(State.ZEROIZED, outcome=ending.outcome, code=ending.code)
    head, answer = Envelope.parse(log.head(), max_bytes=MAX_HEAD_BYTES), None
    patience_s = LOST_PATIENCE_S if ending.code is Code.LEASE_LOST else PATIENCE_S
    in_time = run.heads is not None and run.heads.finish(patience_s) and run.heads.last is not None
    receipt = _receipt(run, run.identity, ending, answers)
    signed = receipt.sign(run.identity.evidence_key, None if run.release is not None else launch.key())
    if in_time and run.heads is not None and run.heads.last is not None:
        head = run.heads.last.envelope
        answer = _countersigned(run, signed, run.heads.last_signed, broker_public=launch.broker_public)
    bundle = Bundle(
        delegation=launch.delegation if answer is None else answer[1],
        manifest=None if package is None else Envelope.parse(package.envelope, max_bytes=1 << 20),
        token=launch.token,
        evidence=None if run.evidence is None else decode(run.evidence, max_bytes=_MAX_EVIDENCE_BYTES),
        ear=None if run.release is None else run.release.ear_text,
        head=head,
        receipt=Envelope.parse(signed, max_bytes=MAX_RECEIPT_BYTES),
        countersignature=None if answer is None else answer[0].envelope,
        # Policy and collateral are put in where its owner's are.
        hardware=HardwareParts(blobs=run.hardware) if run.hardware else None,
    )
    run.out.receipt(bundle.encode())


def _countersigned(
    run: Run, receipt: bytes, head: bytes, *, broker_public: bytes
) -> tuple[CountersignedReceipt, Envelope] | None:
    """Have the receipt countersigned; None when the broker is away or its answer is not about this receipt."""
    if run.gate is None:
        return None
    body = ReceiptSubmission(receipt=receipt, head=head).encode()
    give_up_s, wait_s = run.loop.now_s() + PATIENCE_S, 0.2
    while True:
        try:
            answer = ReceiptAnswer.parse(run.gate.post("/v1/receipt", body))
            found = CountersignedReceipt.parse_signed(answer.countersignature, broker_public)
            if found.receipt_sha256 != sha256(receipt):
                return None
            return found, Envelope.parse(answer.delegation, max_bytes=MAX_RECEIPT_BYTES)
        except PeerError:
            if run.loop.now_s() + wait_s > give_up_s:
                return None
        except GlasshouseError:
            return None
        run.loop.sleep(wait_s)
        wait_s *= 2


def _receipt(run: Run, identity: RunIdentity, ending: Ending, answers: Sequence[Probe]) -> Receipt:
    token, release, report, session = identity.token, run.release, run.report, run.session
    finished = session.finished if session is not None else None
    loss = finished.loss if finished is not None else None
    return Receipt(
        run_id=token.run_id,
        deployment=token.deployment,
        package_id=token.package_id,
        workload=_NONE if run.processes.package is None else run.processes.package.manifest.workload,
        manifest_sha256=token.manifest_sha256,
        floor_sha256=token.floor_sha256,
        policy_sha256=token.policy_sha256,
        evidence_sha256=None if run.evidence is None else sha256(run.evidence),
        ear_sha256=None if release is None else sha256(release.ear_text.encode()),
        evidence_public=identity.evidence_key.public,
        assurance=None if release is None else release.ear.assurance,
        profile=Profile.OFF if report is None else report.profile,
        workspace=_NONE if report is None else report.workspace.value,
        secret_memory=_NONE if report is None else report.secret_memory.value,
        measurement=None if run.measurement is None else run.measurement.sha256,
        environment_sha256=run.environment_sha256,
        log_root=identity.log.root,
        log_size=identity.log.size,
        work=None if finished is None else finished.work,
        loss=None if loss is None else Loss(first=loss.first, final=loss.final),
        trainable=None if finished is None else finished.trainable,
        outputs=tuple(run.outputs),
        segments=run.segments,
        zeroization=tuple(answers),
        lifecycle_us=run.times.to_json(),
        training_imports_us=None if session is None else session.imports_us,
        outcome=ending.outcome,
        code=ending.code,
        started_us=run.started_us,
        finished_us=max(run.started_us, now_us()),
        line=None if release is None else _leg(run, identity),
    )


def _leg(run: Run, identity: RunIdentity) -> Leg | None:
    line = identity.token.line
    if line is None:
        return None
    stated = {member.name: getattr(line, member.name) for member in fields(line)}
    return Leg(**stated, last=None if run.leg is None else run.leg.last)
