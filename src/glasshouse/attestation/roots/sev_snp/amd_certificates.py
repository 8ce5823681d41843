"""What AMD's authorities sign: the certificate of a VCEK or VLEK, and the revocation list of a product.

The list names no certificate of one chip: old firmware is refused by its security versions.
Source: AMD, VCEK Certificate and KDS Interface Specification (57230), 3; RFC 5280, section 5.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, padding
from cryptography.hazmat.primitives.hashes import SHA384

from glasshouse.attestation.roots.collateral import Pack, check_current
from glasshouse.attestation.roots.refusing import refusal, refused, require
from glasshouse.attestation.roots.sev_snp.amd_keys import Authority, Product
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
_MAX_LIST_AGE_S = 400 * 24 * 3600  # signed once a year: their own end counts, not the policy's greatest age
_MAX_LIST_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class VekCertificate:
    """A certificate that an authority of AMD's signed."""

    root: Product
    issuer: Authority
    serial: int
    starts_us: int
    ends_us: int  # or its issuer's end, or the root's
    key: ec.EllipticCurvePublicKey
    product: str  # as the certificate calls it, with or without a stepping
    tcb: Mapping[str, int]  # security version of each part of the firmware; `fmc` of Turin alone
    chip: bytes  # 64 bytes, or 8; empty for a VLEK
    csp: str  # the cloud that a VLEK is of; empty for a VCEK

    @classmethod
    def parse(cls, data: bytes, roots: Sequence[Product]) -> VekCertificate:
        """Read a certificate of one of these products.

        Raises:
            FormatError: what does not hold, and whatever `cryptography` raises.
        """
        # AMD gives each the serial number 0, which a later version of `cryptography` refuses: it is shown a 1 there.
        is_zero = data[8:16] == _VERSION_3 + _ZERO
        found = x509.load_der_x509_certificate(data[:15] + b"\x01" + data[16:] if is_zero else data)
        root, issuer = _signer(data, found, roots)  # nothing else of it is looked at before
        key = found.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
            raise FormatError(Code.SCHEMA, "of another key than one of ECC P-384")
        own = _own_extensions(found)
        tcb = {part: _number(own.pop(oid, b"")) for part, oid in _PARTS.items()}
        if "3.9" in own:
            tcb["fmc"] = _number(own.pop("3.9"))
        # What a later structure has besides would be a part of the firmware that is not compared.
        reserved = [_number(own.pop(oid)) for oid in ("3.4", "3.5", "3.6", "3.7") if oid in own]
        is_known = _number(own.pop("1", b"")) <= 1 and not any(reserved)
        require(is_known, "of another structure than that of Milan, Genoa or Turin")
        product, chip, csp = _text(own.pop("2", b"")), own.pop("4", b""), own.pop("5", b"")
        chip = chip[2:] if chip[:2] in (b"\x04\x40", b"\x04\x08") and len(chip) in (66, 10) else chip
        names = [one.value for one in found.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
        kinds = [(root.ask, ["SEV-VCEK"], length, False) for length in (64, 8)] + [(root.asvk, ["SEV-VLEK"], 0, True)]
        is_one = not own and (issuer, names, len(chip), bool(csp)) in kinds
        require(is_one, "of neither a VCEK of one chip nor a VLEK of one cloud")
        return cls(
            root=root,
            issuer=issuer,
            serial=0 if is_zero else found.serial_number,
            starts_us=_us(found.not_valid_before_utc),
            ends_us=min(_us(found.not_valid_after_utc), 1_000_000 * issuer.ends_s, 1_000_000 * root.ark.ends_s),
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


def check_revocation(collateral: Pack, product: Product, *, serials: Collection[int], now_us: int) -> int:
    """None of these certificates is on the product's list.

    Returns:
        When the list ends, µs, exclusive.

    Raises:
        CheckFailedError: `collateral-missing`, `collateral-invalid`, `collateral-expired` or `hardware-revoked`.
    """
    name = f"amd/crl/{product.name}"
    data = collateral.named(name)
    with refused(Code.COLLATERAL_INVALID, f"{name} is not a complete list that {product.ark.name} signed"):
        require(len(data) <= _MAX_LIST_BYTES, "too large")
        found = x509.load_der_x509_crl(data)
        # What stands before the signature says how many of its last bits are none, and is not signed itself.
        is_signed = data.endswith(b"\0" + found.signature) and found.is_signature_valid(product.ark.key)
        require(is_signed, "another signature")
        # A critical extension narrows what the list is about, or whose certificates it names.
        require(not any(one.critical for one in found.extensions), "a critical extension")
        end = found.next_update_utc
        if end is None:
            raise FormatError(Code.SCHEMA, "no end")
        issued_us, ends_us = _us(found.last_update_utc), _us(end)
        revoked = {entry.serial_number for entry in found}
    check_current(name, issued_us=issued_us, expires_us=ends_us, now_us=now_us, max_age_s=_MAX_LIST_AGE_S)
    for serial in serials:
        if serial in revoked:
            raise refusal(Code.HARDWARE_REVOKED, f"{name} revokes the certificate of number {serial}")
    return min(ends_us, issued_us + _MAX_LIST_AGE_S * 1_000_000)


def _signer(data: bytes, found: x509.Certificate, roots: Sequence[Product]) -> tuple[Product, Authority]:
    """Return whose key signed it, by the one algorithm, named the same inside and outside, to the last bit."""
    end, signature = 4 + len(found.tbs_certificate_bytes), found.signature
    inner, tail = data[15 + data[14] :], b"\x03\x82" + (1 + len(signature)).to_bytes(2, "big") + b"\0" + signature
    is_formed = data[8:13] == _VERSION_3 and any(inner.startswith(one) and data[end:] == one + tail for one in _PSS)
    require(is_formed, "of another version than 3, or signed with anything but RSASSA-PSS and SHA-384")
    for root in roots:
        for issuer in (root.ask, root.asvk):
            try:
                issuer.key.verify(signature, data[4:end], padding.PSS(padding.MGF1(SHA384()), 48), SHA384())
            except InvalidSignature:
                continue
            return root, issuer
    raise FormatError(Code.SCHEMA, "that does not lead to a pinned key of AMD's")


def _own_extensions(found: x509.Certificate) -> dict[str, bytes]:
    """Return AMD's extensions by the end of their names; it has no others, but a name of its issuer's key."""
    own = {}
    for one in found.extensions:
        oid = one.oid.dotted_string
        if one.oid != x509.OID_AUTHORITY_KEY_IDENTIFIER:
            if one.critical or not oid.startswith(_AMD) or not isinstance(one.value, x509.UnrecognizedExtension):
                raise FormatError(Code.SCHEMA, f"with the extension {oid}")
            own[oid.removeprefix(_AMD)] = one.value.value
    return own


def _number(value: bytes) -> int:
    """Read an INTEGER from 0 to 255, in its one form."""
    is_formed = len(value) == 3 + (value[-1:] >= b"\x80") and value[:-1] in (b"\x02\x01", b"\x02\x02\x00")
    require(is_formed, "with a security version that is none")
    return value[-1]


def _text(value: bytes) -> str:
    """Read an IA5String."""
    is_formed = 2 < len(value) < 130 and value[:2] == bytes((0x16, len(value) - 2)) and value.isascii()
    require(is_formed, "with a name that is none")
    return value[2:].decode("ascii")


def _us(time: datetime) -> int:
    return int(time.timestamp()) * 1_000_000
