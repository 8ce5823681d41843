"""Who signed a quote of TDX, and Intel's lists: certificates to the pinned root, revocation, dates, signatures.

Source: spec/hardware-evidence.md, section 7.3, checks 2 to 6.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from glasshouse.attestation.roots.certificate_path import certificate_path
from glasshouse.attestation.roots.collateral import Pack, check_current
from glasshouse.attestation.roots.refusing import refusal, refused, require
from glasshouse.attestation.roots.tdx.tdx_quote import TdxQuote
from glasshouse.errors import Code
from glasshouse.wire.crypto import sha256

_DAY_S = 24 * 3600
_AUTHORITIES = {f"Intel SGX PCK {name} CA": f"intel/pck-crl/{name.lower()}" for name in ("Platform", "Processor")}


class SignedList(NamedTuple):
    """A list of Intel's whose signature holds."""

    pem: str  # its issuers
    text: str
    signature: bytes
    evaluation: int  # Intel's number of what it knew


class Judge:
    """Checks what Intel signed against one pinned root, at one time.

    Args:
        root_sha256: of the root's certificate, DER.
    """

    def __init__(self, pack: Pack, *, root_sha256: bytes, now_us: int) -> None:
        self.pack, self.now_us, self._root_sha256 = pack, now_us, root_sha256
        self.until_us = 2**53 - 1  # when the first of all that was checked ends

    def check_quote(self, quote: TdxQuote, *, crl_age_s: int) -> None:
        """Checks 2 to 5; raises `CheckFailedError`."""
        pck, issuer, root = quote.chain
        self._check_chain(quote.chain, Code.HARDWARE_CERTIFICATE, "the certificates of the quote")
        with refused(Code.HARDWARE_CERTIFICATE, "the issuer of the processor's certificate"):
            self.pck_list = _AUTHORITIES[str(issuer.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value)]
        self.use_root(root)
        pck_list = self._list(self.pck_list, issuer, crl_age_s)
        if _is_on(pck_list, pck) or _is_on(self._root_list, issuer):
            raise refusal(Code.HARDWARE_REVOKED, "a certificate of the quote is on its issuer's list")
        with refused(Code.HARDWARE_SIGNATURE, "the quote is not signed by its processor"):
            by = quote.by
            _verify(pck.public_key(), by.qe_signature, by.qe_report)
            is_made = by.qe_report[320:] == sha256(by.key + by.authentication) + bytes(32)
            require(is_made, "an attestation key that its quoting enclave did not make")
            key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), b"\x04" + by.key)
            _verify(key, by.signature, quote.signed)

    def use_root(self, root: x509.Certificate) -> None:
        """Read the root's own list, by which signers are judged; raises `CheckFailedError`.

        Args:
            root: whose digest was compared.
        """
        # Intel makes it about once a year, so that its own end alone counts.
        self._root_list = self._list("intel/root-crl", root, 400 * _DAY_S)

    def signed_list(self, name: str, member: str, *, age_s: int, **stated: str) -> SignedList:
        """Check 6, after the others: a list of Intel's is signed, of this time, and what its name says.

        Args:
            member: under which the list stands beside its signature.
            stated: members of it, and what they have to be.

        Raises:
            CheckFailedError: `collateral-missing`, `collateral-invalid` or `collateral-expired`.
        """
        data, issuers = self.pack.named(name), self.pack.named(f"{name}/chain")
        with refused(Code.COLLATERAL_INVALID, f"{name}/chain"):
            signer, _ = chain = tuple(x509.load_pem_x509_certificates(issuers))
        self._check_chain(chain, Code.COLLATERAL_INVALID, f"{name}/chain")
        with refused(Code.COLLATERAL_INVALID, name):
            form = re.compile(rb'\{"%s":(\{.*\}),"signature":"([0-9a-f]{128})"\}' % member.encode(), re.DOTALL)
            if (parts := form.fullmatch(data)) is None:
                raise ValueError(f"not a signed {member}")
            text, signature = parts[1], bytes.fromhex(parts[2].decode())
            require(not _is_on(self._root_list, signer), "signed by a certificate that is on its issuer's list")
            _verify(signer.public_key(), signature, text)
            found = json.loads(text)
            is_named = all(str(found[one]).upper() == value for one, value in stated.items())
            require(is_named, "of something else than its name says")
            issued, expires = (datetime.fromisoformat(found[date]) for date in ("issueDate", "nextUpdate"))
            number = int(found["tcbEvaluationDataNumber"])
        self._check_current(name, issued, expires, age_s)
        # Encoded again, so that no byte which is not signed goes on.
        pem = "".join(one.public_bytes(Encoding.PEM).decode() for one in chain)
        return SignedList(pem, text.decode(), signature, number)

    def _check_chain(self, chain: tuple[x509.Certificate, ...], code: Code, what: str) -> None:
        *below, root = chain
        with refused(code, what):
            is_pinned = sha256(root.public_bytes(Encoding.DER)) == self._root_sha256
            require(is_pinned, "they do not lead to Intel's root")
            _, end_us = certificate_path(below, [root], self.now_us)
        self.until_us = min(self.until_us, end_us)

    def _list(self, name: str, issuer: x509.Certificate, age_s: int) -> x509.CertificateRevocationList:
        data = self.pack.named(name)
        with refused(Code.COLLATERAL_INVALID, name):
            found = x509.load_der_x509_crl(data)
            is_signed = found.issuer == issuer.subject and found.is_signature_valid(issuer.public_key())  # type: ignore[arg-type]
            require(is_signed, "not signed by the issuer of the certificates that it is about")
            require(not any(one.critical for one in found.extensions), "a list of a part of them, or of another form")
            if (expires := found.next_update_utc) is None:
                raise ValueError("a list without an end")
        self._check_current(name, found.last_update_utc, expires, age_s)
        return found

    def _check_current(self, name: str, issued: datetime, expires: datetime, age_s: int) -> None:
        start, end = _us(issued), _us(expires)
        check_current(name, issued_us=start, expires_us=end, now_us=self.now_us, max_age_s=age_s)
        self.until_us = min(self.until_us, end, start + age_s * 1_000_000)


def _verify(key: Any, signature: bytes, message: bytes) -> None:
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("a key of another kind than P-256")
    r, s = int.from_bytes(signature[:32], "big"), int.from_bytes(signature[32:], "big")
    key.verify(encode_dss_signature(r, s), message, ec.ECDSA(SHA256()))


def _is_on(revoked: x509.CertificateRevocationList, certificate: x509.Certificate) -> bool:
    return revoked.get_revoked_certificate_by_serial_number(certificate.serial_number) is not None


def _us(when: datetime) -> int:
    return int(when.timestamp()) * 1_000_000
