"""What the files of a measurement do not say by themselves: which workload, on which machine, and when.

Everything that could name a person, a place or a path has no field here: texts are short, of a narrow set of
characters and without slashes, and `Facts` refuses anything else on construction.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

from glasshouse.errors import Code, FormatError
from glasshouse.evidence.artifact import WORKLOADS
from glasshouse.wire.canonical import Json
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.fields import Fields

__all__ = ["MAX_STATEMENT_BYTES", "STATEMENT_KIND", "STATEMENT_TYPE", "Facts", "payload_of", "plain"]

STATEMENT_TYPE = "application/vnd.glasshouse.overhead+json"
STATEMENT_KIND = "https://glasshouse.dev/overhead/v1"
MAX_STATEMENT_BYTES = 4 << 20
MAX_FACTS = 32
MAX_PLANTED_PPM = 10_000_000
# No slash, no colon, no backslash: nothing that could be a path or an address.
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ()@.,_+-]{0,95}")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,31}")
_FACT = re.compile(r"[a-z][a-z0-9_]{0,31}")


def plain(text: str) -> str | None:
    """Return a text of the machine's (a CPU's name, a version) as it may stand in `system`; None if nothing is left."""
    kept = " ".join(re.sub(r"[^A-Za-z0-9 ()@.,_+-]", " ", text).split()).lstrip(" ()@.,_+-")[:96].rstrip()
    return kept or None


@dataclass(frozen=True, slots=True)
class Facts:
    """What was measured, where and when.

    Args:
        workload: `kind` (lora, mlp or script), `name`, `unit` (a word such as step) and
            `facts`, at most 32 short words, integers or booleans under names such as ``batch_size``.
        system: `cpu`, `logical_cpus`, `memory_bytes`, `kernel`, `python`, `torch`, `gpu` (`driver` and `name`),
            `virtualised` and `glasshouse`; None for what is not there or could not be found out.
        created_us: when the statement was made, microseconds since the epoch.
        planted_ppm: the busy time that was added to every protected step on purpose, in millionths of a step; 0 in an
            honest measurement.

    Raises:
        FormatError: `schema-invalid`, another shape or a text that has no place in it.
    """

    _: KW_ONLY
    workload: Mapping[str, Json]
    system: Mapping[str, Json]
    created_us: int
    planted_ppm: int = 0

    def __post_init__(self) -> None:
        _check_workload(Fields(dict(self.workload), "workload"))
        _check_system(Fields(dict(self.system), "system"))
        if not 0 <= self.planted_ppm <= MAX_PLANTED_PPM:
            raise FormatError(Code.SCHEMA, f"a planted overhead of {self.planted_ppm} ppm")

    def to_json(self) -> dict[str, Json]:
        """Return the members that stand in the statement."""
        return {
            "created_us": self.created_us,
            "planted_ppm": self.planted_ppm,
            "system": dict(self.system),
            "workload": dict(self.workload),
        }

    @classmethod
    def read(cls, fields: Fields) -> Facts:
        """Take the members of `to_json` out of a statement; raises `FormatError`."""
        workload, system = fields.any("workload"), fields.any("system")
        if not isinstance(workload, Mapping) or not isinstance(system, Mapping):
            raise FormatError(Code.SCHEMA, "a workload or system that is no object")
        return cls(
            workload=workload,
            system=system,
            created_us=fields.integer("created_us"),
            planted_ppm=fields.integer("planted_ppm"),
        )


def payload_of(data: bytes) -> bytes:
    """Return what a statement's envelope carries. No signature is checked: for a reader of its own files.

    Raises:
        FormatError: `too-large`, `not-canonical`, `schema-invalid` or `wrong-type`.
    """
    envelope = Envelope.parse(data, max_bytes=2 * MAX_STATEMENT_BYTES)
    if envelope.payload_type != STATEMENT_TYPE:
        raise FormatError(Code.WRONG_TYPE, "an envelope of another type where a measurement's statement was expected")
    return envelope.payload


def _check_workload(fields: Fields) -> None:
    fields.choice("kind", WORKLOADS)
    fields.text("name", max_chars=96, pattern=_PLAIN)
    fields.text("unit", max_chars=32, pattern=_WORD)
    facts = fields.any("facts")
    fields.end()
    if not isinstance(facts, Mapping) or len(facts) > MAX_FACTS:
        raise FormatError(Code.SCHEMA, f"workload.facts is not an object of at most {MAX_FACTS} members")
    for name, value in facts.items():
        short = isinstance(value, str) and _WORD.fullmatch(value)
        if not _FACT.fullmatch(name) or not (short or isinstance(value, (bool, int))):
            raise FormatError(Code.SCHEMA, "a fact of the workload that is no short word, integer or boolean")


def _check_system(fields: Fields) -> None:
    for name in ("cpu", "kernel", "python", "torch", "glasshouse"):
        if not fields.null(name):
            fields.text(name, max_chars=96, pattern=_PLAIN)
    for name in ("logical_cpus", "memory_bytes"):
        if not fields.null(name):
            fields.integer(name, low=1)
    if not fields.null("virtualised"):
        fields.flag("virtualised")
    if not fields.null("gpu"):
        gpu = fields.child("gpu")
        gpu.text("name", max_chars=96, pattern=_PLAIN)
        if not gpu.null("driver"):
            gpu.text("driver", max_chars=96, pattern=_PLAIN)
        gpu.end()
    fields.end()
