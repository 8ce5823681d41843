"""The certificate of a VCEK or VLEK: of which chip or cloud a report's key is, and of which firmware.

It is read here and not by `cryptography`: AMD gives each the serial number 0, which a later version of that refuses.
Source: AMD, VCEK Certificate and KDS Interface Specification (57230), 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, padding
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import load_der_public_key

from glasshouse.attestation.roots.sev_snp.amd_keys import Authority
from glasshouse.errors import Code, FormatError

_INTEGER, _BITS, _OCTETS, _OBJECT, _TEXT, _SEQUENCE, _VERSION, _EXTENSIONS = 2, 3, 4, 6, 0x16, 0x30, 0xA0, 0xA3
_TIMES = {0x17: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}
# RSASSA-PSS with SHA-384, MGF1 with SHA-384 and a salt of 48 bytes; AMD writes it with and without the usual trailer.
_PSS = bytes.fromhex(
    "06092a864886f70d01010a3034a00f300d06096086480165030402020500a11c301a06092a864886f70d010108300d06096086480165030402020500"
    "a203020130"
)
_PSS_TRAILER = _PSS.replace(b"\x30\x34\xa0", b"\x30\x39\xa0") + bytes.fromhex("a303020101")
_AMD = bytes.fromhex("2b060104019c7801")  # 1.3.6.1.4.1.3704.1
_AUTHORITY_KEY = bytes.fromhex("551d23")
_LEVELS = {"bootloader": b"\x03\x01", "tee": b"\x03\x02", "snp": b"\x03\x03", "microcode": b"\x03\x08"}
_FMC = b"\x03\x09"
_RESERVED = (b"\x03\x04", b"\x03\x05", b"\x03\x06", b"\x03\x07")
_KNOWN = {b"\x01", b"\x02", *_LEVELS.values(), _FMC, *_RESERVED, b"\x04", b"\x05"}
_NAME = bytes.fromhex(
    "31143012060355040b0c0b456e67696e656572696e67310b30090603550406130255533114301206035504070c0b53616e746120436c617261"
    "310b300906035504080c024341311f301d060355040a0c16416476616e636564204d6963726f2044657669636573"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class VekCertificate:
    """A certificate; `parse` checks no signature."""

    signed: bytes
    signature: bytes
    is_vlek: bool
    issuer: bytes  # name, DER
    serial: int
    starts_us: int
    ends_us: int
    key: ec.EllipticCurvePublicKey
    product: str  # as the certificate calls it, with or without a stepping
    tcb: Mapping[str, int]  # security version of each part of the firmware; `fmc` of Turin alone
    chip: bytes  # 64 bytes, or 8; empty for a VLEK
    csp: str  # the cloud that a VLEK is of; empty for a VCEK

    @classmethod
    def parse(cls, data: bytes) -> VekCertificate:
        """Read a certificate; raises `FormatError`."""
        outer = _Der(data)
        whole = _Der(outer.take(_SEQUENCE))
        outer.end()
        signed, body = whole.element(_SEQUENCE)
        algorithm, signature = whole.take(_SEQUENCE), whole.take(_BITS)
        whole.end()
        fields = _Der(body)
        if fields.take(_VERSION) != b"\x02\x01\x02":
            raise FormatError(Code.SCHEMA, "a certificate of another version than 3")
        serial = _natural(fields.take(_INTEGER))
        if fields.take(_SEQUENCE) != algorithm or algorithm not in (_PSS, _PSS_TRAILER) or signature[:1] != b"\0":
            raise FormatError(Code.SCHEMA, "a certificate signed with anything but RSASSA-PSS and SHA-384")
        issuer = fields.element(_SEQUENCE)[0]
        validity = _Der(fields.take(_SEQUENCE))
        starts_us, ends_us = validity.time_us(), validity.time_us()
        validity.end()
        subject = fields.element(_SEQUENCE)[0]
        if subject not in (amd_name("SEV-VCEK"), amd_name("SEV-VLEK")):
            raise FormatError(Code.SCHEMA, "a certificate of neither a VCEK nor a VLEK")
        key = _key(fields.element(_SEQUENCE)[0])
        extensions = _extensions(fields.take(_EXTENSIONS))
        fields.end()
        tcb = {name: _small(extensions.get(oid)) for name, oid in _LEVELS.items()}
        if _FMC in extensions:
            tcb["fmc"] = _small(extensions[_FMC])
        # The least of its format; what a later one has besides would be a part of the firmware that is not compared.
        if _small(extensions.get(b"\x01")) > 1 or any(
            _small(extensions[oid]) for oid in _RESERVED if oid in extensions
        ):
            raise FormatError(Code.SCHEMA, "a certificate of another structure than that of Milan, Genoa or Turin")
        is_vlek = subject == amd_name("SEV-VLEK")
        if (b"\x05" in extensions) != is_vlek or (b"\x04" in extensions) == is_vlek:
            raise FormatError(Code.SCHEMA, "a VCEK without a chip, or a VLEK without a cloud")
        return cls(
            signed=signed,
            signature=signature[1:],
            is_vlek=is_vlek,
            issuer=issuer,
            serial=serial,
            starts_us=starts_us,
            ends_us=ends_us,
            key=key,
            product=_text(extensions.get(b"\x02")),
            tcb=tcb,
            chip=b"" if is_vlek else _chip(extensions[b"\x04"]),
            csp=_text(extensions[b"\x05"]) if is_vlek else "",
        )

    def check_signature(self, issuer: Authority) -> None:
        """The issuer signed it; raises `InvalidSignature`."""
        if self.issuer != amd_name(issuer.name):
            raise InvalidSignature
        pss = padding.PSS(padding.MGF1(SHA384()), salt_length=48)
        issuer.key.verify(self.signature, self.signed, pss, SHA384())


def amd_name(common: str) -> bytes:
    """Return the name of a certificate of AMD's, DER."""
    text = common.encode()
    own = bytes((0x31, len(text) + 9, 0x30, len(text) + 7, 6, 3, 0x55, 4, 3, 0x0C, len(text))) + text
    content = _NAME + own
    return (b"\x30" if len(content) < 128 else b"\x30\x81") + bytes((len(content),)) + content


