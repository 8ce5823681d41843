"""The `cnf` claim (RFC 7800): which key a token or a piece of evidence speaks for, as an Ed25519 JWK (RFC 8037)."""

from __future__ import annotations

from glasshouse.wire.canonical import Json
from glasshouse.wire.fields import Fields, b64encode

__all__ = ["confirmation", "confirmed_key"]


def confirmation(public: bytes) -> dict[str, Json]:
    """Return the `cnf` value for a raw public key of 32 bytes."""
    return {"jwk": {"crv": "Ed25519", "kty": "OKP", "x": b64encode(public)}}


def confirmed_key(fields: Fields) -> bytes:
    """Take `cnf` from `fields` and return its raw public key; raises `FormatError`."""
    outer = fields.child("cnf")
    jwk = outer.child("jwk")
    outer.end()
    jwk.choice("crv", ["Ed25519"])
    jwk.choice("kty", ["OKP"])
    public = jwk.octets("x", length=32)
    jwk.end()
    return public
