"""Receipts: what a run did, as an in-toto Statement v1 signed by the run's evidence key (spec/evidence.md section 5).

Laws: ``Receipt.from_statement(r.to_statement()) == r``. A receipt says what the runtime says; how far
that can be believed is the assurance that stands in it. Source: in-toto attestation framework, Statement v1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from glasshouse.errors import Code, FormatError
from glasshouse.evidence.events import ProbeResult
from glasshouse.evidence.heads import run_id_field
from glasshouse.evidence.results import REQUIRED_PROBES, WORD, Loss, Output, Probe, Work, manifest_subject
from glasshouse.wire import dsse
from glasshouse.wire.canonical import Json, decode, encode
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.fields import Fields, b64encode, hex_or_null
from glasshouse.wire.policy import Assurance, Profile
from glasshouse.wire.signing import SigningKey
from glasshouse.wire.states import Outcome

__all__ = [
    "CLOCK_LEEWAY_US",
    "LIFECYCLE",
    "MAX_OUTPUTS",
    "MAX_RECEIPT_BYTES",
    "PREDICATE_TYPE",
    "RECEIPT_TYPE",
    "STATEMENT_TYPE",
    "Receipt",
]

RECEIPT_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://glasshouse.dev/receipt/v1"
MAX_RECEIPT_BYTES = 240 * 1024  # fits, with its head, into the gate's 256 KiB
MAX_OUTPUTS = 400
MAX_PROBES = 64
# Eleven of each output, and six probes whose details, of 200 characters, may be nothing but commas.
MAX_RECEIPT_ELEMENTS = 6000
# Two clocks of one run, the runtime's and the broker's, may differ by so much: the gate tolerates no more.
CLOCK_LEEWAY_US = 600 * 1_000_000
LIFECYCLE = ("attest", "harden", "open", "release", "seal_outputs", "total", "zeroize")
# What happens after the receipt is signed cannot stand in it; it says so itself.
NOT_COVERED = ("evidence-key-wipe",)
_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """What happened in one run.

    Attributes:
        run_id, deployment, package_id: which run, of what.
        workload: the manifest's workload kind.
        manifest_sha256, floor_sha256, policy_sha256: which package under which policies.
        evidence_sha256, ear_sha256: digest of the evidence message and of the EAR's compact text; both
            None in the receipt of a run that was never attested.
        evidence_public: the run's evidence key, which signs this receipt and the log's heads.
        assurance: what stands behind all of this; None when nothing was attested.
        profile: the hardening profile that was claimed and observed.
        workspace, secret_memory: the means that the machine offered for plaintext and for keys.
        measurement, environment_sha256: of the runtime; None when it ended before measuring.
        log_root, log_size: the log, including its last event.
        work, loss, trainable: what the workload reported, or None.
        outputs: what left the machine sealed, by sequence: the statement's subjects; of a run without any, the subject
            is the manifest.
        segments: how many sealed log segments were written.
        zeroization: what the probes answered.
        lifecycle_us: microseconds per step of the run, or None for a step that was not reached.
        training_imports_us: the worker's own import of its frameworks.
        outcome, code: how it ended, and why if it did not complete.
        started_us, finished_us: by the runtime's clock.
    """

    run_id: str
    deployment: str
    package_id: str
    workload: str
    manifest_sha256: bytes
    floor_sha256: bytes
    policy_sha256: bytes
    evidence_sha256: bytes | None
    ear_sha256: bytes | None
    evidence_public: bytes
    assurance: Assurance | None
    profile: Profile
    workspace: str
    secret_memory: str
    measurement: bytes | None
    environment_sha256: bytes | None
    log_root: bytes
    log_size: int
    work: Work | None
    loss: Loss | None
    trainable: int | None
    outputs: tuple[Output, ...]
    segments: int
    zeroization: tuple[Probe, ...]
    lifecycle_us: Mapping[str, int | None]
    training_imports_us: int | None
    outcome: Outcome
    code: Code | None
    started_us: int
    finished_us: int

    def __post_init__(self) -> None:
        for why, broken in self._contradictions():
            if broken:
                raise FormatError(Code.SCHEMA, f"a receipt {why}")

    def _contradictions(self) -> list[tuple[str, bool]]:
        attested = [self.evidence_sha256 is not None, self.ear_sha256 is not None, self.assurance is not None]
        completed = self.outcome is Outcome.COMPLETED
        found = any(probe.result is ProbeResult.FOUND for probe in self.zeroization)
        names = [probe.probe for probe in self.zeroization]
        return [
            ("in which only part of an attestation stands", len({attested[1], attested[2]}) > 1),
            ("with an attestation result but no evidence", attested[1] and not attested[0]),
            ("that calls itself lost", self.outcome is Outcome.LOST),
            ("of a completed run that was never attested", completed and not all(attested)),
            # Nothing was released to it: who holds the launch key could name outputs of their own making.
            ("of a run that had no key but outputs or work", not attested[1] and bool(self.outputs or self.work)),
            ("of a completed run with a failure code", completed and self.code is not None),
            ("of a run that did not complete, without a reason", not completed and self.code is None),
            ("of a completed run without work", completed and self.work is None),
            ("without probes", not names),
            ("in which a probe answers twice", len(set(names)) != len(names)),
            ("of a completed run that did not search everywhere", completed and not set(names) >= REQUIRED_PROBES),
            ("that found something and does not say residue", found != (self.outcome is Outcome.RESIDUE)),
            ("whose outputs do not count up by one", [o.sequence for o in self.outputs] != [*range(len(self.outputs))]),
            ("with too many outputs", len(self.outputs) > MAX_OUTPUTS),
            ("with too many probes", len(self.zeroization) > MAX_PROBES),
            ("that ends before it starts", self.finished_us < self.started_us),
            ("with other lifecycle steps than it must have", tuple(sorted(self.lifecycle_us)) != LIFECYCLE),
        ]

    def to_statement(self) -> dict[str, Json]:
        """Return the in-toto Statement."""
        predicate: dict[str, Json] = {
            "assurance": None if self.assurance is None else self.assurance.value,
            "code": None if self.code is None else self.code.value,
            "deployment": self.deployment,
            "ear_sha256": hex_or_null(self.ear_sha256),
            "environment_sha256": hex_or_null(self.environment_sha256),
            "evidence_public": b64encode(self.evidence_public),
            "evidence_sha256": hex_or_null(self.evidence_sha256),
            "finished_us": self.finished_us,
            "floor_sha256": self.floor_sha256.hex(),
            "hardening": {
                "profile": self.profile.value,
                "secret_memory": self.secret_memory,
                "workspace": self.workspace,
            },
            "lifecycle_us": dict(self.lifecycle_us),
            "log": {"root": self.log_root.hex(), "size": self.log_size},
            "loss": None if self.loss is None else self.loss.to_json(),
            "manifest_sha256": self.manifest_sha256.hex(),
            "measurement": hex_or_null(self.measurement),
            "not_covered": list(NOT_COVERED),
            "outcome": self.outcome.value,
            "package_id": self.package_id,
            "policy_sha256": self.policy_sha256.hex(),
            "run_id": self.run_id,
            "segments": self.segments,
            "started_us": self.started_us,
            "trainable": self.trainable,
            "training_imports_us": self.training_imports_us,
            "version": _VERSION,
            "work": None if self.work is None else self.work.to_json(),
            "workload": self.workload,
            "zeroization": [probe.to_json() for probe in self.zeroization],
        }
        return {
            "_type": STATEMENT_TYPE,
            "predicate": predicate,
            "predicateType": PREDICATE_TYPE,
            "subject": self._subject(),
        }

    def _subject(self) -> list[Json]:
        # A statement of in-toto is about something: where nothing came back, about the package.
        outputs: list[Json] = [output.to_json() for output in self.outputs]
        return outputs or [manifest_subject(self.manifest_sha256)]

    @classmethod
    def from_statement(cls, value: Json) -> Receipt:
        """Inverse of `to_statement`; raises `FormatError`."""
        statement = Fields(value, "statement")
        statement.choice("_type", [STATEMENT_TYPE])
        statement.choice("predicateType", [PREDICATE_TYPE])
        subject = statement.items("subject", max_items=MAX_OUTPUTS)
        named = [item for item in subject if not isinstance(item, dict) or item.get("name") != "manifest"]
        receipt = _predicate(statement.child("predicate"), tuple(Output.from_json(item) for item in named))
        if subject != receipt._subject():
            raise FormatError(Code.SCHEMA, "a receipt whose subject is neither its outputs nor its manifest")
        statement.end()
        return receipt

    def sign(self, evidence_key: SigningKey, launch_key: SigningKey | None = None) -> bytes:
        """Return the receipt in its envelope.

        Args:
            evidence_key: signs every receipt.
            launch_key: signs too when, and only when, no EAR vouches for the evidence key.
        """
        if (launch_key is None) != (self.ear_sha256 is not None):
            raise ValueError("the launch key signs the receipt of a run without an EAR, and no other")
        if evidence_key.public != self.evidence_public:
            raise ValueError("a receipt that names another evidence key")
        keys = [evidence_key] if launch_key is None else [evidence_key, launch_key]
        data = dsse.sign(RECEIPT_TYPE, encode(self.to_statement()), keys).encode()
        if len(data) > MAX_RECEIPT_BYTES:
            raise FormatError(Code.TOO_LARGE, f"a receipt of more than {MAX_RECEIPT_BYTES} bytes")
        return data

    @classmethod
    def from_envelope(
        cls, envelope: Envelope, *, evidence_public: bytes, launch_public: bytes | None = None
    ) -> Receipt:
        """Check the signatures, of exactly these keys, and return the receipt.

        Raises:
            FormatError: `too-large`, `schema-invalid`, `not-canonical`, `wrong-type` or `signature-invalid`.
        """
        publics = [evidence_public] if launch_public is None else [evidence_public, launch_public]
        receipt = cls.from_payload(envelope.verify(RECEIPT_TYPE, *publics))
        receipt.check_signers(evidence_public, by_launch_key=launch_public is not None)
        return receipt

    def check_signers(self, evidence_public: bytes, *, by_launch_key: bool) -> None:
        """Check that a receipt names the key that signed it, and is of a run that these keys sign for.

        Raises:
            FormatError: `signature-invalid`.
        """
        if self.evidence_public != evidence_public or by_launch_key != (self.ear_sha256 is None):
            raise FormatError(Code.SIGNATURE, "a receipt signed by the keys of another kind of run")

    @classmethod
    def from_payload(cls, payload: bytes) -> Receipt:
        """Parse a statement's canonical bytes; raises `FormatError`."""
        return cls.from_statement(decode(payload, max_bytes=MAX_RECEIPT_BYTES, max_elements=MAX_RECEIPT_ELEMENTS))