class _Der:
    """Takes elements of DER, in the one form that each has; raises `FormatError`."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def element(self, tag: int) -> tuple[bytes, bytes]:
        """Return the next element, which has this tag, and its content."""
        start, head = self._at, self._data[self._at : self._at + 4]
        if len(head) < 2 or head[0] != tag:
            raise FormatError(Code.SCHEMA, "a certificate with another element than there has to be")
        more = {0x81: 1, 0x82: 2}.get(head[1], 0)
        length = int.from_bytes(head[2 : 2 + more], "big") if more else head[1]
        at = start + 2 + more
        self._at = at + length
        if (more and length < (0x80, 0x100)[more - 1]) or (not more and head[1] >= 0x80) or self._at > len(self._data):
            raise FormatError(Code.SCHEMA, "a certificate with an element that is cut short or not in its one form")
        return self._data[start : self._at], self._data[at : self._at]

    def take(self, tag: int) -> bytes:
        """Return the content of the next element."""
        return self.element(tag)[1]

    def time_us(self) -> int:
        """Return the next element as a time, µs since the epoch."""
        tag = self._data[self._at] if self.more else 0
        text = self.take(tag if tag in _TIMES else 0x17).decode("ascii", "replace")
        try:
            # Two digits of a year are of this century up to 49.
            if not text[:-1].isdecimal() or len(text) != (13 if tag == 0x17 else 15) or (tag == 0x17 and text >= "5"):
                raise ValueError
            return int(datetime.strptime(text, _TIMES[tag]).replace(tzinfo=UTC).timestamp()) * 1_000_000
        except ValueError:
            raise FormatError(Code.SCHEMA, "a certificate with a time that is none") from None

    @property
    def more(self) -> bool:
        """Whether anything is left."""
        return self._at < len(self._data)

    def end(self) -> None:
        """Nothing is left."""
        if self.more:
            raise FormatError(Code.SCHEMA, "a certificate with more elements than there have to be")


def _extensions(data: bytes) -> dict[bytes, bytes]:
    """Return AMD's extensions, by the rest of their object identifier; none may be there that is not known."""
    listed = _Der(data)
    each, found = _Der(listed.take(_SEQUENCE)), {}
    listed.end()
    while each.more:
        one = _Der(each.take(_SEQUENCE))
        oid, value = one.take(_OBJECT), one.take(_OCTETS)  # none is critical: that would stand between
        one.end()
        if oid == _AUTHORITY_KEY:
            continue
        if not oid.startswith(_AMD) or oid[8:] not in _KNOWN or oid[8:] in found:
            raise FormatError(Code.SCHEMA, "a certificate with an extension that is not known, or there twice")
        found[oid[8:]] = value
    return found


def _natural(data: bytes) -> int:
    if not 1 <= len(data) <= 20 or data[0] & 0x80 or (len(data) > 1 and not data[0] and not data[1] & 0x80):
        raise FormatError(Code.SCHEMA, "a certificate with a number that is negative or not in its one form")
    return int.from_bytes(data, "big")


def _small(value: bytes | None) -> int:
    one = _Der(value or b"")
    number = _natural(one.take(_INTEGER))
    one.end()
    if number > 255:
        raise FormatError(Code.SCHEMA, "a certificate with a security version above 255")
    return number


def _text(value: bytes | None) -> str:
    one = _Der(value or b"")
    text = one.take(_TEXT)
    one.end()
    if not 1 <= len(text) <= 128 or not text.isascii():
        raise FormatError(Code.SCHEMA, "a certificate with a name that is none")
    return text.decode("ascii")


def _chip(value: bytes) -> bytes:
    """AMD writes it bare, and since 2023 on some servers as an element."""
    if len(value) in (10, 66):
        one = _Der(value)
        value = one.take(_OCTETS)
        one.end()
    if len(value) not in (8, 64):
        raise FormatError(Code.SCHEMA, "a certificate with a chip of another length than 64 bytes, or Turin's 8")
    return value


def _key(data: bytes) -> ec.EllipticCurvePublicKey:
    try:
        key = load_der_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise FormatError(Code.SCHEMA, "a certificate of another key than one of ECC P-384")
    return key
