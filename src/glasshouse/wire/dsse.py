"""Dead Simple Signing Envelope v1 (secure-systems-lab/dsse protocol.md), narrowed to canonical JSON and Ed25519.

The payload type is signed with the payload, so an envelope of one type is never accepted as another.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

from glasshouse.errors import Code, FormatError
from glasshouse.wire.canonical import Codec, Json, decode, wrong
from glasshouse.wire.crypto import SIGNATURE_BYTES, SigningKey, key_id, verify_signature
from glasshouse.wire.record import Member, Record, fixed, items, text

MAX_SIGNATURES = 4
_MAX_ELEMENTS = 64
_BEGIN = b'{"payload":"'
_MAX_BESIDE_BYTES = 4096  # payload type and four signatures have at most 2,800, with every letter escaped


def pae(payload_type: str, payload: bytes) -> bytes:
    """Return the bytes that are signed: ``DSSEv1 len(type) type len(payload) payload``."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def _base64(max_chars: int, length: int | None = None) -> Codec:
    """Bytes in standard base64, in its one valid spelling: exactly `length`, if given."""
    form = text(max_chars)

    def read(value: Json, where: str) -> bytes:
        given = form.read(value, where)
        try:
            data = base64.b64decode(given, validate=True)
        except ValueError:
            raise wrong(where, "base64") from None
        if write(data) != given:
            raise wrong(where, "the one valid base64 form")
        if length is not None and len(data) != length:
            raise wrong(where, f"{length} bytes")
        return data

    def write(data: bytes) -> str:
        return base64.b64encode(data).decode("ascii")

    return Codec(read, write)


_SIGNATURE = fixed(keyid=text(64), sig=_base64(88, SIGNATURE_BYTES))


@dataclass(frozen=True, kw_only=True, slots=True)
class Envelope(Record, name="envelope"):
    """A signed payload."""

    payload_type: Annotated[str, text(128), Member("payloadType")]  # a media type that names what the payload is
    payload: Annotated[bytes, _base64(2**30)]  # what is signed
    # (key id, signature) in order of key id, no key twice
    signatures: Annotated[tuple[tuple[str, bytes], ...], items(MAX_SIGNATURES, _SIGNATURE)]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.signatures]
        if not names or names != sorted(set(names)):
            raise FormatError(Code.SCHEMA, "signatures that are missing, repeated or out of order")

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview, *, max_bytes: int) -> Envelope:  # type: ignore[override]  # the limit is the reader's
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

    def payload_of(self, payload_type: str) -> bytes:
        """Return the payload if it is of this type; no signature is checked. Raises `FormatError` (`wrong-type`)."""
        if self.payload_type != payload_type:
            raise FormatError(Code.WRONG_TYPE, f"an envelope of another type where {payload_type} was expected")
        return self.payload

    def verify(self, payload_type: str, *publics: bytes) -> bytes:
        """Return the payload if it is of this type and signed by exactly these keys.

        Raises:
            FormatError: `wrong-type` or `signature-invalid`.
        """
        self.payload_of(payload_type)
        expected = {key_id(public): public for public in publics}
        if not expected or expected.keys() != dict(self.signatures).keys():
            raise FormatError(Code.SIGNATURE, "an envelope signed by other keys than expected")
        message = pae(self.payload_type, self.payload)
        for name, value in self.signatures:
            verify_signature(expected[name], value, message)
        return self.payload


def sign(payload_type: str, payload: bytes, keys: Sequence[SigningKey]) -> Envelope:
    """Sign `payload` as `payload_type` with every key given."""
    message = pae(payload_type, payload)
    signatures = sorted((key.key_id, key.sign(message)) for key in keys)
    return Envelope(payload_type=payload_type, payload=payload, signatures=tuple(signatures))


class Signed(Record):
    """Base of the records that travel as the payload of an envelope of their own type.

    Class arguments:
        payload_type: a media type.
        max_bytes: of the payload, and of the envelope's encoding.
    """

    __slots__ = ()
    _payload_type: ClassVar[str] = ""

    def sign(self, *keys: SigningKey) -> Envelope:
        """Return the record signed with every key given."""
        return sign(self._payload_type, self.encode(), keys)

    @classmethod
    def from_envelope(cls, envelope: Envelope, *publics: bytes) -> Self:
        """Return what was signed, if exactly these keys signed it.

        Raises:
            FormatError: `wrong-type`, `signature-invalid`, `too-large`, `not-canonical` or `schema-invalid`.
        """
        return cls.parse(envelope.verify(cls._payload_type, *publics))

    @classmethod
    def parse_signed(cls, message: bytes, *publics: bytes) -> Self:
        """Return what was signed, from an envelope's canonical bytes; as `from_envelope`."""
        return cls.from_envelope(Envelope.parse(message, max_bytes=cls._max_bytes), *publics)
