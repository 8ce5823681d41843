"""What a played runtime reports after its release: heads of a real log, and a receipt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from glasshouse.broker.client.owner_client import Reply
from glasshouse.errors import Code
from glasshouse.evidence.bundle import ReceiptSubmission
from glasshouse.evidence.events import ProbeResult
from glasshouse.evidence.heads import HeadSubmission
from glasshouse.evidence.log import EventLog
from glasshouse.evidence.receipt import LIFECYCLE, RECEIPT_TYPE, Output, Probe, Receipt
from glasshouse.tamper.stage import Actor, clock_us
from glasshouse.wire import dsse
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.policy import Assurance
from glasshouse.wire.states import Outcome, State


def release_to(actor: Actor) -> bytes:
    """Go through the whole exchange and return the package key."""
    challenge = actor.challenge()
    evidence = actor.sign(actor.claims(challenge))
    return actor.open(actor.send(evidence).content(), challenge, evidence)


class Reporter:
    """Keeps a log and sends what stands in it.

    Args:
        actor: whose log it is.
        sink: takes the lines of the log.
    """

    def __init__(self, actor: Actor, sink: Callable[[bytes], object] = lambda _line: None) -> None:
        self.actor = actor
        self.log = EventLog(run_id=actor.launch.run_id, evidence_key=actor.evidence, clock_us=clock_us, sink=sink)
        self.confirmed = 0
        self.final = b""

    def go_on(self, *states: State) -> None:
        for state in states:
            self.log.transition(state)

    def end(self) -> None:
        self.log.transition(State.ZEROIZING, code=Code.INTERRUPTED)
        self.log.transition(State.ZEROIZED, outcome=Outcome.INTERRUPTED, code=Code.INTERRUPTED)

    def submission(self) -> bytes:
        self.final = self.log.head()
        return HeadSubmission(
            head=self.final, proof=tuple(self.log.consistency(self.confirmed, self.log.size))
        ).encode()

    def send(self, submission: bytes) -> Reply:
        reply = self.actor.post("/v1/heads", submission)
        if reply.status == 200:
            self.confirmed = self.log.size
        return reply

    def receipt(self, *, finished_us: int | None = None, outputs: Sequence[Output] = ()) -> bytes:
        """Return the submission of this run's receipt."""
        return self.submit(self.signed_receipt(finished_us=finished_us, outputs=outputs))

    def signed_receipt(self, *, finished_us: int | None = None, outputs: Sequence[Output] = ()) -> Envelope:
        actor, manifest, now_us = self.actor, self.actor.owner.manifest, clock_us()
        receipt = Receipt(
            run_id=actor.launch.run_id,
            deployment=actor.owner.deployment,
            package_id=manifest.package_id,
            workload=manifest.workload,
            manifest_sha256=manifest.sha256,
            floor_sha256=manifest.floor.sha256,
            policy_sha256=actor.launch.claims().policy_sha256,
            evidence_sha256=bytes(32),
            ear_sha256=bytes(32),
            evidence_public=actor.evidence.public,
            assurance=Assurance.SOFTWARE,
            profile=actor.launch.profile,
            workspace="tmpfs-noswap",
            secret_memory="memfd-secret",
            measurement=bytes(32),
            environment_sha256=bytes(32),
            log_root=self.log.root,
            log_size=self.log.size,
            work=None,
            loss=None,
            trainable=None,
            outputs=tuple(outputs),
            segments=0,
            zeroization=(Probe(probe="agent-memory", result=ProbeResult.CLEAN),),
            lifecycle_us=dict.fromkeys(LIFECYCLE),
            training_imports_us=None,
            outcome=Outcome.INTERRUPTED,
            code=Code.INTERRUPTED,
            started_us=now_us - 1000,
            finished_us=finished_us or now_us,
        )
        return dsse.sign(RECEIPT_TYPE, receipt.encode(), [actor.evidence])

    def submit(self, receipt: Envelope) -> bytes:
        """Return the submission of whatever calls itself a receipt, beside the last head."""
        return ReceiptSubmission(receipt=receipt.encode(), head=self.final).encode()
