"""Base64url has one spelling, and the patterns of identifiers and decimals are ASCII and anchored."""

from __future__ import annotations

import pytest

from glasshouse.errors import Code, FormatError
from glasshouse.wire.canonical import b64decode, b64encode
from glasshouse.wire.record import DECIMAL, IDENTIFIER


@pytest.mark.parametrize("size", range(8))
def test_base64url_has_one_spelling(size: int) -> None:
    data = bytes(range(250, 250 + size)) if size < 6 else b"\xfb\xff" * (size // 2)
    text = b64encode(data)
    assert b64decode(text) == data
    assert "=" not in text
    for wrong in (text + "=", text + "A" * 4 + "=", text + "\n", " " + text, text + "!"):
        with pytest.raises(FormatError):
            b64decode(wrong)


@pytest.mark.parametrize("text", ["A", "AB", "AAB", "é", "+A==", "A/", "AAAAA"])
def test_what_is_no_base64url(text: str) -> None:
    with pytest.raises(FormatError) as caught:
        b64decode(text)
    assert caught.value.code is Code.SCHEMA


def test_patterns_are_ascii_and_anchored() -> None:
    assert not IDENTIFIER.fullmatch("naïve")
    assert not DECIMAL.fullmatch("1\n")
    assert not DECIMAL.fullmatch("٣")
