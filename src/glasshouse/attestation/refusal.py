"""A numbered check of the gate that did not hold."""

from __future__ import annotations

import re

from glasshouse.errors import Code, RefusedError
from glasshouse.wire.dsse import Envelope

__all__ = ["CheckFailedError", "signers"]

_KEY_ID = re.compile(r"[0-9a-f]{32}")


class CheckFailedError(RefusedError):
    """The gate refused at a numbered check of spec/key-release.md; nothing was released.

    What is shown of the two sides is public by construction: digests, enumerations, identifiers and
    times that the runtime itself sent or that its launch file told it. A check that has no such part
    leaves both empty.

    Args:
        check: the number in the specification, e.g. ``11b``.
        code: the refusal code.
        message: one sentence for a person.
        expected, actual: the safe part of both sides, or empty.
    """

    def __init__(self, check: str, code: Code, message: str, *, expected: str = "", actual: str = "") -> None:
        super().__init__(code, f"check {check}: {message}")
        self.check = check
        self.expected = expected
        self.actual = actual


def signers(envelope: Envelope) -> str:
    """Return the key ids that an envelope names, for a refusal: a name that is no key id is not repeated."""
    return ", ".join(name if _KEY_ID.fullmatch(name) else "not a key id" for name, _ in envelope.signatures)
