"""Altered forms of a piece of evidence without end: of its bytes, and within the parts that it has as base64url."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from glasshouse.errors import FormatError
from glasshouse.wire.canonical import b64decode, b64encode, decode, encode

__all__ = ["altered"]

_NUMBERS = [bytes.fromhex(one) for one in ("00", "ff", "7f", "80", "0000", "ffff", "7fff", "00000000", "ffffffff")]
_MAX_BYTES = 1 << 20


def altered(data: bytes, chance: random.Random) -> Iterator[bytes]:
    """Yield forms of `data` that differ from it, for as long as they are asked for."""
    try:
        value = decode(data, max_bytes=_MAX_BYTES)
    except FormatError:
        value = None
    parts = list(_parts(value))
    while True:
        if parts and chance.random() < 0.8:
            holder, key, part = chance.choice(parts)
            kept = holder[key]
            holder[key] = b64encode(_changed(part, chance))
            form = encode(value)
            holder[key] = kept
        else:
            form = _changed(data, chance)
        if form != data:
            yield form


def _parts(value: Any) -> Iterator[tuple[Any, Any, bytes]]:
    """Yield where a text of base64url stands, and what it has."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(item, str) and len(item) >= 8:
            try:
                yield value, key, b64decode(item)
            except FormatError:
                continue
        else:
            yield from _parts(item)


def _changed(data: bytes, chance: random.Random) -> bytes:
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at, other = chance.randrange(len(data) + 1), chance.randrange(len(data) + 1)
        length = chance.choice((0, 1, 1, 2, 4, 8, 64))
        flipped = bytes(one ^ 1 << chance.randrange(8) for one in data[at : at + 1])
        new = chance.choice(
            (b"", chance.choice(_NUMBERS), chance.randbytes(length), flipped, data[other : other + length])
        )
        end = chance.choice((at, at + len(new), at + length, at + 1, len(data) if chance.random() < 0.3 else at))
        data = data[:at] + new + data[end:]
    return data
