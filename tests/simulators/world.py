"""A world in memory: an owner, a broker and a runtime that tell a whole run, without a process or a socket.

Everything is real but the time and the entropy: keys come from names, so a world is the same every time.
The runtime's keys are open to tests, because an attacker who owns the machine has them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from glasshouse.attestation.claims import (
    CHECKS,
    CheckResult,
    Claims,
    ContainerSource,
    HardeningReport,
    SecretMemoryKind,
    WorkspaceKind,
)
from glasshouse.attestation.measurements.measured import References
from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.errors import Code
from glasshouse.evidence.bundle import Bundle, CountersignedReceipt, countersign_receipt
from glasshouse.evidence.events import EventType, ProbeResult
from glasshouse.evidence.heads import CountersignedHead, countersign
from glasshouse.evidence.log import EventLog
from glasshouse.evidence.receipt import Loss, Output, Probe, Receipt, Work
from glasshouse.handshake import broker_side, runtime_side
from glasshouse.handshake.delegation import RUN_USES, Delegation
from glasshouse.handshake.launch import TokenClaims, issue_token
from glasshouse.handshake.messages import Challenge, ReleaseMessage
from glasshouse.handshake.records import DeploymentRecord
from glasshouse.jobs.verify.run_files import verify_log_beside
from glasshouse.jobs.verify.verdict import Verdict
from glasshouse.package.layout import key_commitment
from glasshouse.package.manifest import Manifest
from glasshouse.wire.canonical import decode
from glasshouse.wire.crypto import RecipientKey, SigningKey, Suite, salted, sha256
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.lines.line_start import LineStart
from glasshouse.wire.policy import Assurance, Floor, Profile
from glasshouse.wire.states import Outcome, State
from simulators.measured import measured

__all__ = ["START_US", "Run", "World", "envelope", "with_log"]

START_US = 1_790_000_000_000_000
SECOND_US = 1_000_000
_WAY = tuple(State)[1 : tuple(State).index(State.ZEROIZING)]


def with_log(verdict: Verdict, lines: Iterable[bytes], heads: Iterable[bytes] | None = None) -> Verdict:
    """Return a verdict with the log beside its bundle, checked."""
    log, counted = verify_log_beside(verdict.chain, lines, heads)
    return replace(verdict, log=log, heads=counted)


def envelope(data: bytes) -> Envelope:
    """Parse an envelope of any kind."""
    return Envelope.parse(data, max_bytes=1 << 20)


@dataclass(frozen=True)
class Run:
    """What a run leaves: its bundle, its log, and what it was made of."""

    bundle: Bundle
    lines: tuple[bytes, ...]
    heads: tuple[CountersignedHead, ...]
    final_head: bytes
    receipt: Receipt
    log: EventLog

    @property
    def data(self) -> bytes:
        return self.bundle.encode()

    def with_parts(self, **parts: object) -> bytes:
        """The bundle's bytes with some parts exchanged."""
        return replace(self.bundle, **parts).encode()


