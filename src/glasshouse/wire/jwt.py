"""JSON Web Tokens, narrowed to one algorithm and one spelling (RFC 7519, RFC 8725).

Header: exactly ``alg`` = EdDSA, ``kid``, ``typ``. Anything else, ``jku``, ``jwk``, ``x5c`` and ``crit``
among them, is refused. ``typ`` separates the kinds of token; ``aud`` and ``exp`` are required.
Times are NumericDate: whole seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from glasshouse.errors import Code, FormatError
from glasshouse.wire.canonical import Json, b64decode, b64encode, decode, encode
from glasshouse.wire.crypto import SIGNATURE_BYTES, SigningKey, key_id, verify_signature
from glasshouse.wire.record import Record, text

MAX_TOKEN_BYTES = 16384
MAX_TOKEN_ELEMENTS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class _Header(Record, name="token header", max_bytes=512, max_elements=16, constants={"alg": "EdDSA"}):
    kid: Annotated[str, text(64)]
    typ: Annotated[str, text(64)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """A parsed token whose signature has **not** been checked yet; `verify` does."""

    text: str  # the compact serialisation it came from
    kid: str
    typ: str
    claims: Mapping[str, Json]  # unverified until `verify` returned

    def verify(
        self, *, public: bytes, typ: str, audience: str, now_s: int, leeway_s: int = 0, early_s: int = 0
    ) -> Mapping[str, Json]:
        """Return the claims if signed by `public`, of this kind, for this audience and not expired.

        Args:
            leeway_s: by how much `now_s` may be off at both ends.
            early_s: by how much it may lie before the beginning besides; the end stays where it is.

        Raises:
            FormatError: `wrong-type`, `signature-invalid`, `token-claim-mismatch` (audience) or
                `token-expired`.
        """
        if self.typ != typ:
            raise FormatError(Code.WRONG_TYPE, f"a token of another kind where {typ} was expected")
        if self.kid != key_id(public):
            raise FormatError(Code.SIGNATURE, "a token signed by another key than expected")
        head, _, signature = self.text.rpartition(".")
        verify_signature(public, b64decode(signature), head.encode())
        if self.claims.get("aud") != audience:
            raise FormatError(Code.TOKEN_CLAIM, "a token for another audience")
        issued, expires = self._date("iat"), self._date("exp")
        if not issued - leeway_s - early_s <= now_s < expires + leeway_s:
            raise FormatError(Code.TOKEN_EXPIRED, "a token outside its validity")
        return self.claims

    def _date(self, name: str) -> int:
        value = self.claims.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise FormatError(Code.SCHEMA, f"a token without a valid {name}")
        return value


def issue(key: SigningKey, *, typ: str, claims: Mapping[str, Json]) -> str:
    """Sign a claims set; `aud`, `iat` and `exp` must be among the claims."""
    for name in ("aud", "exp", "iat"):
        if name not in claims:
            raise ValueError(f"a token needs {name}")
    header = _Header(kid=key.key_id, typ=typ)
    head = f"{b64encode(header.encode())}.{b64encode(encode(claims))}"
    return f"{head}.{b64encode(key.sign(head.encode()))}"


def stated(claims: Mapping[str, Json], *, issuer: bytes) -> dict[str, Json]:
    """Return verified claims without `aud`, and without `iss`, which must be the key id of the issuer's public key.

    Raises:
        FormatError: `schema-invalid`.
    """
    if claims.get("iss") != key_id(issuer):
        raise FormatError(Code.SCHEMA, "a token that does not name its issuer as iss")
    return {name: value for name, value in claims.items() if name not in ("aud", "iss")}


def parse(text: str) -> Token:
    """Split and parse a compact token without checking its signature.

    Raises:
        FormatError: `too-large`, `schema-invalid`, `not-canonical` or `wrong-type`.
    """
    if len(text) > MAX_TOKEN_BYTES or not text.isascii():
        raise FormatError(Code.TOO_LARGE, "a token that is too long")
    parts = text.split(".")
    if len(parts) != 3:
        raise FormatError(Code.SCHEMA, "not a compact token")
    header = _Header.parse(b64decode(parts[0]))
    claims = decode(b64decode(parts[1]), max_bytes=MAX_TOKEN_BYTES, max_elements=MAX_TOKEN_ELEMENTS)
    if not isinstance(claims, dict):
        raise FormatError(Code.SCHEMA, "token claims that are not an object")
    if len(b64decode(parts[2])) != SIGNATURE_BYTES:
        raise FormatError(Code.SCHEMA, "a signature that is not 64 bytes")
    return Token(text=text, kid=header.kid, typ=header.typ, claims=claims)
