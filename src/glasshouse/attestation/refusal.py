"""A numbered check of the gate that did not hold."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypeVar

from glasshouse.errors import Code, FormatError, RefusedError
from glasshouse.wire.crypto import key_id
from glasshouse.wire.dsse import Envelope

Read = TypeVar("Read")

_LAST_S = 253402300799  # of the year 9999
_KEY_ID = re.compile(r"[0-9a-f]{32}")


class CheckFailedError(RefusedError):
    """The gate refused at a numbered check of spec/key-release.md; nothing was released.

    What is shown of the two sides is public by construction: digests, enumerations, identifiers and
    times that the runtime itself sent or that its launch file holds. A check that has no such part
    leaves both empty.

    Args:
        check: the number in the specification, e.g. ``11b``.
        expected, actual: the safe part of both sides, or empty.
    """

    def __init__(self, check: str, code: Code, message: str, *, expected: str = "", actual: str = "") -> None:
        super().__init__(code, f"check {check}: {message}")
        self.check = check
        self.expected = expected
        self.actual = actual


def check_1(what: str, message: bytes, max_bytes: int, read: Callable[[bytes], Read]) -> Read:
    """Check 1: the message is not too large, and `read` takes it.

    Raises:
        CheckFailedError: `message-too-large` or `message-invalid`.
    """
    if len(message) > max_bytes:
        raise CheckFailedError(
            "1",
            Code.MESSAGE_TOO_LARGE,
            f"{what} that is too large",
            expected=f"at most {max_bytes} bytes",
            actual=f"{len(message)} bytes",
        )
    try:
        return read(message)
    except FormatError as error:
        raise CheckFailedError("1", Code.MESSAGE_INVALID, error.message) from None


def check_same(check: str, code: Code, what: str, expected: str, actual: str) -> None:
    """The actual is the recorded one; raises `CheckFailedError`."""
    if expected != actual:
        raise CheckFailedError(check, code, f"{what} than recorded", expected=expected, actual=actual)


def check_signed(
    envelope: Envelope, payload_type: str, *publics: bytes, check: str, code: Code, message: str = ""
) -> None:
    """The envelope is of this type, and signed by exactly these keys.

    Args:
        check, code, message: of the refusal; without a message it is what does not hold.

    Raises:
        CheckFailedError: with that code; a key id that is none is not repeated in it.
    """
    try:
        if len(set(publics)) < len(publics):
            # One key in both roles would make one signature count twice.
            raise FormatError(Code.SIGNATURE, "an evidence key that is the launch key")
        envelope.verify(payload_type, *publics)
    except FormatError as error:
        signers = (name if _KEY_ID.fullmatch(name) else "not a key id" for name, _ in envelope.signatures)
        raise CheckFailedError(
            check,
            code,
            message or error.message,
            expected=", ".join(sorted(map(key_id, publics))),
            actual=", ".join(signers),
        ) from None


def utc(moment_us: int) -> str:
    """Return a moment as refusals name it, of the years to 9999: a wrong clock shows there."""
    return datetime.fromtimestamp(min(max(moment_us // 1_000_000, 0), _LAST_S), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
