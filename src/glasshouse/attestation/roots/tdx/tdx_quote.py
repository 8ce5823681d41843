"""A quote of TDX in its one form: exact lengths, certificates as encoding them again gives, nothing behind.

Source: Intel TDX DCAP Quoting Library API, appendix 3; Intel TDX Module ABI, TDREPORT_STRUCT.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from glasshouse.attestation.roots.refusing import require
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


class QuoteSignature(NamedTuple):
    """What is behind the report, up to the certificates."""

    size: int  # of all that follows
    signature: bytes  # of header and report
    key: bytes  # the attestation key's coordinates
    qe_kind: int
    qe_size: int
    qe_report: bytes  # of the quoting enclave, which made that key
    qe_signature: bytes
    authentication_size: int
    authentication: bytes
    chain_kind: int
    chain_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TdxQuote:
    """A quote whose signatures have **not** been checked yet."""

    raw: bytes
    signed: bytes  # header and report
    report: TdReport
    service_td: bytes  # MRSERVICETD, of TDX 1.5; zero else
    by: QuoteSignature
    pem: bytes
    chain: tuple[x509.Certificate, ...]  # the PCK's, its issuer's, the root

    @classmethod
    def parse(cls, raw: bytes) -> TdxQuote:
        """Read a quote; raises `FormatError`."""
        try:
            version, *header = _HEADER.unpack_from(raw)
            at, kind, length = _HEADER.size, 2, _REPORT.size
            if version == 5:
                kind, length = _TYPED.unpack_from(raw, at)
                at += _TYPED.size
            tail = 64 * (kind == 3)
            end = at + _REPORT.size + tail
            by = QuoteSignature(*_BEHIND.unpack_from(raw, end))
            pem = raw[end + _BEHIND.size :]
            chain = tuple(x509.load_pem_x509_certificates(pem.removesuffix(b"\x00")))
            encoded = b"".join(one.public_bytes(Encoding.PEM) for one in chain)
        except _ERRORS as error:
            raise FormatError(Code.SCHEMA, f"a quote that cannot be read: {error}") from None
        is_known = version in (4, 5) and kind in (2, 3) and length == _REPORT.size + tail
        require(is_known, f"a quote of version {version} with a report of type {kind}")
        behind = len(raw) - end - 4
        stated = by._replace(
            size=behind,
            qe_kind=_QE_REPORT,
            qe_size=behind - 134,
            authentication_size=32,
            chain_kind=_PEM_CHAIN,
            chain_size=len(pem),
        )
        is_formed = header == [_ECDSA_P256, _TDX, _INTEL] and by == stated
        require(is_formed, "a quote that is none of TDX, or whose parts have other lengths")
        is_chain = len(chain) == 3 and encoded == pem.removesuffix(b"\x00")
        require(is_chain, "a quote whose certificates are not three, or not in their one form")
        report = TdReport(*_REPORT.unpack_from(raw, at))
        service_td = raw[end - 48 : end] if tail else bytes(48)
        return cls(raw=raw, signed=raw[:end], report=report, service_td=service_td, by=by, pem=pem, chain=chain)
