"""The certificate of a VCEK or VLEK: of which chip or cloud a report's key is, and of which firmware.

Source: AMD, VCEK Certificate and KDS Interface Specification (57230), 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, padding
from cryptography.hazmat.primitives.hashes import SHA384

from glasshouse.attestation.roots.sev_snp.amd_keys import Authority, Product
from glasshouse.attestation.roots.x509_errors import X509_ERRORS
from glasshouse.errors import Code, FormatError

_AMD = "1.3.6.1.4.1.3704.1."
_PARTS = {"bootloader": "3.1", "tee": "3.2", "snp": "3.3", "microcode": "3.8"}
_VERSION_3, _ZERO = b"\xa0\x03\x02\x01\x02", b"\x02\x01\x00"
# RSASSA-PSS with SHA-384, MGF1 with SHA-384 and a salt of 48 bytes; AMD writes it without and with the usual trailer.
_HASHES = "a00f300d06096086480165030402020500a11c301a06092a864886f70d010108300d06096086480165030402020500a203020130"
_PSS = (
    bytes.fromhex("304106092a864886f70d01010a3034" + _HASHES),
    bytes.fromhex("304606092a864886f70d01010a3039" + _HASHES + "a303020101"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class VekCertificate:
    """A certificate that an authority of AMD's signed."""

    root: Product
    issuer: Authority
    serial: int
    starts_us: int
    ends_us: int
    key: ec.EllipticCurvePublicKey
    product: str  # as the certificate calls it, with or without a stepping
    tcb: Mapping[str, int]  # security version of each part of the firmware; `fmc` of Turin alone
    chip: bytes  # 64 bytes, or 8; empty for a VLEK
    csp: str  # the cloud that a VLEK is of; empty for a VCEK

    @classmethod
    def parse(cls, data: bytes, roots: Sequence[Product]) -> VekCertificate:
        """Read a certificate of one of these products; raises `FormatError`."""
        # AMD gives each the serial number 0, which a later version of `cryptography` refuses: it is shown a 1 there.
        is_zero = data[8:16] == _VERSION_3 + _ZERO
        try:
            found = x509.load_der_x509_certificate(data[:15] + b"\x01" + data[16:] if is_zero else data)
            end, signature = 4 + len(found.tbs_certificate_bytes), found.signature
        except X509_ERRORS as error:
            raise _wrong(f"that cannot be read: {error}") from None
        inner, tail = data[15 + data[14] :], b"\x03\x82" + (1 + len(signature)).to_bytes(2, "big") + b"\0" + signature
        if data[8:13] != _VERSION_3 or not any(inner.startswith(one) and data[end:] == one + tail for one in _PSS):
            raise _wrong("of another version than 3, or signed with anything but RSASSA-PSS and SHA-384")
        issuers = [(root, issuer) for root in roots for issuer in (root.ask, root.asvk)]
        signers = [pair for pair in issuers if _is_signed(pair[1], signature, data[4:end])]
        if not signers:  # nothing else of it is looked at then
            raise _wrong("that does not lead to a pinned key of AMD's")
        root, issuer = signers[0]
        try:
            key = found.public_key()
            names = [one.value for one in found.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
            extensions = {one.oid.dotted_string: one for one in found.extensions}
        except X509_ERRORS as error:
            raise _wrong(f"that cannot be read: {error}") from None
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
            raise _wrong("of another key than one of ECC P-384")
        own = {}
        for oid, one in extensions.items():
            if oid == x509.OID_AUTHORITY_KEY_IDENTIFIER.dotted_string:
                continue
            if one.critical or not oid.startswith(_AMD) or not isinstance(one.value, x509.UnrecognizedExtension):
                raise _wrong(f"with the extension {oid}")
            own[oid.removeprefix(_AMD)] = one.value.value
        tcb = {part: _number(own.pop(oid, b"")) for part, oid in _PARTS.items()}
        if "3.9" in own:
            tcb["fmc"] = _number(own.pop("3.9"))
        # What a later structure has besides would be a part of the firmware that is not compared.
        reserved = [_number(own.pop(oid)) for oid in ("3.4", "3.5", "3.6", "3.7") if oid in own]
        if _number(own.pop("1", b"")) > 1 or any(reserved):
            raise _wrong("of another structure than that of Milan, Genoa or Turin")
        product, chip, csp = _text(own.pop("2", b"")), own.pop("4", b""), own.pop("5", b"")
        chip = chip[2:] if chip[:2] in (b"\x04\x40", b"\x04\x08") and len(chip) in (66, 10) else chip
        kinds = [(root.ask, ["SEV-VCEK"], length, False) for length in (64, 8)] + [(root.asvk, ["SEV-VLEK"], 0, True)]
        if own or (issuer, names, len(chip), bool(csp)) not in kinds:
            raise _wrong("of neither a VCEK of one chip nor a VLEK of one cloud")
        return cls(
            root=root,
            issuer=issuer,
            serial=0 if is_zero else found.serial_number,
            starts_us=_us(found.not_valid_before_utc),
            ends_us=_us(found.not_valid_after_utc),
            key=key,
            product=product,
            tcb=tcb,
            chip=chip,
            csp=_text(csp) if csp else "",
        )

    @property
    def is_vlek(self) -> bool:
        """Whether it is of a cloud's key, and not of one chip's."""
        return bool(self.csp)


def _is_signed(issuer: Authority, signature: bytes, data: bytes) -> bool:
    try:
        issuer.key.verify(signature, data, padding.PSS(padding.MGF1(SHA384()), 48), SHA384())
    except InvalidSignature:
        return False
    return True


def _wrong(what: str) -> FormatError:
    return FormatError(Code.SCHEMA, f"a certificate {what}")


def _number(value: bytes) -> int:
    """Read an INTEGER from 0 to 255, in its one form."""
    if len(value) == 3 + (value[-1:] >= b"\x80") and value[:-1] in (b"\x02\x01", b"\x02\x02\x00"):
        return value[-1]
    raise _wrong("with a security version that is none")


def _text(value: bytes) -> str:
    """Read an IA5String."""
    if 2 < len(value) < 130 and value[:2] == bytes((0x16, len(value) - 2)) and value.isascii():
        return value[2:].decode("ascii")
    raise _wrong("with a name that is none")


def _us(time: datetime) -> int:
    return int(time.timestamp()) * 1_000_000
