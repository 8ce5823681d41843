"""The `cnf` claim (RFC 7800): which key a token or a piece of evidence speaks for, as an Ed25519 JWK (RFC 8037)."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from glasshouse.wire.record import Member, octets

CONFIRMATION = {"cnf": {"jwk": {"crv": "Ed25519", "kty": "OKP"}}}
"""Constants of a record with a field of the type `Confirmed`."""

Confirmed: TypeAlias = Annotated[bytes, octets(32), Member("cnf", "jwk", "x")]
"""A raw public key."""
