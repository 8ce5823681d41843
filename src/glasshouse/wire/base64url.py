"""Base64url without padding (RFC 4648 section 5), in its one valid spelling."""

from __future__ import annotations

import base64

from glasshouse.errors import Code, FormatError


def b64encode(data: bytes) -> str:
    """Return base64url without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def b64decode(text: str) -> bytes:
    """Inverse of `b64encode`; refuses any other spelling of the same bytes. Raises `FormatError`, `schema-invalid`."""
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except ValueError:
        raise FormatError(Code.SCHEMA, "not base64url") from None
    if b64encode(data) != text:
        raise FormatError(Code.SCHEMA, "not the one valid base64url form")
    return data
