"""The last steps of a run: final head, receipt, countersignature, bundle.

Laws: the receipt is signed when everything that it states is over; a broker that is away costs it the
countersignature and nothing else, and then it verifies as incomplete.
"""

from __future__ import annotations

from collections.abc import Sequence

from glasshouse.errors import Code, GlasshouseError, PeerError
from glasshouse.evidence.bundle import Bundle
from glasshouse.evidence.countersignature import CountersignedReceipt, ReceiptAnswer, ReceiptSubmission
from glasshouse.evidence.heads import MAX_HEAD_BYTES
from glasshouse.evidence.receipt import MAX_RECEIPT_BYTES, Receipt
from glasshouse.evidence.results import Loss, Probe
from glasshouse.runtime.gate.attest import now_us
from glasshouse.runtime.run.run_state import Ending, Run, RunIdentity
from glasshouse.wire.canonical import decode
from glasshouse.wire.crypto import sha256
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.policy import Profile
from glasshouse.wire.states import State

PATIENCE_S = 10.0
# A broker that was away for a whole lease is not expected back in the next seconds.
LOST_PATIENCE_S = 1.0

_MAX_EVIDENCE_BYTES = 256 * 1024
_NONE = "none"


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
    )
