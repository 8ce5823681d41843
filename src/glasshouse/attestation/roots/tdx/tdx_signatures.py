"""Who signed a quote of TDX, and Intel's lists: certificates to the pinned root, revocation, dates, signatures.

Source: spec/hardware-evidence.md, section 7.3, checks 2 to 6.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import pairwise
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.collateral import Pack, check_current
from glasshouse.attestation.roots.tdx.tdx_quote import TdxQuote
from glasshouse.attestation.roots.x509_errors import X509_ERRORS
from glasshouse.errors import Code, FormatError
from glasshouse.wire.crypto import sha256

_DAY_S = 24 * 3600
_ERRORS: tuple[type[Exception], ...] = (LookupError, *X509_ERRORS)
_AUTHORITIES = {f"Intel SGX PCK {name} CA": f"intel/pck-crl/{name.lower()}" for name in ("Platform", "Processor")}


@contextmanager
def refused(code: Code, what: str) -> Iterator[None]:
    """Turn whatever a parser or a signature's check raises into a refusal of check 12."""
    try:
        yield
    except InvalidSignature:
        raise CheckFailedError("12", code, f"{what}: a signature that its key did not make") from None
    except FormatError as error:
        raise CheckFailedError("12", code, f"{what}: {error.message}") from None
    except _ERRORS as error:  # also our own sentences
        raise CheckFailedError("12", code, f"{what}: {error}") from None


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
            raise CheckFailedError("12", Code.HARDWARE_REVOKED, "a certificate of the quote is on its issuer's list")
        with refused(Code.HARDWARE_SIGNATURE, "the quote is not signed by its processor"):
            _verify(pck.public_key(), quote.qe_signature, quote.qe_report)
            if quote.qe_report[320:] != sha256(quote.key + quote.qe_authentication) + bytes(32):
                raise ValueError("an attestation key that its quoting enclave did not make")
            key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), b"\x04" + quote.key)
            _verify(key, quote.signature, quote.signed)

    def use_root(self, root: x509.Certificate) -> None:
        """Read the root's own list, by which signers are judged; raises `CheckFailedError`.

        Args:
            root: whose digest was compared.
        """
        # Intel makes it about once a year, so that its own end alone counts.
        self._root_list = self._list("intel/root-crl", root, 400 * _DAY_S)

    def signed_list(self, name: str, member: str, *, age_s: int, **stated: Any) -> SignedList:
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
            if _is_on(self._root_list, signer):
                raise ValueError("signed by a certificate that is on its issuer's list")
            _verify(signer.public_key(), signature, text)
            found = json.loads(text)
            if {one: str(found[one]).upper() for one in stated} != {one: str(value) for one, value in stated.items()}:
                raise ValueError("of something else than its name says")
            issued, expires = (datetime.fromisoformat(found[date]) for date in ("issueDate", "nextUpdate"))
            number = int(found["tcbEvaluationDataNumber"])
        self._check_current(name, issued, expires, age_s)
        # Encoded again, so that no byte which is not signed goes on.
        pem = "".join(one.public_bytes(Encoding.PEM).decode() for one in chain)
        return SignedList(pem, text.decode(), signature, number)

    def _check_chain(self, chain: tuple[x509.Certificate, ...], code: Code, what: str) -> None:
        with refused(code, what):
            if sha256(chain[-1].public_bytes(Encoding.DER)) != self._root_sha256:
                raise ValueError("they do not lead to Intel's root")
            for child, issuer in reversed(tuple(pairwise(chain))):  # nothing is read of what is not yet signed
                child.verify_directly_issued_by(issuer)
                constraints = child.extensions.get_extension_for_class(x509.BasicConstraints).value
                if constraints.ca != (child is not chain[0]):  # an authority's key signs certificates, no other does
                    raise ValueError("a certificate for another use")
            start = max(_us(one.not_valid_before_utc) for one in chain)
            end = min(_us(one.not_valid_after_utc) for one in chain)
            if not start <= self.now_us < end:
                raise ValueError("one is not yet or no longer valid")
        self.until_us = min(self.until_us, end)

    def _list(self, name: str, issuer: x509.Certificate, age_s: int) -> x509.CertificateRevocationList:
        data = self.pack.named(name)
        with refused(Code.COLLATERAL_INVALID, name):
            found = x509.load_der_x509_crl(data)
            if found.issuer != issuer.subject or not found.is_signature_valid(issuer.public_key()):  # type: ignore[arg-type]
                raise ValueError("not signed by the issuer of the certificates that it is about")
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
