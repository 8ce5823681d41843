"""Receipts: what a run did, as an in-toto Statement v1 signed by the run's evidence key (spec/evidence.md section 5).

Law: ``Receipt.from_json(r.to_json()) == r``. A receipt is the runtime's own account; what
stands behind it is the assurance in it. Source: in-toto attestation framework, Statement v1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from glasshouse.errors import Code, FormatError
from glasshouse.evidence.events import ProbeResult, is_loss
from glasshouse.wire import dsse
from glasshouse.wire.canonical import Codec, Json
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.lines.line_start import LineStart
from glasshouse.wire.policy import Assurance, Profile
from glasshouse.wire.record import (
    APART,
    LEFT_OUT,
    Id,
    Member,
    Record,
    Sha256,
    choice,
    integer,
    items,
    nullable,
    octets,
    raw,
    table,
    text,
)
from glasshouse.wire.states import Outcome

RECEIPT_TYPE = "application/vnd.in-toto+json"
PREDICATE_TYPE = "https://glasshouse.dev/receipt/v1"
MAX_RECEIPT_BYTES = 240 * 1024  # fits, with its head, into the gate's 256 KiB
MAX_BUNDLE_BYTES = 5 << 20  # of the file that holds a receipt with every link to it (`evidence.bundle`)
MAX_PROBES = 64
# Eleven of each output, and six probes whose details, of 200 characters, may be nothing but commas.
MAX_RECEIPT_ELEMENTS = 6000
# Two clocks of one run, the runtime's and the broker's, may differ by so much: the gate tolerates no more.
CLOCK_LEEWAY_US = 600 * 1_000_000
LIFECYCLE = ("attest", "harden", "open", "release", "seal_outputs", "total", "zeroize")
# What happens after the receipt is signed cannot stand in it, and is listed.
NOT_COVERED = ("evidence-key-wipe",)
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
MAX_OUTPUTS = 400

# A closed list: the receipt lies on the host's disk, and any text would be a way out of the sandbox.
STOP_REASONS = ("finished", "steps", "stopped", "time")

WEIGHTS = "weights"
# What a runtime searches at its end; a run that completed has searched all but the last, which stands for a search that
# could not be made at all.
PROBES = ("agent-memory", "gpu-memory", "shared-memory", "swap", "workspace", "zeroization")
REQUIRED_PROBES = frozenset(PROBES[:-1])

_DETAIL = re.compile(r"[\x20-\x7e]{0,200}")


def _loss(value: Json, where: str) -> Json:
    if not is_loss(value):
        raise FormatError(Code.SCHEMA, f"{where} is a loss of more than six significant digits, or not in its one form")
    return value


Class: TypeAlias = Annotated[str, choice(("file", WEIGHTS))]
Kind: TypeAlias = Annotated[str, choice(("checkpoint", "output"))]
ProbeName: TypeAlias = Annotated[str, choice(PROBES)]
Unit: TypeAlias = Annotated[str, choice(("epoch", "step"))]
_Loss: TypeAlias = Annotated[str, Codec(_loss)]
Lifecycle: TypeAlias = Annotated[
    Mapping[str, int | None],
    table(len(LIFECYCLE), choice(LIFECYCLE), nullable(integer()), min_items=len(LIFECYCLE)),
]
"""Microseconds of each step of a run; None for a step that was not reached."""
_Word: TypeAlias = Annotated[str, text(64, re.compile(r"[a-z][a-z0-9-]{0,63}"))]


def sealed_name(sequence: int) -> str:
    """Return where a sealed output lies in the run's folder."""
    return f"outputs/{sequence:04d}.sealed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement(Record, name="statement", constants={"_type": STATEMENT_TYPE}):
    """An in-toto Statement v1."""

    predicate_type: Annotated[str, text(), Member("predicateType")]
    predicate: Annotated[Json, raw()]
    subject: Annotated[tuple[Json, ...], items(MAX_OUTPUTS, raw())]

    def predicate_of(self, predicate_type: str) -> Json:
        """Return the predicate if it is of this type; raises `FormatError` (`schema-invalid`)."""
        if self.predicate_type != predicate_type:
            raise FormatError(Code.SCHEMA, f"a statement of another type where {predicate_type} was expected")
        return self.predicate


@dataclass(frozen=True, kw_only=True, slots=True)
class Output(Record, name="subject", derived={"name": "file_name"}):
    """A result that left the machine sealed: an in-toto ResourceDescriptor of the sealed file as it lies in the folder.

    It has a number and no name: the receipt lies on the rented machine's disk. Its name is sealed with it.
    For the same reason no plaintext digest is here: a small file could be guessed from it, and weights that follow from
    a seed be confirmed.
    """

    kind: Annotated[Kind, Member("annotations", "kind")]
    of: Annotated[Class, Member("annotations", "class")]  # what the plaintext is
    sequence: Annotated[int, Member("annotations", "sequence")]  # as in the log and in the sealed file's name
    plain_bytes: Annotated[int, Member("annotations", "bytes")]
    # HMAC-SHA-256(salt, SHA-256 of the plaintext) of weights; the salt is sealed with the output.
    plain_hmac: Annotated[Sha256 | None, Member("annotations", "plaintext_hmac_sha256")]
    sealed_bytes: Annotated[int, Member("annotations", "sealed_bytes")]
    sealed_sha256: Annotated[Sha256, Member("digest", "sha256")]

    def __post_init__(self) -> None:
        if (self.plain_hmac is not None) != (self.of == WEIGHTS):
            raise FormatError(Code.SCHEMA, "a commitment to a plaintext stands beside weights, and nowhere else")

    @property
    def file_name(self) -> str:
        """Where the sealed file lies in the run's folder."""
        return sealed_name(self.sequence)


