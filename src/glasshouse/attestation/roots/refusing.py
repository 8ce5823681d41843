"""How a kind refuses: what its readers raise of a form, and the refusal of check 12 that becomes of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.x509_errors import X509_ERRORS
from glasshouse.errors import Code, FormatError


def require(holds: bool, sentence: str) -> None:
    """What is read has the one form; raises `FormatError`, with a sentence of what it is instead."""
    if not holds:
        raise FormatError(Code.SCHEMA, sentence)


def refusal(code: Code, message: str, expected: object = "", actual: object = "") -> CheckFailedError:
    """Return the refusal of check 12, with both sides as people read them: bytes as hexadecimal, lists joined."""
    return CheckFailedError("12", code, message, expected=_shown(expected), actual=_shown(actual))


@contextmanager
def refused(code: Code, what: str) -> Iterator[None]:
    """Turn what a reader raises, or `cryptography`, into a refusal."""
    try:
        yield
    except FormatError as error:
        raise refusal(code, f"{what}: {error.message}") from None
    except X509_ERRORS as error:
        raise refusal(code, f"{what}: {error or 'a signature that does not hold'}") from None


def _shown(value: object) -> str:
    if isinstance(value, tuple | list):
        return ("." if all(isinstance(one, int) for one in value) else ", ").join(map(_shown, value))
    return value.hex() if isinstance(value, bytes) else str(value)
