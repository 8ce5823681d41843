"""The blob of the kind `gcp`: a token, as it came.

Source: spec/hardware-evidence.md, section 7.6; RFC 7515, 7.1.
"""

from __future__ import annotations

import re

MAX_TOKEN_BYTES = 32 * 1024
_FORM = re.compile(rb"[\w-]+\.[\w-]+\.[\w-]+")


def is_token(token: bytes) -> bool:
    """Return whether this has a token's form, and no more than its size; nothing of it is read."""
    return len(token) <= MAX_TOKEN_BYTES and _FORM.fullmatch(token) is not None