def manifest_subject(manifest_sha256: bytes) -> dict[str, Json]:
    """Return the in-toto subject of a statement about a run that gave nothing back: the package that it was of."""
    return {"digest": {"sha256": manifest_sha256.hex()}, "name": "manifest"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Work(Record, name="work"):
    """How much was done."""

    unit: Unit
    done: int
    elapsed_us: int  # by the worker's clock, and no longer than the agent saw it run
    stop_reason: Annotated[str, choice(STOP_REASONS)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss(Record, name="loss"):
    """First and last loss as decimal strings."""

    first: _Loss
    final: _Loss


@dataclass(frozen=True, kw_only=True, slots=True)
class LastCheckpoint(Record, name="last"):
    """The last checkpoint that the gate counted for a leg."""

    digest: Sha256
    seq: Annotated[int, integer(1)]
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Leg(LineStart, name="line"):
    """Which leg of a line a run was, where it began, and what it left to go on from."""

    last: Annotated[LastCheckpoint | None, LEFT_OUT] = None  # None where none was counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe(Record, name="probe"):
    """The answer of one search for something left behind."""

    probe: ProbeName
    result: ProbeResult
    detail: Annotated[str, text(200, _DETAIL)] = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt(
    Record,
    name="predicate",
    max_bytes=MAX_RECEIPT_BYTES,
    max_elements=MAX_RECEIPT_ELEMENTS,
    constants={"version": 1, "not_covered": list(NOT_COVERED)},
):
    """What happened in one run: the predicate of a statement whose subjects are its outputs."""

    run_id: Id
    deployment: Id
    package_id: Id
    workload: _Word  # of the manifest
    manifest_sha256: Sha256
    floor_sha256: Sha256
    policy_sha256: Sha256
    evidence_sha256: Sha256 | None  # of the evidence message; None in the receipt of a run that was never attested
    ear_sha256: Sha256 | None  # of the EAR's compact text; None as well
    evidence_public: Annotated[bytes, octets(32)]  # signs this receipt and the log's heads
    assurance: Assurance | None  # what stands behind all of this; None when nothing was attested
    profile: Annotated[Profile, Member("hardening", "profile")]  # that was claimed and observed
    workspace: Annotated[_Word, Member("hardening", "workspace")]  # the machine's means for plaintext
    secret_memory: Annotated[_Word, Member("hardening", "secret_memory")]  # the machine's means for keys
    measurement: Sha256 | None  # of the runtime; None when it ended before measuring
    environment_sha256: Sha256 | None
    log_root: Annotated[Sha256, Member("log", "root")]  # of the log with its last event
    log_size: Annotated[int, integer(1), Member("log", "size")]
    work: Work | None
    loss: Loss | None
    trainable: int | None  # parameters
    outputs: Annotated[tuple[Output, ...], APART]  # what left the machine sealed, by sequence
    segments: int  # sealed segments of the log that were written
    zeroization: Annotated[tuple[Probe, ...], items(MAX_PROBES)]
    lifecycle_us: Lifecycle
    training_imports_us: int | None  # the worker's own import of its frameworks
    outcome: Outcome
    code: Code | None  # why, of a run that did not complete
    started_us: int  # by the runtime's clock
    finished_us: int
    line: Annotated[Leg | None, LEFT_OUT] = None  # of a run that is a leg of a line

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
            ("that found something, and whose outcome is another", found != (self.outcome is Outcome.RESIDUE)),
            ("whose outputs do not count up by one", [o.sequence for o in self.outputs] != [*range(len(self.outputs))]),
            ("with too many outputs", len(self.outputs) > MAX_OUTPUTS),
            ("with too many probes", len(self.zeroization) > MAX_PROBES),
            ("that ends before it starts", self.finished_us < self.started_us),
            ("with other lifecycle steps than it must have", tuple(sorted(self.lifecycle_us)) != LIFECYCLE),
        ]

    def to_json(self) -> dict[str, Json]:
        """Return the in-toto Statement."""
        predicate = Record.to_json(self)
        return Statement(predicate_type=PREDICATE_TYPE, predicate=predicate, subject=self._subject()).to_json()

    def _subject(self) -> tuple[Json, ...]:
        # A statement of in-toto is about something: where nothing came back, about the package.
        return tuple(output.to_json() for output in self.outputs) or (manifest_subject(self.manifest_sha256),)

    @classmethod
    def from_json(cls, value: Json, where: str | None = None, **apart: Any) -> Receipt:
        """Inverse of `to_json`; raises `FormatError`."""
        statement = Statement.from_json(value)
        named = [item for item in statement.subject if not isinstance(item, dict) or item.get("name") != "manifest"]
        outputs = tuple(Output.from_json(item) for item in named)
        predicate = statement.predicate_of(PREDICATE_TYPE)
        receipt = super(Receipt, cls).from_json(predicate, where, outputs=outputs, **apart)
        if statement.subject != receipt._subject():
            raise FormatError(Code.SCHEMA, "a receipt whose subject is neither its outputs nor its manifest")
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
        data = dsse.sign(RECEIPT_TYPE, self.encode(), keys).encode()
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
        receipt = cls.parse(envelope.verify(RECEIPT_TYPE, *publics))
        receipt.check_signers(evidence_public, by_launch_key=launch_public is not None)
        return receipt

    def check_signers(self, evidence_public: bytes, *, by_launch_key: bool) -> None:
        """Check that a receipt names the key that signed it, and is of a run that these keys sign for.

        Raises:
            FormatError: `signature-invalid`.
        """
        if self.evidence_public != evidence_public or by_launch_key != (self.ear_sha256 is None):
            raise FormatError(Code.SIGNATURE, "a receipt signed by the keys of another kind of run")