@dataclass
class World:
    """One owner's world. Another `name` is another owner with another everything.

    Attributes:
        name: what all keys and ids are made from.
        now_us: the one clock of owner, broker and runtime; moves as the run goes on.
        reported: how many steps its log tells of.
    """

    name: str = "clinic"
    now_us: int = START_US
    reported: int = 5
    floor: Floor = field(default_factory=lambda: Floor(assurance=Assurance.SOFTWARE, profile=Profile.STANDARD))

    def __post_init__(self) -> None:
        self.owner = self.key("owner")
        self.broker = self.key("broker")
        self.launch_key = self.key("launch")
        self.evidence_key = self.key("evidence")
        self.hpke_key = RecipientKey(b"".join(self.digest(f"hpke {part}") for part in range(3)))
        self.owner_hpke = RecipientKey(b"".join(self.digest(f"owner hpke {part}") for part in range(3)))
        self.package_key = self.digest("package key")
        self.measurement = measured("measurement")
        self.segment_bytes = 1300
        self.manifest = Manifest(
            package_id=self.id("package"),
            suite=Suite.AES_256_GCM,
            chunk_bytes=1 << 20,
            workload="lora",
            floor=self.floor,
            recipients=(self.owner_hpke.public,),
            owner_signing=self.owner.public,
            owner_sealing=self.owner_hpke.public,
            key_commitment=key_commitment(self.package_key, self.id("package")),
            index_sha256=self.digest("index"),
            index_bytes=500,
            assets_bytes=5000,
        )
        self.policy = DeploymentPolicy(
            assurance=self.floor.assurance,
            profile=self.floor.profile,
            egress=(),
            references=References.of(self.measurement),
            release_budget=1,
            not_after_us=START_US + 86_400 * SECOND_US,
            lease_s=600,
            max_duration_s=7200,
        )
        self.record = DeploymentRecord(
            deployment=self.id("deployment"),
            package_id=self.manifest.package_id,
            manifest_sha256=self.manifest.sha256,
            key_commitment=self.manifest.key_commitment,
            floor=self.floor,
            policy=self.policy,
            revoked=False,
            delegation=Delegation.from_envelope(self.delegation(), self.owner.public),
        )

    def digest(self, label: str) -> bytes:
        return sha256(f"{self.name}: {label}".encode())

    def id(self, label: str) -> str:
        return self.digest(f"id of {label}")[:16].hex()

    def key(self, label: str) -> SigningKey:
        return SigningKey(self.digest(f"key of {label}"))

    def tick(self, microseconds: int = 1000) -> int:
        """Let time pass and return the new time."""
        self.now_us += microseconds
        return self.now_us

    def delegation(self, **changes: object) -> Envelope:
        about: dict[str, object] = {
            "broker_public": self.broker.public,
            "uses": RUN_USES,
            "not_before_us": START_US - 60 * SECOND_US,
            "not_after_us": START_US + 86_400 * SECOND_US,
        }
        return Delegation(**{**about, **changes}).sign(self.owner)

    def token_claims(self, **changes: object) -> TokenClaims:
        claims = TokenClaims(
            jti=self.id("token"),
            deployment=self.record.deployment,
            run_id=self.id("run"),
            package_id=self.manifest.package_id,
            manifest_sha256=self.manifest.sha256,
            floor_sha256=self.floor.sha256,
            policy_sha256=self.policy.sha256,
            container_id="container-7",
            container_source=ContainerSource.MINTED,
            launch_public=self.launch_key.public,
            issued_s=START_US // SECOND_US - 10,
            expires_s=START_US // SECOND_US + 900,
        )
        return replace(claims, **changes)

    def token(self, **changes: object) -> str:
        return issue_token(self.broker, self.token_claims(**changes))

    def hardening(self) -> HardeningReport:
        passed = dict.fromkeys(sorted(CHECKS["agent"] | CHECKS["worker"]), CheckResult.PASSED)
        return HardeningReport(
            profile=Profile.STANDARD,
            anti_debug=True,
            agent={name: passed[name] for name in CHECKS["agent"]},
            worker={name: passed[name] for name in CHECKS["worker"]},
            workspace=WorkspaceKind.TMPFS_NOSWAP,
            secret_memory=SecretMemoryKind.MEMFD_SECRET,
        )

    def claims(self, **changes: object) -> Claims:
        claims = Claims(
            nonce=self.digest("nonce"),
            issued_us=START_US + SECOND_US,
            started_us=START_US,
            manifest_sha256=self.manifest.sha256,
            package_id=self.manifest.package_id,
            deployment=self.record.deployment,
            run_id=self.id("run"),
            container_id="container-7",
            container_source=ContainerSource.MINTED,
            measurement=self.measurement,
            environment_sha256=self.digest("environment"),
            hardening=self.hardening(),
            state=State.MEASURED,
            gpus=(),
            assurance=Assurance.SOFTWARE,
            hpke_public=self.hpke_key.public,
            evidence_public=self.evidence_key.public,
            token=self.token(),
        )
        return replace(claims, **changes)

    def evidence(self, **changes: object) -> bytes:
        claims = self.claims(**changes)
        return runtime_side.evidence_message(claims, (), evidence_key=self.evidence_key, launch_key=self.launch_key)

    def ear(self, evidence: bytes, **changes: object) -> str:
        """The broker's attestation result on evidence that it was not asked to check here."""
        claims = self.claims(**changes)
        challenge = Challenge(
            nonce=claims.nonce,
            deployment=claims.deployment,
            issued_us=START_US,
            expires_us=START_US + 60 * SECOND_US,
        )
        release = broker_side.build_release(
            broker_side.Appraisal(claims=claims, evidence_sha256=sha256(evidence), roots={}),
            package_key=self.package_key,
            broker_key=self.broker,
            challenge=challenge,
            record=self.record,
            now_us=START_US + 2 * SECOND_US,
            line=self.begins(),
        )
        return ReleaseMessage.parse(release).ear

    def begins(self) -> LineStart | None:
        """The leg of a line that this is, as its attestation result has it."""
        return None

    def outputs(self) -> tuple[Output, ...]:
        return (
            Output(
                kind="output",
                of="weights",
                sequence=0,
                plain_bytes=1000,
                plain_hmac=salted(self.digest("salt"), self.digest("adapter")),
                sealed_bytes=2400,
                sealed_sha256=self.digest("sealed adapter"),
            ),
            Output(
                kind="output",
                of="file",
                sequence=1,
                plain_bytes=80,
                plain_hmac=None,
                sealed_bytes=1500,
                sealed_sha256=self.digest("sealed metrics"),
            ),
        )

    def run(
        self,
        *,
        outcome: Outcome = Outcome.COMPLETED,
        code: Code | None = None,
        reach: State = State.SEALED,
        attested: bool = True,
        evidence_made: bool = True,
        broker_away: bool = False,
        change: Callable[[Receipt], Receipt] = lambda receipt: receipt,
        notices: Sequence[str] = (),
    ) -> Run:
        """Tell one run from launch to receipt.

        Args:
            outcome, code: how it ends.
            reach: the last state before zeroizing.
            attested: whether the broker released.
            evidence_made: whether it got as far as evidence.
            broker_away: whether the broker is gone from the final head on.
            change: what a lying runtime writes into its receipt instead.
            notices: codes of what the log notes before it ends.
        """
        lines: list[bytes] = []
        heads: list[CountersignedHead] = []
        log = EventLog(
            run_id=self.id("run"), evidence_key=self.evidence_key, clock_us=lambda: self.tick(), sink=lines.append
        )

        def put_head(*, countersigned: bool) -> bytes:
            signed = log.head()
            if countersigned and attested:
                previous = heads[-1] if heads else None
                heads.append(
                    countersign(
                        signed,
                        log.consistency(previous.head.size if previous else 0, log.size),
                        run_id=self.id("run"),
                        previous=previous,
                        evidence_public=self.evidence_key.public,
                        broker_key=self.broker,
                        now_us=self.tick(),
                    )
                )
            return signed

        self.now_us = START_US + 2 * SECOND_US
        outputs = self._story(log, reach, put_head) if attested else ()
        if not attested:
            for state in _WAY[: _WAY.index(reach) + 1] if reach is not State.CREATED else ():
                log.transition(state)
        for notice in notices:
            log.append(EventType.NOTICE, {"code": notice, "value": None})
        log.transition(State.ZEROIZING, code=code)
        probes = self.probes(outcome)
        for probe in probes:
            log.append(EventType.PROBE, probe.to_json())
        log.transition(State.ZEROIZED, outcome=outcome, code=code)
        final_head = put_head(countersigned=not broker_away)
        evidence = self.evidence() if evidence_made else None
        ear = self.ear(evidence) if attested and evidence else None
        receipt = change(self._receipt(log, outcome, code, outputs, probes, evidence, ear))
        signed = receipt.sign(self.evidence_key, None if ear else self.launch_key)
        closed: CountersignedReceipt | None = None
        if attested and not broker_away:
            closed = self.close(signed, heads[-1])
        bundle = Bundle(
            delegation=self.delegation(),
            manifest=envelope(self.manifest.sign(self.owner)),
            token=self.token(),
            evidence=None if evidence is None else decode(evidence, max_bytes=1 << 20),
            ear=ear,
            head=envelope(final_head) if broker_away or not attested else heads[-1].envelope,
            receipt=envelope(signed),
            countersignature=closed.envelope if closed else None,
        )
        return Run(
            bundle=bundle,
            lines=tuple(lines),
            heads=tuple(heads),
            final_head=final_head,
            receipt=receipt,
            log=log,
        )

    def close(self, receipt: bytes, final: CountersignedHead) -> CountersignedReceipt:
        return countersign_receipt(
            receipt,
            final=final,
            previous=None,
            evidence_public=self.evidence_key.public,
            broker_key=self.broker,
            now_us=self.tick(),
        )

    def probes(self, outcome: Outcome) -> tuple[Probe, ...]:
        found = outcome is Outcome.RESIDUE
        return (
            Probe(probe="agent-memory", result=ProbeResult.FOUND if found else ProbeResult.CLEAN, detail=""),
            Probe(probe="gpu-memory", result=ProbeResult.CLEAN, detail="no-gpu"),
            Probe(probe="shared-memory", result=ProbeResult.CLEAN, detail=""),
            Probe(probe="swap", result=ProbeResult.UNVERIFIABLE, detail="swap is in use by others"),
            Probe(probe="workspace", result=ProbeResult.CLEAN, detail=""),
        )

    def _story(self, log: EventLog, reach: State, put_head: Callable[..., bytes]) -> tuple[Output, ...]:
        outputs: tuple[Output, ...] = ()
        for state in _WAY[: _WAY.index(reach) + 1] if reach is not State.CREATED else ():
            log.transition(state)
            if state is State.HARDENED:
                log.append(EventType.CHECK, {"name": "not-dumpable", "process": "agent", "result": "passed"})
            if state is State.MEASURED:
                log.append(EventType.DIGEST, {"sha256": self.measurement.sha256.hex(), "subject": "measurement"})
            if state is State.RUNNING:
                for step in range(1, self.reported + 1):
                    log.append(
                        EventType.PROGRESS,
                        {
                            "done": step,
                            "elapsed_us": step * 1_000_000,
                            "loss": f"0.{9 - step}",
                            "total": 5,
                            "unit": "step",
                        },
                    )
                log.append(
                    EventType.SEGMENT,
                    {"sealed_bytes": self.segment_bytes, "sealed_sha256": self.digest("segment").hex(), "sequence": 0},
                )
                outputs = self.outputs()
                for output in outputs:
                    log.append(
                        EventType.OUTPUT,
                        {
                            "bytes": output.plain_bytes,
                            "class": output.of,
                            "kind": output.kind,
                            "sealed_bytes": output.sealed_bytes,
                            "sealed_sha256": output.sealed_sha256.hex(),
                            "sequence": output.sequence,
                        },
                    )
            put_head(countersigned=_WAY.index(state) >= _WAY.index(State.RELEASED))
        return outputs

    def _receipt(
        self,
        log: EventLog,
        outcome: Outcome,
        code: Code | None,
        outputs: tuple[Output, ...],
        probes: tuple[Probe, ...],
        evidence: bytes | None,
        ear: str | None,
    ) -> Receipt:
        ran = bool(outputs)
        steps = ("attest", "harden", "open", "release", "seal_outputs", "total", "zeroize")
        return Receipt(
            run_id=self.id("run"),
            deployment=self.record.deployment,
            package_id=self.manifest.package_id,
            workload=self.manifest.workload,
            manifest_sha256=self.manifest.sha256,
            floor_sha256=self.floor.sha256,
            policy_sha256=self.policy.sha256,
            evidence_sha256=sha256(evidence) if evidence else None,
            ear_sha256=sha256(ear.encode()) if ear else None,
            evidence_public=self.evidence_key.public,
            assurance=Assurance.SOFTWARE if ear else None,
            profile=Profile.STANDARD,
            workspace="tmpfs-noswap",
            secret_memory="memfd-secret",
            measurement=self.measurement.sha256 if evidence else None,
            environment_sha256=self.digest("environment") if evidence else None,
            log_root=log.root,
            log_size=log.size,
            work=Work(unit="step", done=5, elapsed_us=5000, stop_reason="steps") if ran else None,
            loss=Loss(first="0.8", final="0.4") if ran else None,
            trainable=270_336 if ran else None,
            outputs=outputs,
            segments=1 if ran else 0,
            zeroization=probes,
            lifecycle_us={step: number * 1000 for number, step in enumerate(steps)},
            training_imports_us=1_500_000 if ran else None,
            outcome=outcome,
            code=code,
            started_us=START_US,
            finished_us=self.now_us,
        )