def _predicate(fields: Fields, outputs: tuple[Output, ...]) -> Receipt:
    fields.integer("version", low=_VERSION, high=_VERSION)
    if fields.texts("not_covered", max_items=len(NOT_COVERED)) != list(NOT_COVERED):
        raise FormatError(Code.SCHEMA, "a receipt that does not say what it leaves out")
    log, hardening, lifecycle = fields.child("log"), fields.child("hardening"), fields.child("lifecycle_us")
    receipt = Receipt(
        run_id=run_id_field(fields),
        deployment=run_id_field(fields, "deployment"),
        package_id=run_id_field(fields, "package_id"),
        workload=fields.text("workload", max_chars=64, pattern=WORD),
        manifest_sha256=fields.digest("manifest_sha256"),
        floor_sha256=fields.digest("floor_sha256"),
        policy_sha256=fields.digest("policy_sha256"),
        evidence_sha256=fields.digest_or_null("evidence_sha256"),
        ear_sha256=fields.digest_or_null("ear_sha256"),
        evidence_public=fields.octets("evidence_public", length=32),
        assurance=None if fields.null("assurance") else Assurance(fields.choice("assurance", list(Assurance))),
        profile=Profile(hardening.choice("profile", list(Profile))),
        workspace=hardening.text("workspace", max_chars=64, pattern=WORD),
        secret_memory=hardening.text("secret_memory", max_chars=64, pattern=WORD),
        measurement=fields.digest_or_null("measurement"),
        environment_sha256=fields.digest_or_null("environment_sha256"),
        log_root=log.digest("root"),
        log_size=log.integer("size", low=1),
        work=None if fields.null("work") else Work.from_json(fields.any("work")),
        loss=None if fields.null("loss") else Loss.from_json(fields.any("loss")),
        trainable=fields.integer_or_null("trainable"),
        outputs=outputs,
        segments=fields.integer("segments"),
        zeroization=tuple(Probe.from_json(item) for item in fields.items("zeroization", max_items=MAX_PROBES)),
        lifecycle_us={step: lifecycle.integer_or_null(step) for step in LIFECYCLE},
        training_imports_us=fields.integer_or_null("training_imports_us"),
        outcome=Outcome(fields.choice("outcome", list(Outcome))),
        code=None if fields.null("code") else Code(fields.choice("code", list(Code))),
        started_us=fields.integer("started_us"),
        finished_us=fields.integer("finished_us"),
    )
    for part in (log, hardening, lifecycle, fields):
        part.end()
    return receipt
