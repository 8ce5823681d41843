"""Tokens under attack: other algorithms, other headers, other kinds, other times, other spellings."""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Any

import pytest

from glasshouse.errors import Code, FormatError
from glasshouse.wire import jwt
from glasshouse.wire.canonical import b64decode, b64encode, encode
from glasshouse.wire.crypto import SigningKey

KEY, STRANGER = SigningKey(b"k" * 32), SigningKey(b"s" * 32)
TYPE, AUDIENCE, NOW = "example+jwt", "somebody", 1000
CLAIMS = {"aud": AUDIENCE, "exp": NOW + 100, "iat": NOW - 10, "value": 7}


def crafted(header: Any, claims: Any = CLAIMS, key: SigningKey = KEY) -> str:
    """A token with any header, properly signed over what it says."""
    head = f"{b64encode(header if isinstance(header, bytes) else encode(header))}." + b64encode(
        claims if isinstance(claims, bytes) else encode(claims)
    )
    return f"{head}.{b64encode(key.sign(head.encode()))}"


def header(**changes: Any) -> dict[str, Any]:
    return {"alg": "EdDSA", "kid": KEY.key_id, "typ": TYPE, **changes}


def verify(text: str, *, now: int = NOW, typ: str = TYPE, audience: str = AUDIENCE, leeway: int = 0) -> Any:
    return jwt.parse(text).verify(public=KEY.public, typ=typ, audience=audience, now_s=now, leeway_s=leeway)


def refusal(text: str, **options: Any) -> Code:
    with pytest.raises(FormatError) as caught:
        verify(text, **options)
    return caught.value.code


def test_an_honest_token_is_read() -> None:
    text = jwt.issue(KEY, typ=TYPE, claims=CLAIMS)
    assert text == crafted(header())
    assert verify(text) == CLAIMS


