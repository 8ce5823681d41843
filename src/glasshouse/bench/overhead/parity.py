"""Work parity: did both arms train the same weights? Equal digests say so; a run that cannot be compared does not.

Two arms are compared by the kind and digest of every output that holds weights, in order, after equally many steps.
Other files are left out: they may hold times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum

from glasshouse.bench.overhead.notes import SessionNote
from glasshouse.wire.canonical import Json

__all__ = ["Parity", "Same", "parity"]


class Same(StrEnum):
    """What is known of two arms' weights."""

    SAME = "same"
    DIFFERENT = "different"
    # An arm did not end by itself, did another number of steps, or left no weights.
    NOT_COMPARABLE = "not-comparable"


@dataclass(frozen=True, slots=True)
class Parity:
    """The answer of every session, and the word over all of them."""

    _: KW_ONLY
    sessions: tuple[Same, ...]

    @property
    def word(self) -> Same:
        """`different` if one session is, `same` if one is and none differs, else `not-comparable`."""
        for word in (Same.DIFFERENT, Same.SAME):
            if word in self.sessions:
                return word
        return Same.NOT_COMPARABLE

    def to_json(self) -> dict[str, Json]:
        return {"sessions": [one.value for one in self.sessions], "word": self.word.value}


def parity(notes: Sequence[SessionNote]) -> Parity:
    """Compare the two arms of every session."""
    return Parity(sessions=tuple(_compare(note) for note in notes))


def _compare(note: SessionNote) -> Same:
    raw, protected = note.raw, note.protected
    if raw is None or protected is None or raw.done != protected.done:
        return Same.NOT_COMPARABLE
    if not raw.weights or not protected.weights:
        return Same.NOT_COMPARABLE
    return Same.SAME if raw.weights == protected.weights else Same.DIFFERENT
