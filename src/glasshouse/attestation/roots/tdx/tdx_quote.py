"""A quote of TDX in its one form: exact lengths, certificates as encoding them again gives, nothing behind.

Source: Intel TDX DCAP Quoting Library API, appendix 3; Intel TDX Module ABI, TDREPORT_STRUCT.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from glasshouse.attestation.roots.x509_errors import X509_ERRORS
from glasshouse.errors import Code, FormatError
from glasshouse.wire.record import Record, octets

MAX_QUOTE_BYTES = 16 * 1024
_ERRORS: tuple[type[Exception], ...] = (struct.error, *X509_ERRORS)
_HEADER = struct.Struct("<HHI4x16s20x")
_REPORT = struct.Struct("<16s48s48s8s8s8s48s48s48s48s48s48s48s48s64s")
_TYPED = struct.Struct("<HI")  # of version 5, before the report: its type and length
_BEHIND = struct.Struct("<I64s64sHI384s64sH32sHI")
_ECDSA_P256, _TDX, _INTEL = 2, 0x81, bytes.fromhex("939a7233f79c4ca9940a0db3957f0607")
_QE_REPORT, _PEM_CHAIN = 6, 5  # kinds of certification data


@dataclass(frozen=True, kw_only=True, slots=True)
class TdxBlob(Record, name="tdx", max_bytes=24 * 1024):
    """The blob of the kind `tdx`."""

    quote: Annotated[bytes, octets(max_length=MAX_QUOTE_BYTES)]


class TdReport(NamedTuple):
    """What the processor measured of a trust domain."""

    tee_tcb_svn: bytes
    mrseam: bytes
    mrsignerseam: bytes
    seam_attributes: bytes
    attributes: bytes
    xfam: bytes
    mrtd: bytes
    mrconfigid: bytes
    mrowner: bytes
    mrownerconfig: bytes
    rtmr0: bytes
    rtmr1: bytes
    rtmr2: bytes
    rtmr3: bytes
    report_data: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class TdxQuote:
    """A quote whose signatures have **not** been checked yet."""

    raw: bytes
    signed: bytes  # header and report
    report: TdReport
    service_td: bytes  # MRSERVICETD, of TDX 1.5; zero else
    signature: bytes
    key: bytes  # the attestation key's coordinates
    qe_report: bytes  # of the quoting enclave, which made that key
    qe_signature: bytes
    qe_authentication: bytes
    pem: bytes
    chain: tuple[x509.Certificate, ...]  # the PCK's, its issuer's, the root

    @classmethod
    def parse(cls, raw: bytes) -> TdxQuote:
        """Read a quote; raises `FormatError`."""
        try:
            version, key_type, tee, vendor = _HEADER.unpack_from(raw)
            at, kind = _HEADER.size, 2
            if version == 5:
                kind, length = _TYPED.unpack_from(raw, at)
                at += _TYPED.size
            tail = 64 * (kind == 3)
            end = at + _REPORT.size + tail
            whole, signature, key, data, size, qe_report, qe_signature, auth, authentication, form, pem_size = (
                _BEHIND.unpack_from(raw, end)
            )
            pem = raw[end + _BEHIND.size :]
            chain = tuple(x509.load_pem_x509_certificates(pem.removesuffix(b"\x00")))
        except _ERRORS as error:
            raise FormatError(Code.SCHEMA, f"a quote that cannot be read: {error}") from None
        lengths = (whole, size, auth, pem_size) == (len(raw) - end - 4, len(raw) - end - 138, 32, len(pem))
        if version not in (4, 5) or kind not in (2, 3) or (version == 5 and length != _REPORT.size + tail):
            raise FormatError(Code.SCHEMA, f"a quote of version {version} with a report of type {kind}")
        if (key_type, tee, vendor, data, form) != (_ECDSA_P256, _TDX, _INTEL, _QE_REPORT, _PEM_CHAIN) or not lengths:
            raise FormatError(Code.SCHEMA, "a quote that is none of TDX, or whose parts have other lengths")
        if len(chain) != 3 or b"".join(one.public_bytes(Encoding.PEM) for one in chain) != pem.removesuffix(b"\x00"):
            raise FormatError(Code.SCHEMA, "a quote whose certificates are not three, or not in their one form")
        return cls(
            raw=raw,
            signed=raw[:end],
            report=TdReport(*_REPORT.unpack_from(raw, at)),
            service_td=raw[end - 48 : end] if tail else bytes(48),
            signature=signature,
            key=key,
            qe_report=qe_report,
            qe_signature=qe_signature,
            qe_authentication=authentication,
            pem=pem,
            chain=chain,
        )
