"""The last look at what is about to be published: none of these secrets may be in it, in any spelling.

The closed schema is the guarantee; this check does not rely on it (spec/evidence.md section 9).
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterable, Iterator, Set

from glasshouse.errors import Code, VerificationError
from glasshouse.wire.canonical import Json, decode

# Anything shorter occurs in a digest by chance; it is compared with whole values only.
_MIN_BYTES = 8


def spellings(secret: bytes, *, within: bool = True) -> set[bytes]:
    """Return every form of `secret` that is looked for, in lower case.

    Args:
        within: also what it decides of a longer text that is encoded as a whole; of `vm` that is `12` and `21` too.
    """
    forms: set[bytes] = set()
    for data in (secret, secret[::-1]):
        forms |= {data, data.hex().encode(), b"".join(b"%%%02x" % byte for byte in data)}
        forms |= set(_base64(data, within))
    with contextlib.suppress(UnicodeDecodeError):
        text = secret.decode()
        for spoken in (text, text[::-1], text.lower(), text.lower()[::-1]):
            forms.add(spoken.encode())
            forms |= {spoken.encode("utf-16-le").hex().encode(), spoken.encode("utf-16-be").hex().encode()}
            units = spoken.encode("utf-16-be")
            forms.add(
                b"".join(b"\\u%04x" % int.from_bytes(units[at : at + 2], "big") for at in range(0, len(units), 2))
            )
            escaped = json.dumps(spoken)[1:-1]
            forms |= {_percent(spoken), escaped.encode(), escaped.replace("/", "\\/").encode()}
    forms |= {form[::-1] for form in forms}
    return {form.lower() for form in forms if form}


def check_canaries(document: bytes, canaries: Iterable[bytes | str], *, vocabulary: Set[str], max_bytes: int) -> None:
    """Refuse a document in which a canary occurs.

    Args:
        document: canonical JSON.
        canaries: live secrets, host and user names, paths; at least one.
        vocabulary: words of the document's schema: a machine that is called like one of them is not
            found in that word itself.

    Raises:
        VerificationError: `artifact-canary`; it does not repeat what was found.
    """
    secrets = [item.encode() if isinstance(item, str) else bytes(item) for item in canaries]
    if not all(secrets) or not secrets:
        raise VerificationError(Code.ARTIFACT_CANARY, "no secrets were given to look for, or an empty one")
    values = [text for text in _leaves(decode(document, max_bytes=max_bytes)) if text not in vocabulary]
    # UTF-16 that was read as bytes is the text with a NUL at every character.
    whole = {value.lower().replace("\0", "").encode() for value in values}
    everything = b"\n".join(sorted(whole))
    for secret in secrets:
        is_long = len(secret) >= _MIN_BYTES
        forms = spellings(secret, within=is_long)
        if forms & whole or (is_long and any(form in everything for form in forms)):
            raise VerificationError(
                Code.ARTIFACT_CANARY,
                "something that must stay private is in what was to be published; nothing was written",
                hint="look at the numbers that were given; a name made of digits can also coincide with a count",
            )


def _base64(data: bytes, within: bool) -> Iterator[bytes]:
    """Yield its encodings, and the characters that `data` alone decides, wherever in a longer text it was encoded."""
    for shift in range(3 * within):
        coded = base64.b64encode(bytes(shift) + data)
        start = -(-shift * 8 // 6)
        end = (shift + len(data)) * 8 // 6
        yield coded[start:end]
        yield coded[start:end].replace(b"+", b"-").replace(b"/", b"_")
    yield base64.b64encode(data).rstrip(b"=")
    yield base64.urlsafe_b64encode(data).rstrip(b"=")
    yield base64.b32encode(data).rstrip(b"=")


def _percent(text: str) -> bytes:
    """Encode as in a URL: unreserved characters and the path separator stay."""
    kept = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~/"
    return b"".join(bytes([byte]) if byte in kept else b"%%%02X" % byte for byte in text.encode())


def _leaves(value: Json) -> Iterator[str]:
    """Yield every key and every value as text."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif value is not None:
        yield str(value)
