"""Errors on the wire: RFC 9457 problem documents whose `code` is the refusal code.

A problem has the code, one sentence that names no value, and the safe part of expected and actual.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from glasshouse.wire.canonical import Json, decode, encode
from glasshouse.wire.fields import Fields

__all__ = ["MAX_PROBLEM_BYTES", "PROBLEM_TYPE", "Problem"]

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
class Problem:
    """One problem document.

    Law: ``Problem.parse(p.encode()) == p``.

    Attributes:
        code: the machine-readable reason.
        status: the HTTP status that it travels under.
        detail: one sentence for a person; no secret, no value that a caller sent.
        check: number of the gate's check that failed, or empty.
        expected, actual: the safe part of both sides, or empty.
    """

    code: Code
    status: int
    detail: str
    check: str = ""
    expected: str = ""
    actual: str = ""

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

    def encode(self) -> bytes:
        value: dict[str, Json] = {
            "code": self.code.value,
            "detail": self.detail,
            "status": self.status,
            "title": self.code.value.replace("-", " "),
            "type": f"urn:glasshouse:problem:{self.code.value}",
        }
        value |= {
            name: text
            for name, text in (("actual", self.actual), ("check", self.check), ("expected", self.expected))
            if text
        }
        return encode(value)

    @classmethod
    def parse(cls, data: bytes) -> Problem:
        """Inverse of `encode`; raises `FormatError`."""
        fields = Fields(decode(data, max_bytes=MAX_PROBLEM_BYTES), "problem")
        fields.text("title")
        fields.text("type")
        problem = cls(
            code=Code(fields.choice("code", list(Code))),
            status=fields.integer("status", low=400, high=599),
            detail=fields.text("detail", max_chars=_MAX_TEXT),
            check=fields.text("check", max_chars=8) if fields.has("check") else "",
            expected=fields.text("expected", max_chars=_MAX_TEXT) if fields.has("expected") else "",
            actual=fields.text("actual", max_chars=_MAX_TEXT) if fields.has("actual") else "",
        )
        fields.end()
        return problem

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
