"""The lines of `sessions.jsonl`: what each session left beside its slices (spec/overhead-artifact.md section 9.2).

Law: ``SessionNote.parse(note.encode()) == note``. A note is the harness's own word; verification compares it with
the receipt of the protected run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass

from glasshouse.bench.overhead.slices import whole_lines
from glasshouse.errors import Code, FormatError
from glasshouse.evidence.receipt import LIFECYCLE, MAX_OUTPUTS
from glasshouse.evidence.results import WEIGHTS
from glasshouse.wire.canonical import Json, decode, encode
from glasshouse.wire.fields import Fields, hex_or_null

__all__ = ["MAX_NOTE_BYTES", "ArmWork", "SessionNote", "read_notes"]

MAX_NOTE_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class ArmWork:
    """What one arm's process did, if it ended by itself.

    Args:
        done: steps, by its own count.
        start_ns: from its launch to its first park.
        outputs: of each output, in order, its kind, its class and, for weights alone, HMAC-SHA-256(salt, plaintext
            SHA-256): both arms of a session and the receipt use the same salt, which is not here.

    Raises:
        FormatError: `schema-invalid`, weights that nothing compares with, or a file that something does.
    """

    _: KW_ONLY
    done: int
    start_ns: int
    outputs: tuple[tuple[str, str, bytes | None], ...]

    def __post_init__(self) -> None:
        if any((hmac is not None) != (of == WEIGHTS) for _, of, hmac in self.outputs):
            raise FormatError(Code.SCHEMA, "a commitment to a plaintext stands beside weights, and nowhere else")

    @property
    def weights(self) -> tuple[tuple[str, bytes], ...]:
        """Kind and keyed digest of the outputs that hold trained weights."""
        return tuple((kind, hmac) for kind, _, hmac in self.outputs if hmac is not None)

    def to_json(self) -> dict[str, Json]:
        return {
            "done": self.done,
            "outputs": [
                {"class": of, "hmac_sha256": hex_or_null(hmac), "kind": kind} for kind, of, hmac in self.outputs
            ],
            "start_ns": self.start_ns,
        }

    @classmethod
    def read(cls, fields: Fields) -> ArmWork:
        """Inverse of `to_json`; raises `FormatError`."""
        found = cls(
            done=fields.integer("done"),
            start_ns=fields.integer("start_ns"),
            outputs=tuple(_output(item) for item in fields.items("outputs", max_items=MAX_OUTPUTS)),
        )
        fields.end()
        return found


@dataclass(frozen=True, slots=True)
class SessionNote:
    """What a session left beside its slices.

    Args:
        session: its number.
        raw, protected: the work of either arm; None for one that did not end by itself. In a null run `protected`
            is the second raw process.
        lifecycle_us: of the protected run's receipt, by the steps of `LIFECYCLE`; None without a receipt.
        imports_us: its worker's import of its frameworks, from the same receipt.
        bundle_sha256: the digest of the receipt bundle's bytes; None where there is none.

    Raises:
        FormatError: `schema-invalid`, a lifecycle without the receipt that it is from, or the reverse.
    """

    _: KW_ONLY
    session: int
    raw: ArmWork | None
    protected: ArmWork | None
    lifecycle_us: Mapping[str, int | None] | None
    imports_us: int | None
    bundle_sha256: bytes | None

    def __post_init__(self) -> None:
        if (self.lifecycle_us is None) != (self.bundle_sha256 is None):
            raise FormatError(Code.SCHEMA, f"session {self.session} has a lifecycle without a receipt, or the reverse")
        if self.lifecycle_us is None and self.imports_us is not None:
            raise FormatError(Code.SCHEMA, f"session {self.session} has an import time without a receipt")

    def to_json(self) -> dict[str, Json]:
        """Return the closed object of spec/overhead-artifact.md section 9.2."""
        return {
            "bundle_sha256": None if self.bundle_sha256 is None else self.bundle_sha256.hex(),
            "imports_us": self.imports_us,
            "lifecycle_us": None if self.lifecycle_us is None else dict(self.lifecycle_us),
            "protected": None if self.protected is None else self.protected.to_json(),
            "raw": None if self.raw is None else self.raw.to_json(),
            "session": self.session,
        }

    def encode(self) -> bytes:
        return encode(self.to_json())

    @classmethod
    def parse(cls, line: bytes) -> SessionNote:
        """Return the note of one line, without its newline.

        Raises:
            FormatError: `too-large`, `not-canonical` or `schema-invalid`.
        """
        fields = Fields(decode(line, max_bytes=MAX_NOTE_BYTES), "session")
        found = cls(
            session=fields.integer("session"),
            raw=None if fields.null("raw") else ArmWork.read(fields.child("raw")),
            protected=None if fields.null("protected") else ArmWork.read(fields.child("protected")),
            lifecycle_us=None if fields.null("lifecycle_us") else _lifecycle(fields.child("lifecycle_us")),
            imports_us=None if fields.null("imports_us") else fields.integer("imports_us"),
            bundle_sha256=None if fields.null("bundle_sha256") else fields.digest("bundle_sha256"),
        )
        fields.end()
        return found


def read_notes(lines: Iterable[bytes]) -> Iterator[SessionNote]:
    """Yield the notes of lines that still end in their newline, numbered from 0 without a gap.

    Raises:
        FormatError: from `SessionNote.parse`, and `schema-invalid` for a line that was cut off or is out of place.
    """
    for number, line in enumerate(whole_lines(lines, "sessions")):
        note = SessionNote.parse(line)
        if note.session != number:
            raise FormatError(Code.SCHEMA, f"a note of session {note.session} where that of session {number} belongs")
        yield note


def _output(value: Json) -> tuple[str, str, bytes | None]:
    fields = Fields(value, "output")
    found = (
        fields.choice("kind", ["checkpoint", "output"]),
        fields.choice("class", ["file", WEIGHTS]),
        fields.digest_or_null("hmac_sha256"),
    )
    fields.end()
    return found


def _lifecycle(fields: Fields) -> dict[str, int | None]:
    found = {step: None if fields.null(step) else fields.integer(step) for step in LIFECYCLE}
    fields.end()
    return found
