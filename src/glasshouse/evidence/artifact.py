"""The public artifact: what an owner may show of a run to anyone (spec/evidence.md section 9).

The guarantee is the closed schema: enumerations, integers, bounded decimals and digests of fixed length.
Laws: ``Artifact.from_json(a.to_json()) == a``; there is no value that is free text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from glasshouse.errors import Code, FormatError
from glasshouse.evidence.events import ProbeResult
from glasshouse.evidence.receipt import LIFECYCLE, MAX_OUTPUTS, MAX_PROBES
from glasshouse.evidence.results import PACED, WEIGHTS
from glasshouse.wire import dsse
from glasshouse.wire.aead import Suite
from glasshouse.wire.canonical import Json, decode, encode
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.fields import Fields
from glasshouse.wire.policy import Assurance, Profile
from glasshouse.wire.signing import SigningKey
from glasshouse.wire.states import Outcome

__all__ = [
    "ARTIFACT_KIND",
    "ARTIFACT_TYPE",
    "MAX_ARTIFACT_BYTES",
    "NUMBERS",
    "PROBES",
    "PUBLIC_DECIMAL",
    "SECRET_MEMORIES",
    "STOP_REASONS",
    "VOCABULARY",
    "WORKLOADS",
    "WORKSPACES",
    "Artifact",
    "PublicOutput",
    "known",
]

ARTIFACT_TYPE = "application/vnd.glasshouse.artifact+json"
ARTIFACT_KIND = "https://glasshouse.dev/artifact/v1"
MAX_ARTIFACT_BYTES = 256 * 1024

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
PROBES = ("agent-memory", "gpu-memory", "shared-memory", "swap", "workspace", "zeroization", OTHER)
SECRET_MEMORIES = ("locked-memory", "memfd-secret", "unlocked-memory", OTHER)
STOP_REASONS = ("epochs", "finished", PACED, "steps", "stopped", "time", OTHER)
WORKLOADS = ("lora", "mlp", "script")
WORKSPACES = ("directory", "tmpfs", "tmpfs-noswap", OTHER)

_KEYS = (
    "assurance",
    "bundle_sha256",
    "bytes",
    "class",
    "digest_of",
    "done",
    "duration_us",
    "egress_peers",
    "elapsed_us",
    "environment_sha256",
    "final",
    "first",
    "floor_sha256",
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
    "policy_sha256",
    "probe",
    "profile",
    "result",
    "root",
    "secret_memory",
    "segments",
    "sha256",
    "size",
    "stop_reason",
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
VOCABULARY = frozenset(
    {*_KEYS, *LIFECYCLE, *NUMBERS, *PROBES, *SECRET_MEMORIES, *STOP_REASONS, *WORKLOADS, *WORKSPACES}
    | {ARTIFACT_KIND, "checkpoint", "completed", "epoch", "file", "output", "plaintext", "sealed", "step", WEIGHTS}
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
        kind, of, plain_bytes: as in the receipt.
        sha256: of the plaintext for weights, of the sealed file for everything else.
    """

    kind: str
    of: str
    plain_bytes: int
    sha256: bytes

    @property
    def digest_of(self) -> str:
        return "plaintext" if self.of == WEIGHTS else "sealed"

    def to_json(self) -> dict[str, Json]:
        return {
            "bytes": self.plain_bytes,
            "class": self.of,
            "digest_of": self.digest_of,
            "kind": self.kind,
            "sha256": self.sha256.hex(),
        }

    @classmethod
    def from_json(cls, value: Json) -> PublicOutput:
        """Inverse of `to_json`; raises `FormatError`."""
        fields = Fields(value, "output")
        found = cls(
            kind=fields.choice("kind", ["checkpoint", "output"]),
            of=fields.choice("class", ["file", WEIGHTS]),
            plain_bytes=fields.integer("bytes"),
            sha256=fields.digest("sha256"),
        )
        fields.choice("digest_of", [found.digest_of])
        fields.end()
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact:
    """What the owner says of a run whose bundle verified as good.

    Attributes:
        bundle_sha256: commits the owner to the bundle behind all this.
        egress_peers: how many peers the worker was allowed to reach.
        loss: first and final, rounded to six decimals, or None.
        numbers: of `NUMBERS`, for instance what a benchmark or an evaluation printed.
        others: as in receipt and manifest.
    """

    bundle_sha256: bytes
    assurance: Assurance
    profile: Profile
    suite: Suite
    workload: str
    egress_peers: int
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
    duration_us: int
    numbers: Mapping[str, str]

    def to_json(self) -> dict[str, Json]:
        return {
            "assurance": self.assurance.value,
            "bundle_sha256": self.bundle_sha256.hex(),
            "duration_us": self.duration_us,
            "egress_peers": self.egress_peers,
            "environment_sha256": self.environment_sha256.hex(),
            "floor_sha256": self.floor_sha256.hex(),
            "kind": ARTIFACT_KIND,
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
        fields = Fields(value, "artifact")
        fields.choice("kind", [ARTIFACT_KIND])
        fields.choice("outcome", [Outcome.COMPLETED.value])
        log, work, lifecycle = fields.child("log"), fields.child("work"), fields.child("lifecycle_us")
        found = cls(
            bundle_sha256=fields.digest("bundle_sha256"),
            assurance=Assurance(fields.choice("assurance", list(Assurance))),
            profile=Profile(fields.choice("profile", list(Profile))),
            suite=Suite(fields.choice("suite", list(Suite))),
            workload=fields.choice("workload", WORKLOADS),
            egress_peers=fields.integer("egress_peers", high=16),
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
            stop_reason=work.choice("stop_reason", STOP_REASONS),
            loss=None if fields.null("loss") else _loss(fields.child("loss")),
            trainable=_integer(fields, "trainable"),
            workspace=fields.choice("workspace", WORKSPACES),
            secret_memory=fields.choice("secret_memory", SECRET_MEMORIES),
            outputs=tuple(PublicOutput.from_json(item) for item in fields.items("outputs", max_items=MAX_OUTPUTS)),
            zeroization=tuple(_probe(item) for item in fields.items("zeroization", max_items=MAX_PROBES)),
            lifecycle_us={step: _integer(lifecycle, step) for step in LIFECYCLE},
            training_imports_us=_integer(fields, "training_imports_us"),
            duration_us=fields.integer("duration_us"),
            numbers=_numbers(fields),
        )
        for part in (log, work, lifecycle, fields):
            part.end()
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


def _integer(fields: Fields, name: str) -> int | None:
    return None if fields.null(name) else fields.integer(name)


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
