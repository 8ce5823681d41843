"""The parts of a receipt: outputs, work, losses and what the probes answered (spec/evidence.md section 5).

Law, for each: ``X.from_json(x.to_json()) == x``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from glasshouse.errors import Code, FormatError
from glasshouse.evidence.events import ProbeResult, is_loss
from glasshouse.wire.canonical import Json
from glasshouse.wire.fields import Fields, hex_or_null

__all__ = [
    "PROBES",
    "REQUIRED_PROBES",
    "WEIGHTS",
    "WORD",
    "Loss",
    "Output",
    "Probe",
    "Work",
    "manifest_subject",
    "sealed_name",
]

# A closed list: the receipt lies on the host's disk, and any word would be a way out of the sandbox.
STOP_REASONS = ("finished", "steps", "stopped", "time")

WEIGHTS = "weights"
# What a runtime searches at its end; a run that completed has searched all but the last, which stands for a search that
# could not be made at all.
PROBES = ("agent-memory", "gpu-memory", "shared-memory", "swap", "workspace", "zeroization")
REQUIRED_PROBES = frozenset(PROBES[:-1])

WORD = re.compile(r"[a-z][a-z0-9-]{0,63}")
_DETAIL = re.compile(r"[\x20-\x7e]{0,200}")


def sealed_name(sequence: int) -> str:
    """Return where a sealed output lies in the run's folder."""
    return f"outputs/{sequence:04d}.sealed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """A result that left the machine sealed.

    It has a number and no name: the receipt lies on the rented machine's disk. Its name is sealed with it.
    For the same reason no plaintext digest is here: a small file could be guessed from it, and weights that follow from
    a seed be confirmed.

    Attributes:
        kind: `output` or `checkpoint`.
        of: `weights` or `file`: what the plaintext is (the class in events and on the wire).
        sequence: its number, as in the log and in the sealed file's name.
        plain_bytes: length of the plaintext.
        plain_hmac: for weights HMAC-SHA-256(salt, plaintext SHA-256), the salt being sealed with the output; None
            for a file.
        sealed_bytes, sealed_sha256: of the sealed file.
    """

    kind: str
    of: str
    sequence: int
    plain_bytes: int
    plain_hmac: bytes | None
    sealed_bytes: int
    sealed_sha256: bytes

    def __post_init__(self) -> None:
        if (self.plain_hmac is not None) != (self.of == WEIGHTS):
            raise FormatError(Code.SCHEMA, "a commitment to a plaintext stands beside weights, and nowhere else")

    @property
    def file_name(self) -> str:
        """Where the sealed file lies in the run's folder."""
        return sealed_name(self.sequence)

    def to_json(self) -> dict[str, Json]:
        """Return the in-toto subject (a ResourceDescriptor): the sealed file as it lies in the folder."""
        return {
            "annotations": {
                "bytes": self.plain_bytes,
                "class": self.of,
                "kind": self.kind,
                "plaintext_hmac_sha256": hex_or_null(self.plain_hmac),
                "sealed_bytes": self.sealed_bytes,
                "sequence": self.sequence,
            },
            "digest": {"sha256": self.sealed_sha256.hex()},
            "name": self.file_name,
        }

    @classmethod
    def from_json(cls, value: Json) -> Output:
        """Inverse of `to_json`; raises `FormatError`."""
        fields = Fields(value, "subject")
        about, digest = fields.child("annotations"), fields.child("digest")
        found = cls(
            kind=about.choice("kind", ["checkpoint", "output"]),
            of=about.choice("class", ["file", WEIGHTS]),
            sequence=about.integer("sequence"),
            plain_bytes=about.integer("bytes"),
            plain_hmac=about.digest_or_null("plaintext_hmac_sha256"),
            sealed_bytes=about.integer("sealed_bytes"),
            sealed_sha256=digest.digest("sha256"),
        )
        fields.choice("name", [found.file_name])
        for part in (about, digest, fields):
            part.end()
        return found


def manifest_subject(manifest_sha256: bytes) -> dict[str, Json]:
    """Return the in-toto subject of a statement about a run that gave nothing back: the package that it was of."""
    return {"digest": {"sha256": manifest_sha256.hex()}, "name": "manifest"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """How much was done.

    Attributes:
        unit: `step` or `epoch`.
        done: how many.
        elapsed_us: by the worker's clock, and no longer than the agent saw it run.
        stop_reason: one of `STOP_REASONS`.
    """

    unit: str
    done: int
    elapsed_us: int
    stop_reason: str

    def to_json(self) -> dict[str, Json]:
        return {
            "done": self.done,
            "elapsed_us": self.elapsed_us,
            "stop_reason": self.stop_reason,
            "unit": self.unit,
        }

    @classmethod
    def from_json(cls, value: Json) -> Work:
        """Inverse of `to_json`; raises `FormatError`."""
        fields = Fields(value, "work")
        found = cls(
            unit=fields.choice("unit", ["epoch", "step"]),
            done=fields.integer("done"),
            elapsed_us=fields.integer("elapsed_us"),
            stop_reason=fields.choice("stop_reason", STOP_REASONS),
        )
        fields.end()
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """First and last loss as decimal strings."""

    first: str
    final: str

    def to_json(self) -> dict[str, Json]:
        return {"final": self.final, "first": self.first}

    @classmethod
    def from_json(cls, value: Json) -> Loss:
        """Inverse of `to_json`; raises `FormatError`."""
        fields = Fields(value, "loss")
        found = cls(first=_loss(fields, "first"), final=_loss(fields, "final"))
        fields.end()
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """The answer of one search for something left behind."""

    probe: str
    result: ProbeResult
    detail: str = ""

    def to_json(self) -> dict[str, Json]:
        return {"detail": self.detail, "probe": self.probe, "result": self.result.value}

    @classmethod
    def from_json(cls, value: Json) -> Probe:
        """Inverse of `to_json`; raises `FormatError`."""
        fields = Fields(value, "probe")
        found = cls(
            probe=fields.choice("probe", PROBES),
            result=ProbeResult(fields.choice("result", list(ProbeResult))),
            detail=fields.text("detail", max_chars=200, pattern=_DETAIL),
        )
        fields.end()
        return found


def _loss(fields: Fields, name: str) -> str:
    value = fields.decimal(name)
    if not is_loss(value):
        raise FormatError(Code.SCHEMA, f"{name} is a loss of more than six significant digits, or not in its one form")
    return value
