"""How a kind refuses: what its readers raise of a form, and the refusal of check 12 that becomes of it."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.x509_errors import X509_ERRORS
from glasshouse.errors import Code, FormatError

_SHOWN = 64 * 66  # characters of a side of `check_listed`: as many values as a policy lists of a register
_ERRORS: tuple[type[Exception], ...] = (LookupError, struct.error, *X509_ERRORS)


def require(holds: bool, sentence: str) -> None:
    """What is read has the one form; raises `FormatError`, with a sentence of what it is instead."""
    if not holds:
        raise FormatError(Code.SCHEMA, sentence)


def refusal(code: Code, message: str, expected: object = "", actual: object = "") -> CheckFailedError:
    """Return the refusal of check 12, with both sides as people read them: bytes as hexadecimal, lists joined."""
    return CheckFailedError("12", code, message, expected=_shown(expected), actual=_shown(actual))


@contextmanager
def refused(code: Code, what: str) -> Iterator[None]:
    """Turn what a reader raises, ours or a library's, into a refusal."""
    try:
        yield
    except FormatError as error:
        raise refusal(code, f"{what}: {error.message}") from None
    except _ERRORS as error:
        raise refusal(code, f"{what}: {str(error) or 'a signature that does not hold'}") from None


def check_listed(what: str, found: str, listed: Iterable[str]) -> None:
    """A value is one of the policy's; raises `CheckFailedError`, `reference-value-unknown`."""
    accepted = sorted(listed)
    if found not in accepted:
        message = f"{what} of this machine has a value that the policy does not list"
        raise refusal(Code.REFERENCE_VALUE, message, ", ".join(accepted)[:_SHOWN], found[:_SHOWN])


def _shown(value: object) -> str:
    if isinstance(value, tuple | list):
        return ("." if all(isinstance(one, int) for one in value) else ", ").join(map(_shown, value))
    return value.hex() if isinstance(value, bytes) else str(value)
