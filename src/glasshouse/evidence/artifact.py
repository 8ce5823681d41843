"""The public artifact: what an owner may show of a run to anyone (spec/evidence.md section 9).

An in-toto Statement v1: its subjects are the plaintext weights where the owner reveals their digests, else the sealed
outputs. The guarantee is the closed schema: enumerations, integers, bounded decimals and digests of fixed length.
Laws: ``Artifact.from_json(a.to_json()) == a``; there is no value that is free text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from glasshouse.errors import Code, FormatError
from glasshouse.evidence.events import ProbeResult
from glasshouse.evidence.receipt import (
    CLOCK_LEEWAY_US,
    LIFECYCLE,
    MAX_OUTPUTS,
    MAX_PROBES,
    RECEIPT_TYPE,
    STATEMENT_TYPE,
)
from glasshouse.evidence.results import (
    PROBES,
    REQUIRED_PROBES,
    STOP_REASONS,
    WEIGHTS,
    manifest_subject,
    sealed_name,
)
from glasshouse.wire import dsse
from glasshouse.wire.aead import Suite
from glasshouse.wire.canonical import Json, decode, encode
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.fields import Fields, hex_or_null
from glasshouse.wire.kdf import salted
from glasshouse.wire.policy import Assurance, Profile
from glasshouse.wire.signing import SigningKey
from glasshouse.wire.states import Outcome

__all__ = [
    "ARTIFACT_PREDICATE",
    "ARTIFACT_TYPE",
    "MAX_ARTIFACT_BYTES",
    "MAX_GPUS",
    "NUMBERS",
    "PROBES",
    "PUBLIC_DECIMAL",
    "PUBLIC_STOP_REASONS",
    "SECRET_MEMORIES",
    "VOCABULARY",
    "WORKLOADS",
    "WORKSPACES",
    "Artifact",
    "PublicOutput",
    "known",
]

ARTIFACT_TYPE = RECEIPT_TYPE  # what tools of in-toto expect; the predicate's type tells the two apart
ARTIFACT_PREDICATE = "https://glasshouse.dev/artifact/v1"
MAX_ARTIFACT_BYTES = 256 * 1024

MAX_GPUS = 64

PUBLIC_DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,11})(\.[0-9]{1,6})?")
OTHER = "other"

# A word of the receipt that is not listed here may have been chosen to say something: it becomes "other".
NUMBERS = (
    "accuracy",
    "auc",
    "f1",
    "overhead-percent",
    "perplexity",
    "protected-rate-per-s",
    "raw-rate-per-s",
    "validation-loss",
)
SECRET_MEMORIES = ("locked-memory", "memfd-secret", "unlocked-memory", OTHER)
PUBLIC_STOP_REASONS = ("epochs", *STOP_REASONS, OTHER)
WORKLOADS = ("lora", "mlp", "script")
WORKSPACES = ("directory", "tmpfs", "tmpfs-noswap", OTHER)

_KEYS = (
    "_type",
    "assurance",
    "bundle_sha256",
    "bytes",
    "class",
    "countersigned_us",
    "digest",
    "done",
    "egress_peers",
    "elapsed_us",
    "environment_sha256",
    "final",
    "finished_us",
    "first",
    "floor_sha256",
    "gpus",
    "kind",
    "lifecycle_us",
    "log",
    "loss",
    "manifest_sha256",
    "measurement",
    "name",
    "numbers",
    "outcome",
    "outputs",
    "plaintext_hmac_sha256",
    "plaintext_salt",
    "plaintext_sha256",
    "policy_sha256",
    "predicate",
    "predicateType",
    "probe",
    "profile",
    "result",
    "root",
    "sealed_sha256",
    "secret_memory",
    "segments",
    "sha256",
    "size",
    "started_us",
    "stop_reason",
    "subject",
    "suite",
    "trainable",
    "training_imports_us",
    "unit",
    "value",
    "work",
    "workload",
    "workspace",
    "zeroization",
)


def weights_name(number: int) -> str:
    """Return how the subject is called that is output `number` in the clear."""
    return f"weights/{number:04d}"


VOCABULARY = frozenset(
    {*_KEYS, *LIFECYCLE, *NUMBERS, *PROBES, *SECRET_MEMORIES, *PUBLIC_STOP_REASONS, *WORKLOADS, *WORKSPACES}
    | {STATEMENT_TYPE, ARTIFACT_PREDICATE, "checkpoint", "completed", "epoch", "file", "manifest", "output", "step"}
    | {WEIGHTS}
    | {name(number) for number in range(MAX_OUTPUTS) for name in (sealed_name, weights_name)}
    | {member.value for levels in (Assurance, Profile, Suite, ProbeResult) for member in levels}
)
"""Every word that an artifact can be made of, beside numbers and digests."""


def known(word: str, vocabulary: tuple[str, ...]) -> str:
    """Return `word` if the vocabulary has it, and `other` if not."""
    return word if word in vocabulary else OTHER


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicOutput:
    """One output, without its name.

    Attributes:
        kind, of, plain_bytes, sealed_sha256, plain_hmac: as in the receipt.
        revealed: the salt and the plaintext's SHA-256, by the owner's choice and for weights alone.
    """

    kind: str
    of: str
    plain_bytes: int
    sealed_sha256: bytes
    plain_hmac: bytes | None
    revealed: tuple[bytes, bytes] | None = None

    def __post_init__(self) -> None:
        if (self.plain_hmac is not None) != (self.of == WEIGHTS):
            raise FormatError(Code.SCHEMA, "a commitment to a plaintext stands beside weights, and nowhere else")
        if self.revealed is not None and (self.plain_hmac is None or salted(*self.revealed) != self.plain_hmac):
            raise FormatError(Code.SCHEMA, "a plaintext digest that is not the one which the receipt commits to")

    def to_json(self) -> dict[str, Json]:
        salt, sha256 = self.revealed or (None, None)
        return {
            "bytes": self.plain_bytes,
            "class": self.of,
            "kind": self.kind,
            "plaintext_hmac_sha256": hex_or_null(self.plain_hmac),
            "plaintext_salt": hex_or_null(salt),
            "plaintext_sha256": hex_or_null(sha256),
            "sealed_sha256": self.sealed_sha256.hex(),
        }

    @classmethod
    def from_json(cls, value: Json) -> PublicOutput:
        """Inverse of `to_json`; raises `FormatError`."""
        fields = Fields(value, "output")
        salt, sha256 = fields.digest_or_null("plaintext_salt"), fields.digest_or_null("plaintext_sha256")
        if (salt is None) != (sha256 is None):
            raise FormatError(Code.SCHEMA, "a plaintext digest without its salt, or the reverse")
        found = cls(
            kind=fields.choice("kind", ["checkpoint", "output"]),
            of=fields.choice("class", ["file", WEIGHTS]),
            plain_bytes=fields.integer("bytes"),
            sealed_sha256=fields.digest("sealed_sha256"),
            plain_hmac=fields.digest_or_null("plaintext_hmac_sha256"),
            revealed=None if salt is None or sha256 is None else (salt, sha256),
        )
        fields.end()
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact:
    """What the owner says of a run whose bundle verified as good.

    Attributes:
        bundle_sha256: commits the owner to the bundle behind all this.
        egress_peers: how many peers the worker was allowed to reach.
        gpus: how many accelerators the runtime said that it had.
        loss: first and final, rounded to six decimals, or None.
        started_us, finished_us: by the runtime's clock.
        countersigned_us: when the broker put its name under the receipt, by its own clock.
        numbers: of `NUMBERS`, for instance what a benchmark or an evaluation printed.
        others: as in receipt and manifest.

    Raises:
        FormatError: `schema-invalid` on construction from what contradicts itself.
    """

    bundle_sha256: bytes
    assurance: Assurance
    profile: Profile
    suite: Suite
    workload: str
    egress_peers: int
    gpus: int
    manifest_sha256: bytes
    floor_sha256: bytes
    policy_sha256: bytes
    measurement: bytes
    environment_sha256: bytes
    log_root: bytes
    log_size: int
    segments: int
    unit: str
    done: int
    elapsed_us: int
    stop_reason: str
    loss: tuple[str, str] | None
    trainable: int | None
    workspace: str
    secret_memory: str
    outputs: tuple[PublicOutput, ...]
    zeroization: tuple[tuple[str, ProbeResult], ...]
    lifecycle_us: Mapping[str, int | None]
    training_imports_us: int | None
    started_us: int
    finished_us: int
    countersigned_us: int
    numbers: Mapping[str, str]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.zeroization]
        if len(set(names)) != len(names) or not set(names) >= REQUIRED_PROBES:
            raise FormatError(Code.SCHEMA, "an artifact in which a probe is missing or answers twice")
        if any(result is ProbeResult.FOUND for _, result in self.zeroization):
            raise FormatError(Code.SCHEMA, "an artifact of a run that left something behind")
        if not self.started_us <= self.finished_us <= self.countersigned_us + CLOCK_LEEWAY_US:
            raise FormatError(Code.SCHEMA, "an artifact of a run that ends before it starts or after it was closed")

    def to_json(self) -> dict[str, Json]:
        """Return the in-toto Statement."""
        return {
            "_type": STATEMENT_TYPE,
            "predicate": self._predicate(),
            "predicateType": ARTIFACT_PREDICATE,
            "subject": self._subject(),
        }

    def _subject(self) -> list[Json]:
        """Return the weights that are revealed; without any, the sealed outputs; without these, the package."""
        numbered = list(enumerate(self.outputs))
        weights = [(weights_name(at), one.revealed[1]) for at, one in numbered if one.revealed is not None]
        found = weights or [(sealed_name(at), one.sealed_sha256) for at, one in numbered]
        subject: list[Json] = [{"digest": {"sha256": digest.hex()}, "name": name} for name, digest in found]
        return subject or [manifest_subject(self.manifest_sha256)]

    def _predicate(self) -> dict[str, Json]:
        return {
            "assurance": self.assurance.value,
            "bundle_sha256": self.bundle_sha256.hex(),
            "countersigned_us": self.countersigned_us,
            "egress_peers": self.egress_peers,
            "environment_sha256": self.environment_sha256.hex(),
            "finished_us": self.finished_us,
            "floor_sha256": self.floor_sha256.hex(),
            "gpus": self.gpus,
            "lifecycle_us": dict(self.lifecycle_us),
            "log": {"root": self.log_root.hex(), "size": self.log_size},
            "loss": None if self.loss is None else {"final": self.loss[1], "first": self.loss[0]},
            "manifest_sha256": self.manifest_sha256.hex(),
            "measurement": self.measurement.hex(),
            "numbers": [{"name": name, "value": self.numbers[name]} for name in sorted(self.numbers)],
            "outcome": Outcome.COMPLETED.value,
            "outputs": [output.to_json() for output in self.outputs],
            "policy_sha256": self.policy_sha256.hex(),
            "profile": self.profile.value,
            "secret_memory": self.secret_memory,
            "segments": self.segments,
            "started_us": self.started_us,
            "suite": self.suite.value,
            "trainable": self.trainable,
            "training_imports_us": self.training_imports_us,
            "work": {
                "done": self.done,
                "elapsed_us": self.elapsed_us,
                "stop_reason": self.stop_reason,
                "unit": self.unit,
            },
            "workload": self.workload,
            "workspace": self.workspace,
            "zeroization": [{"probe": probe, "result": result.value} for probe, result in self.zeroization],
        }

    @classmethod
    def from_json(cls, value: Json) -> Artifact:
        """Inverse of `to_json`; raises `FormatError`."""
        statement = Fields(value, "statement")
        statement.choice("_type", [STATEMENT_TYPE])
        statement.choice("predicateType", [ARTIFACT_PREDICATE])
        subject = statement.any("subject")
        fields = statement.child("predicate")
        fields.choice("outcome", [Outcome.COMPLETED.value])
        log, work, lifecycle = fields.child("log"), fields.child("work"), fields.child("lifecycle_us")
        found = cls(
            bundle_sha256=fields.digest("bundle_sha256"),
            assurance=Assurance(fields.choice("assurance", list(Assurance))),
            profile=Profile(fields.choice("profile", list(Profile))),
            suite=Suite(fields.choice("suite", list(Suite))),
            workload=fields.choice("workload", WORKLOADS),
            egress_peers=fields.integer("egress_peers", high=16),
            gpus=fields.integer("gpus", high=MAX_GPUS),
            manifest_sha256=fields.digest("manifest_sha256"),
            floor_sha256=fields.digest("floor_sha256"),
            policy_sha256=fields.digest("policy_sha256"),
            measurement=fields.digest("measurement"),
            environment_sha256=fields.digest("environment_sha256"),
            log_root=log.digest("root"),
            log_size=log.integer("size", low=1),
            segments=fields.integer("segments"),
            unit=work.choice("unit", ["epoch", "step"]),
            done=work.integer("done"),
            elapsed_us=work.integer("elapsed_us"),
            stop_reason=work.choice("stop_reason", PUBLIC_STOP_REASONS),
            loss=None if fields.null("loss") else _loss(fields.child("loss")),
            trainable=fields.integer_or_null("trainable"),
            workspace=fields.choice("workspace", WORKSPACES),
            secret_memory=fields.choice("secret_memory", SECRET_MEMORIES),
            outputs=tuple(PublicOutput.from_json(item) for item in fields.items("outputs", max_items=MAX_OUTPUTS)),
            zeroization=tuple(_probe(item) for item in fields.items("zeroization", max_items=MAX_PROBES)),
            lifecycle_us={step: lifecycle.integer_or_null(step) for step in LIFECYCLE},
            training_imports_us=fields.integer_or_null("training_imports_us"),
            started_us=fields.integer("started_us"),
            finished_us=fields.integer("finished_us"),
            countersigned_us=fields.integer("countersigned_us"),
            numbers=_numbers(fields),
        )
        for part in (log, work, lifecycle, fields, statement):
            part.end()
        if subject != found._subject():
            raise FormatError(Code.SCHEMA, "an artifact whose subject is not what it tells of")
        return found

    def sign(self, owner: SigningKey) -> bytes:
        """Return the artifact in its envelope; its own parser must accept it first."""
        payload = encode(self.to_json())
        if Artifact.from_json(decode(payload, max_bytes=MAX_ARTIFACT_BYTES)) != self:
            raise FormatError(Code.SCHEMA, "an artifact that does not survive its own encoding")
        return dsse.sign(ARTIFACT_TYPE, payload, [owner]).encode()

    @classmethod
    def parse_signed(cls, data: bytes, *, owner: bytes) -> Artifact:
        """Check the owner's signature and return the artifact.

        Raises:
            FormatError: `too-large`, `schema-invalid`, `not-canonical`, `wrong-type` or `signature-invalid`.
        """
        payload = Envelope.parse(data, max_bytes=MAX_ARTIFACT_BYTES).verify(ARTIFACT_TYPE, owner)
        return cls.from_json(decode(payload, max_bytes=MAX_ARTIFACT_BYTES))


def _loss(fields: Fields) -> tuple[str, str]:
    loss = tuple(fields.text(name, max_chars=24, pattern=PUBLIC_DECIMAL) for name in ("first", "final"))
    fields.end()
    return loss[0], loss[1]


def _probe(value: Json) -> tuple[str, ProbeResult]:
    fields = Fields(value, "probe")
    probe = fields.choice("probe", PROBES), ProbeResult(fields.choice("result", list(ProbeResult)))
    fields.end()
    return probe


def _numbers(fields: Fields) -> dict[str, str]:
    numbers: dict[str, str] = {}
    for item in fields.items("numbers", max_items=len(NUMBERS)):
        one = Fields(item, "number")
        name = one.choice("name", NUMBERS)
        if name in numbers or any(name < other for other in numbers):
            raise FormatError(Code.SCHEMA, "numbers that are repeated or out of order")
        numbers[name] = one.text("value", max_chars=24, pattern=PUBLIC_DECIMAL)
        one.end()
    return numbers
