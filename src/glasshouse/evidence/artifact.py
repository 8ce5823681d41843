"""The public artifact: what an owner may show of a run to anyone (spec/evidence.md section 9).

An in-toto Statement v1: its subjects are the plaintext weights where the owner reveals their digests, else the sealed
outputs. The guarantee is the closed schema: enumerations, integers, bounded decimals and digests of fixed length.
Laws: ``Artifact.from_json(a.to_json()) == a``; there is no value that is free text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeAlias

from glasshouse.errors import Code, FormatError
from glasshouse.evidence.events import ProbeResult
from glasshouse.evidence.receipt import (
    CLOCK_LEEWAY_US,
    LIFECYCLE,
    MAX_OUTPUTS,
    MAX_PROBES,
    PROBES,
    RECEIPT_TYPE,
    REQUIRED_PROBES,
    STATEMENT_TYPE,
    STOP_REASONS,
    WEIGHTS,
    Class,
    Kind,
    Lifecycle,
    Statement,
    Unit,
    manifest_subject,
    sealed_name,
)
from glasshouse.wire import dsse
from glasshouse.wire.canonical import Codec, Json
from glasshouse.wire.crypto import SigningKey, Suite, salted
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.policy import WORKLOADS, Assurance, Profile
from glasshouse.wire.record import Member, Record, Sha256, choice, fixed, integer, items, text
from glasshouse.wire.states import Outcome

ARTIFACT_TYPE = RECEIPT_TYPE  # what tools of in-toto expect; the predicate's type differs
ARTIFACT_PREDICATE = "https://glasshouse.dev/artifact/v1"
MAX_ARTIFACT_BYTES = 256 * 1024

MAX_GPUS = 64

PUBLIC_DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,11})(\.[0-9]{1,6})?")
OTHER = "other"

# A text of the receipt that is not listed here may have been chosen as a message: it becomes "other".
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
WORKSPACES = ("directory", "tmpfs", "tmpfs-noswap", OTHER)


def weights_name(number: int) -> str:
    """Return how the subject is called that is output `number` in the clear."""
    return f"weights/{number:04d}"


def known(word: str, vocabulary: tuple[str, ...]) -> str:
    """Return `word` if the vocabulary has it, and `other` if not."""
    return word if word in vocabulary else OTHER


_DECIMAL = text(24, PUBLIC_DECIMAL)
_NUMBERS = items(len(NUMBERS), fixed(name=choice(NUMBERS), value=_DECIMAL))
_PROBE = fixed(probe=choice(PROBES), result=choice(list(ProbeResult)))


def _numbers(value: Json, where: str) -> dict[str, str]:
    pairs = _NUMBERS.read(value, where)
    names = [name for name, _ in pairs]
    if names != sorted(set(names)):
        raise FormatError(Code.SCHEMA, "numbers that are repeated or out of order")
    return dict(pairs)


Numbers: TypeAlias = Annotated[Mapping[str, str], Codec(_numbers, lambda value: _NUMBERS.write(sorted(value.items())))]


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicOutput(Record, name="output"):
    """One output of the receipt, without its name; of weights, the owner may reveal the plaintext's digest."""

    kind: Kind
    of: Annotated[Class, Member("class")]
    plain_bytes: Annotated[int, Member("bytes")]
    sealed_sha256: Sha256
    plain_hmac: Annotated[Sha256 | None, Member("plaintext_hmac_sha256")]
    plain_salt: Annotated[Sha256 | None, Member("plaintext_salt")] = None
    plain_sha256: Annotated[Sha256 | None, Member("plaintext_sha256")] = None

    def __post_init__(self) -> None:
        if (self.plain_hmac is not None) != (self.of == WEIGHTS):
            raise FormatError(Code.SCHEMA, "a commitment to a plaintext stands beside weights, and nowhere else")
        if (self.plain_salt is None) != (self.plain_sha256 is None):
            raise FormatError(Code.SCHEMA, "a plaintext digest without its salt, or the reverse")
        if (shown := self.revealed) and (self.plain_hmac is None or salted(*shown) != self.plain_hmac):
            raise FormatError(Code.SCHEMA, "a plaintext digest that is not the one which the receipt commits to")

    @property
    def revealed(self) -> tuple[bytes, bytes] | None:
        """The salt and the plaintext's SHA-256; None unless the owner reveals them."""
        salt, sha256 = self.plain_salt, self.plain_sha256
        return None if salt is None or sha256 is None else (salt, sha256)

    def reveal(self, shown: tuple[bytes, bytes] | None) -> PublicOutput:
        """Return the output with this salt and SHA-256 of its plaintext, or with none; raises `FormatError`."""
        salt, sha256 = shown or (None, None)
        return replace(self, plain_salt=salt, plain_sha256=sha256)


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact(
    dsse.Signed,
    name="predicate",
    max_bytes=MAX_ARTIFACT_BYTES,
    constants={"outcome": Outcome.COMPLETED.value},
    payload_type=ARTIFACT_TYPE,
):
    """What the owner shows of a run whose bundle verified as good; what has no comment is as in receipt and manifest.

    Raises:
        FormatError: `schema-invalid` on construction from what contradicts itself.
    """

    bundle_sha256: Sha256  # commits the owner to the bundle behind all this
    assurance: Assurance
    profile: Profile
    suite: Suite
    workload: Annotated[str, choice(WORKLOADS)]
    egress_peers: Annotated[int, integer(0, 16)]  # how many peers the worker was allowed to reach
    gpus: Annotated[int, integer(0, MAX_GPUS)]  # by the runtime's claims
    manifest_sha256: Sha256
    floor_sha256: Sha256
    policy_sha256: Sha256
    measurement: Sha256
    environment_sha256: Sha256
    log_root: Annotated[Sha256, Member("log", "root")]
    log_size: Annotated[int, integer(1), Member("log", "size")]
    segments: int
    unit: Annotated[Unit, Member("work", "unit")]
    done: Annotated[int, Member("work", "done")]
    elapsed_us: Annotated[int, Member("work", "elapsed_us")]
    stop_reason: Annotated[str, choice(PUBLIC_STOP_REASONS), Member("work", "stop_reason")]
    loss: Annotated[tuple[str, str] | None, fixed(first=_DECIMAL, final=_DECIMAL)]  # of at most six decimals
    trainable: int | None
    workspace: Annotated[str, choice(WORKSPACES)]
    secret_memory: Annotated[str, choice(SECRET_MEMORIES)]
    outputs: Annotated[tuple[PublicOutput, ...], items(MAX_OUTPUTS)]
    zeroization: Annotated[tuple[tuple[str, ProbeResult], ...], items(MAX_PROBES, _PROBE)]
    lifecycle_us: Lifecycle
    training_imports_us: int | None
    started_us: int  # by the runtime's clock
    finished_us: int
    countersigned_us: int  # when the broker signed the receipt, by its own clock
    numbers: Numbers  # of `NUMBERS`, for instance what a benchmark or an evaluation printed

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
        predicate = Record.to_json(self)
        return Statement(predicate_type=ARTIFACT_PREDICATE, predicate=predicate, subject=self._subject()).to_json()

    @classmethod
    def from_json(cls, value: Json, where: str | None = None, **apart: Any) -> Artifact:
        """Inverse of `to_json`; raises `FormatError`."""
        statement = Statement.from_json(value)
        found = super(Artifact, cls).from_json(statement.predicate_of(ARTIFACT_PREDICATE), where, **apart)
        if statement.subject != found._subject():
            raise FormatError(Code.SCHEMA, "an artifact whose subject is not that of its outputs")
        return found

    def _subject(self) -> tuple[Json, ...]:
        """Return the weights that are revealed; without any, the sealed outputs; without these, the package."""
        numbered = list(enumerate(self.outputs))
        weights = [(weights_name(at), one.revealed[1]) for at, one in numbered if one.revealed is not None]
        found = weights or [(sealed_name(at), one.sealed_sha256) for at, one in numbered]
        subject: list[Json] = [{"digest": {"sha256": digest.hex()}, "name": name} for name, digest in found]
        return tuple(subject) or (manifest_subject(self.manifest_sha256),)

    def sign(self, *keys: SigningKey) -> Envelope:
        """Return the artifact in its envelope; its own parser must accept it first."""
        if Artifact.parse(self.encode()) != self:
            raise FormatError(Code.SCHEMA, "an artifact that does not survive its own encoding")
        return super(Artifact, self).sign(*keys)


VOCABULARY = frozenset(
    {*LIFECYCLE, *NUMBERS, *PROBES, *SECRET_MEMORIES, *PUBLIC_STOP_REASONS, *WORKLOADS, *WORKSPACES}
    | {name for kind in (Artifact, PublicOutput, Statement) for name in kind.member_names()}
    | {"digest", "final", "first", "name", "probe", "result", "sha256", "value"}  # members of what has no class
    | {STATEMENT_TYPE, ARTIFACT_PREDICATE, "checkpoint", "completed", "epoch", "file", "manifest", "output", "step"}
    | {WEIGHTS}
    | {name(number) for number in range(MAX_OUTPUTS) for name in (sealed_name, weights_name)}
    | {member.value for levels in (Assurance, Profile, Suite, ProbeResult) for member in levels}
)
"""Every word that an artifact can be made of, beside numbers and digests."""
