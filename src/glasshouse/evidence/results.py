"""The parts of a receipt: outputs, work, losses and what the probes answered (spec/evidence.md section 5).

Law, for each: ``X.from_json(x.to_json()) == x``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from glasshouse.errors import Code, FormatError
from glasshouse.evidence.events import ProbeResult, is_loss
from glasshouse.wire.canonical import Codec, Json
from glasshouse.wire.record import Member, Record, Sha256, choice, items, raw, text

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
MAX_OUTPUTS = 400

# A closed list: the receipt lies on the host's disk, and any word would be a way out of the sandbox.
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
class Probe(Record, name="probe"):
    """The answer of one search for something left behind."""

    probe: ProbeName
    result: ProbeResult
    detail: Annotated[str, text(200, _DETAIL)] = ""
