"""The last words of a run: final head, receipt, countersignature, bundle.

Laws: the receipt is signed when everything it speaks of is over; a broker that is away costs it the
countersignature and nothing else, and then it verifies as incomplete.
"""

from __future__ import annotations

from collections.abc import Sequence

from glasshouse.attestation.hardening import HardeningReport
from glasshouse.errors import Code, GlasshouseError, PeerError
from glasshouse.evidence.bundle import Bundle
from glasshouse.evidence.countersignature import CountersignedReceipt, ReceiptAnswer, ReceiptSubmission
from glasshouse.evidence.heads import MAX_HEAD_BYTES
from glasshouse.evidence.receipt import MAX_RECEIPT_BYTES, Receipt
from glasshouse.evidence.results import Loss, Probe, Work
from glasshouse.runtime.gate.attest import now_us
from glasshouse.runtime.run.run_state import Ending, Identity, Run
from glasshouse.runtime.worker.worker_messages import Finished
from glasshouse.wire.canonical import decode
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.kdf import sha256
from glasshouse.wire.policy import Profile
from glasshouse.wire.states import State

__all__ = ["close_books"]

PATIENCE_S = 10.0
# A broker that was away for a whole lease is not expected back in the next seconds.
LOST_PATIENCE_S = 1.0

_MAX_EVIDENCE_BYTES = 256 * 1024
_NONE = "none"


def close_books(run: Run, ending: Ending, answers: Sequence[Probe]) -> None:
    """Write how the run ended, as far as there is anybody to tell.

    Raises:
        GlasshouseError: the log or the folder cannot be written.
    """
    if run.identity is None:
        return
    log = run.identity.log
    log.transition(State.ZEROIZED, outcome=ending.outcome, code=ending.code)
    patience_s = LOST_PATIENCE_S if ending.code is Code.LEASE_LOST else PATIENCE_S
    head, in_time = _final_head(run, run.identity, patience_s)
    receipt = _receipt(run, run.identity, ending, answers)
    signed = receipt.sign(run.identity.evidence_key, None if run.release is not None else run.identity.launch.key())
    answer = _countersigned(run, run.identity, receipt=signed) if in_time else None
    bundle = Bundle(
        delegation=run.identity.launch.delegation if answer is None else answer[1],
        manifest=None if run.begun.package is None else Envelope.parse(run.begun.package.envelope, max_bytes=1 << 20),
        token=run.identity.launch.token,
        evidence=None if run.evidence is None else decode(run.evidence, max_bytes=_MAX_EVIDENCE_BYTES),
        ear=None if run.release is None else run.release.ear_text,
        head=head,
        receipt=Envelope.parse(signed, max_bytes=MAX_RECEIPT_BYTES),
        countersignature=None if answer is None else answer[0].envelope,
    )
    run.out.receipt(bundle.encode())


def _final_head(run: Run, identity: Identity, patience_s: float) -> tuple[Envelope, bool]:
    """Return the final head, countersigned if the broker answers in time."""
    if run.keeper is not None and run.keeper.finish(patience_s) and run.keeper.last is not None:
        return run.keeper.last.envelope, True
    return Envelope.parse(identity.log.head(), max_bytes=MAX_HEAD_BYTES), False


def _countersigned(run: Run, identity: Identity, *, receipt: bytes) -> tuple[CountersignedReceipt, Envelope] | None:
    """Have the receipt countersigned; None when the broker is away or cannot be believed."""
    if run.gate is None or run.keeper is None or run.keeper.last is None:
        return None
    body = ReceiptSubmission(receipt=receipt, head=run.keeper.last_signed).encode()
    give_up_s, wait_s = run.loop.now_s() + PATIENCE_S, 0.2
    while True:
        try:
            answer = ReceiptAnswer.parse(run.gate.post("/v1/receipt", body))
            found = CountersignedReceipt.parse_signed(
                answer.countersignature, broker_public=identity.launch.broker_public
            )
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


def _receipt(run: Run, identity: Identity, ending: Ending, answers: Sequence[Probe]) -> Receipt:
    token, release, report = identity.token, run.release, run.report
    finished = run.session.finished if run.session is not None else None
    return Receipt(
        run_id=token.run_id,
        deployment=token.deployment,
        package_id=token.package_id,
        workload=_NONE if run.begun.package is None else run.begun.package.manifest.workload,
        manifest_sha256=token.manifest_sha256,
        floor_sha256=token.floor_sha256,
        policy_sha256=token.policy_sha256,
        evidence_sha256=None if run.evidence is None else sha256(run.evidence),
        ear_sha256=None if release is None else sha256(release.ear_text.encode()),
        evidence_public=identity.evidence_key.public,
        assurance=None if release is None else release.ear.assurance,
        profile=Profile.OFF if report is None else report.profile,
        workspace=_means(report)[0],
        secret_memory=_means(report)[1],
        measurement=None if run.measurement is None else run.measurement.sha256,
        environment_sha256=run.environment_sha256,
        log_root=identity.log.root,
        log_size=identity.log.size,
        work=_work(finished),
        loss=None
        if finished is None or finished.loss is None
        else Loss(first=finished.loss.first, final=finished.loss.final),
        trainable=None if finished is None else finished.trainable,
        outputs=tuple(run.outputs),
        segments=run.segments,
        zeroization=tuple(answers),
        lifecycle_us=run.lifecycle.to_json(),
        training_imports_us=None if run.session is None else run.session.imports_us,
        outcome=ending.outcome,
        code=ending.code,
        started_us=run.started_us,
        finished_us=max(run.started_us, now_us()),
    )


def _means(report: HardeningReport | None) -> tuple[str, str]:
    return (_NONE, _NONE) if report is None else (report.workspace.value, report.secret_memory.value)


def _work(finished: Finished | None) -> Work | None:
    if finished is None:
        return None
    work = finished.work
    return Work(unit=work.unit, done=work.done, elapsed_us=work.elapsed_us, stop_reason=work.stop_reason)
