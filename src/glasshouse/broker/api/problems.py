"""Errors on the wire: RFC 9457 problem documents whose `code` is the refusal code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from glasshouse.errors import (
    Code,
    FormatError,
    GlasshouseError,
    PackageError,
    PeerError,
    RefusedError,
    UsageError,
    VerificationError,
)
from glasshouse.wire.record import LEFT_OUT, Record, integer, text

PROBLEM_TYPE = "application/problem+json"
MAX_PROBLEM_BYTES = 16 * 1024
_MAX_TEXT = 1000

_STATUS: dict[Code, int] = {
    Code.TOO_LARGE: 413,
    Code.MESSAGE_TOO_LARGE: 413,
    Code.MESSAGE_INVALID: 400,
    Code.NONCE_UNKNOWN: 409,
    Code.NONCE_EXPIRED: 409,
    Code.NONCE_REPLAYED: 409,
    Code.HEAD_INCONSISTENT: 409,
    Code.DEPLOYMENT_UNKNOWN: 404,
    Code.RUN_UNKNOWN: 404,
    Code.TOO_MANY_CHALLENGES: 429,
    Code.OWNER_REQUEST: 401,
    Code.OWNER_STALE: 409,
    Code.OWNER_QUOTA: 429,
    Code.BROKER_UNREACHABLE: 503,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem(Record, name="problem", max_bytes=MAX_PROBLEM_BYTES, derived={"title": "title", "type": "type"}):
    """One problem document; it holds no secret and no value that a caller sent."""

    code: Code
    status: Annotated[int, integer(400, 599)]  # the HTTP status that it travels under
    detail: Annotated[str, text(_MAX_TEXT)]  # one sentence for a person
    check: Annotated[str, text(8), LEFT_OUT] = ""  # number of the gate's check that failed
    # The safe part of both sides.
    expected: Annotated[str, text(_MAX_TEXT), LEFT_OUT] = ""
    actual: Annotated[str, text(_MAX_TEXT), LEFT_OUT] = ""

    @property
    def title(self) -> str:
        """The code in words."""
        return self.code.value.replace("-", " ")

    @property
    def type(self) -> str:
        """The URN of the code."""
        return f"urn:glasshouse:problem:{self.code.value}"

    @classmethod
    def of(cls, error: BaseException) -> Problem:
        """Return what may be sent of `error`; of a defect, its code alone."""
        if not isinstance(error, GlasshouseError) or error.code is Code.INTERNAL:
            return cls(code=Code.INTERNAL, status=500, detail="the broker failed; nothing was released")
        return cls(
            code=error.code,
            status=_status(error),
            detail=error.message[:_MAX_TEXT],
            check=str(getattr(error, "check", "")),
            expected=str(getattr(error, "expected", ""))[:_MAX_TEXT],
            actual=str(getattr(error, "actual", ""))[:_MAX_TEXT],
        )

    def to_error(self) -> GlasshouseError:
        """Return the exception that a client raises for this problem."""
        if self.status >= 500:
            return PeerError(self.code, self.detail)
        if self.status in (400, 413):
            return FormatError(self.code, self.detail)
        if self.status in (404, 422):
            return UsageError(self.code, self.detail)
        return RefusedError(self.code, self.detail)


def _status(error: GlasshouseError) -> int:
    if error.code in _STATUS:
        return _STATUS[error.code]
    if isinstance(error, (RefusedError, VerificationError)):
        return 403
    if isinstance(error, (FormatError, PackageError)):
        return 400
    return 422 if isinstance(error, UsageError) else 500