@pytest.mark.parametrize("name", ["aud", "exp", "iat"])
def test_no_token_is_issued_without_audience_and_times(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        jwt.issue(KEY, typ=TYPE, claims={key: value for key, value in CLAIMS.items() if key != name})


@pytest.mark.parametrize("alg", ["none", "None", "HS256", "ES256", "Ed25519", "eddsa", "", None, 1])
def test_no_other_algorithm(alg: Any) -> None:
    assert refusal(crafted(header(alg=alg))) is Code.SCHEMA


def test_the_public_key_is_not_an_hmac_secret() -> None:
    head = f"{b64encode(encode(header(alg='HS256')))}.{b64encode(encode(CLAIMS))}"
    forged = hmac.digest(KEY.public, head.encode(), hashlib.sha256)
    assert refusal(f"{head}.{b64encode(forged)}") is Code.SCHEMA


def test_an_unsigned_token() -> None:
    head = f"{b64encode(encode(header()))}.{b64encode(encode(CLAIMS))}"
    assert refusal(f"{head}.") is Code.SCHEMA
    assert refusal(f"{head}.{b64encode(bytes(64))}") is Code.SIGNATURE


@pytest.mark.parametrize("extra", ["jku", "jwk", "x5c", "x5u", "x5t", "crit", "cty", "b64", "zip", "nonce"])
def test_a_header_that_brings_its_own_key_or_rules(extra: str) -> None:
    assert refusal(crafted(header(**{extra: "https://evil.example/keys"}))) is Code.SCHEMA
    assert refusal(crafted(header(**{extra: [extra]}))) is Code.SCHEMA


@pytest.mark.parametrize("name", ["alg", "kid", "typ"])
def test_a_header_that_lacks_something(name: str) -> None:
    assert refusal(crafted({key: value for key, value in header().items() if key != name})) is Code.SCHEMA


def test_a_token_of_another_kind() -> None:
    assert refusal(crafted(header(typ="ear+jwt"))) is Code.WRONG_TYPE
    assert refusal(crafted(header()), typ="ear+jwt") is Code.WRONG_TYPE
    assert refusal(crafted(header(typ="EXAMPLE+JWT"))) is Code.WRONG_TYPE


def test_a_token_by_another_key_and_one_that_pretends() -> None:
    assert refusal(crafted(header(kid=STRANGER.key_id), key=STRANGER)) is Code.SIGNATURE
    assert refusal(crafted(header(), key=STRANGER)) is Code.SIGNATURE
    assert refusal(crafted(header(kid="../../etc/passwd"))) is Code.SIGNATURE


def test_claims_moved_under_another_signature() -> None:
    one, other = crafted(header()).split("."), crafted(header(), {**CLAIMS, "value": 8}).split(".")
    assert refusal(f"{one[0]}.{other[1]}.{one[2]}") is Code.SIGNATURE
    assert refusal(f"{one[0]}.{one[1]}.{other[2]}") is Code.SIGNATURE


@pytest.mark.parametrize("audience", ["somebody else", "", "SOMEBODY", ["somebody"], None, 1])
def test_a_token_for_somebody_else(audience: Any) -> None:
    assert refusal(crafted(header(), {**CLAIMS, "aud": audience})) is Code.TOKEN_CLAIM


def test_a_token_is_valid_from_iat_to_just_before_exp() -> None:
    text = crafted(header())
    assert verify(text, now=NOW - 10) == verify(text, now=NOW + 99) == CLAIMS
    for now in (NOW - 11, NOW + 100, 0, 2**40):
        assert refusal(text, now=now) is Code.TOKEN_EXPIRED
    assert verify(text, now=NOW + 109, leeway=10) == verify(text, now=NOW - 20, leeway=10)
    assert refusal(text, now=NOW + 110, leeway=10) is Code.TOKEN_EXPIRED


@pytest.mark.parametrize("name", ["exp", "iat"])
@pytest.mark.parametrize("value", [None, True, "1000", -1, [], {}])
def test_a_time_is_a_number(name: str, value: Any) -> None:
    assert refusal(crafted(header(), {**CLAIMS, name: value})) is Code.SCHEMA


@pytest.mark.parametrize("name", ["exp", "iat", "aud"])
def test_a_token_without_a_required_claim(name: str) -> None:
    claims = {key: value for key, value in CLAIMS.items() if key != name}
    assert refusal(crafted(header(), claims)) in (Code.SCHEMA, Code.TOKEN_CLAIM)


def test_claims_in_another_spelling_or_shape() -> None:
    assert refusal(crafted(header(), b'{"aud": "somebody"}')) is Code.NOT_CANONICAL
    assert refusal(crafted(header(), b'{"aud":"somebody","aud":"somebody"}')) is Code.SCHEMA
    assert refusal(crafted(header(), b'{"exp":1e9}')) is Code.SCHEMA
    for claims in ([], "x", 1, None):
        assert refusal(crafted(header(), claims)) is Code.SCHEMA
    assert refusal(crafted(b'{"alg":"EdDSA","kid":"x","typ":"y","alg":"none"}')) is Code.SCHEMA
    assert refusal(crafted(b'{ "alg":"EdDSA","kid":"x","typ":"y"}')) is Code.NOT_CANONICAL


def test_every_part_has_one_spelling() -> None:
    text = crafted(header())
    parts = text.split(".")
    for at in range(3):
        for wrong in (parts[at] + "=", parts[at] + "\n", " " + parts[at], parts[at][:-1] + "!"):
            changed = [*parts]
            changed[at] = wrong
            assert refusal(".".join(changed)) is Code.SCHEMA
    last = parts[2][-1]
    # The last character carries four bits more than the signature has: one of sixteen spellings is valid.
    twins = [char for char in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_" if char != last]
    same_bytes = [c for c in twins if _lenient(parts[2][:-1] + c) == b64decode(parts[2])]
    assert len(same_bytes) == 15
    for char in same_bytes:
        assert refusal(text[:-1] + char) is Code.SCHEMA


def _lenient(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


@pytest.mark.parametrize("text", ["", ".", "..", "a.b", "a.b.c.d", "é.é.é", "\x00.\x00.\x00", "e30.e30.e30"])
def test_what_is_no_token_at_all(text: str) -> None:
    with pytest.raises(FormatError):
        jwt.parse(text)


def test_a_token_that_is_too_long() -> None:
    with pytest.raises(FormatError) as caught:
        jwt.parse("a" * (jwt.MAX_TOKEN_BYTES + 1))
    assert caught.value.code is Code.TOO_LARGE


def test_every_flipped_character_is_seen() -> None:
    text = crafted(header())
    for at in range(len(text)):
        for other in ("A", "B", "."):
            if text[at] != other:
                with pytest.raises(FormatError):
                    verify(text[:at] + other + text[at + 1 :])
