"""Dead Simple Signing Envelope v1, narrowed to canonical JSON and Ed25519.

The payload type is signed together with the payload (pre-authentication encoding), so an envelope of
one type is never accepted as another. Source: secure-systems-lab/dsse protocol.md.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass

from glasshouse.errors import Code, FormatError
from glasshouse.wire import signing
from glasshouse.wire.canonical import Json, decode, encode
from glasshouse.wire.fields import Fields

__all__ = ["MAX_SIGNATURES", "Envelope", "pae", "sign"]

MAX_SIGNATURES = 4
_MAX_ELEMENTS = 64
_BEGIN = b'{"payload":"'
_MAX_BESIDE_BYTES = 4096  # payload type and four signatures have at most 2,800, with every letter escaped


def pae(payload_type: str, payload: bytes) -> bytes:
    """Return the bytes that are signed: ``DSSEv1 len(type) type len(payload) payload``."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


@dataclass(frozen=True, kw_only=True, slots=True)
class Envelope:
    """A signed payload.

    Law: ``Envelope.parse(e.encode()) == e`` and the reverse, byte for byte.

    Attributes:
        payload_type: a media type that names what the payload is.
        payload: the signed bytes.
        signatures: (key id, 64-byte signature), in order of key id, no key twice.
    """

    payload_type: str
    payload: bytes
    signatures: tuple[tuple[str, bytes], ...]

    def to_json(self) -> dict[str, Json]:
        """Return the envelope as a JSON value, for embedding in another document."""
        return {
            "payload": _b64(self.payload),
            "payloadType": self.payload_type,
            "signatures": [{"keyid": name, "sig": _b64(value)} for name, value in self.signatures],
        }

    def encode(self) -> bytes:
        return encode(self.to_json())

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview, *, max_bytes: int) -> Envelope:
        """Parse an envelope's canonical bytes.

        Raises:
            FormatError: `too-large`, `not-canonical` or `schema-invalid`.
        """
        raw = bytes(data)
        if len(raw) > max_bytes or not raw.startswith(_BEGIN):
            return cls.from_json(decode(raw, max_bytes=max_bytes, max_elements=_MAX_ELEMENTS))
        end = raw.find(b'"', len(_BEGIN))
        if end < 0 or len(raw) - end > _MAX_BESIDE_BYTES:
            raise FormatError(Code.SCHEMA, "an envelope without an end, or with more than type and signatures")
        # Base64 has one form and no mark of JSON in it: what is around it is canonical, or the envelope is not. The
        # payload, nearly all of what a stranger sends, is not written again to find that out.
        around = decode(_BEGIN + raw[end:], max_bytes=max_bytes, max_elements=_MAX_ELEMENTS)
        if not isinstance(around, dict):
            raise FormatError(Code.SCHEMA, "an envelope that is not an object")
        return cls.from_json({**around, "payload": raw[len(_BEGIN) : end].decode("latin-1")})

    @classmethod
    def from_json(cls, value: Json) -> Envelope:
        """Inverse of `to_json`; raises `FormatError`."""
        fields = Fields(value, "envelope")
        payload = _unb64(fields.text("payload", max_chars=2**30))
        payload_type = fields.text("payloadType", max_chars=128)
        signatures: list[tuple[str, bytes]] = []
        for item in fields.items("signatures", max_items=MAX_SIGNATURES):
            one = Fields(item, "envelope.signatures")
            name = one.text("keyid", max_chars=64)
            value_bytes = _unb64(one.text("sig", max_chars=88))
            one.end()
            if len(value_bytes) != signing.SIGNATURE_BYTES:
                raise FormatError(Code.SCHEMA, "a signature that is not 64 bytes")
            signatures.append((name, value_bytes))
        fields.end()
        names = [name for name, _ in signatures]
        if not names or names != sorted(set(names)):
            raise FormatError(Code.SCHEMA, "signatures that are missing, repeated or out of order")
        return cls(payload_type=payload_type, payload=payload, signatures=tuple(signatures))

    def payload_of(self, payload_type: str) -> bytes:
        """Return the payload if it is of this type; no signature is checked. Raises `FormatError` (`wrong-type`)."""
        if self.payload_type != payload_type:
            raise FormatError(Code.WRONG_TYPE, f"an envelope of another type where {payload_type} was expected")
        return self.payload

    def verify(self, payload_type: str, *publics: bytes) -> bytes:
        """Return the payload if it is of this type and signed by exactly these keys.

        Args:
            payload_type: the only type accepted.
            publics: raw Ed25519 public keys; each must have signed and no other may have.

        Raises:
            FormatError: `wrong-type` or `signature-invalid`.
        """
        self.payload_of(payload_type)
        expected = {signing.key_id(public): public for public in publics}
        if not expected or expected.keys() != dict(self.signatures).keys():
            raise FormatError(Code.SIGNATURE, "an envelope signed by other keys than expected")
        message = pae(self.payload_type, self.payload)
        for name, value in self.signatures:
            signing.verify(expected[name], value, message)
        return self.payload


def sign(payload_type: str, payload: bytes, keys: Sequence[signing.SigningKey]) -> Envelope:
    """Sign `payload` as `payload_type` with every key given."""
    message = pae(payload_type, payload)
    signatures = sorted((key.key_id, key.sign(message)) for key in keys)
    return Envelope(payload_type=payload_type, payload=payload, signatures=tuple(signatures))


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _unb64(text: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        raise FormatError(Code.SCHEMA, "not base64") from None
    if _b64(data) != text:
        raise FormatError(Code.SCHEMA, "not the one valid base64 form")
    return data
