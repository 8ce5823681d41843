"""Where each item of a collateral pack is published, how it is asked for, and what of an answer is the item.

Sources: AMD's specification 57230 (VCEK certificate and KDS interface), Intel's PCS API version 4, NVIDIA's nvtrust.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias
from urllib.parse import unquote

from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import ocsp

from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.wire.crypto import sha256

HOSTS = {
    "amd": "https://kdsintf.amd.com",
    "intel": "https://api.trustedservices.intel.com",
    "intel-root": "https://certificates.trustedservices.intel.com",
    "nvidia-ocsp": "https://ocsp.ndis.nvidia.com",
    "nvidia-rim": "https://rim.attestation.nvidia.com",
}
PRODUCTS = ("Genoa", "Milan", "Turin")
Certified: TypeAlias = dict[str, tuple[x509.Certificate, x509.Certificate]]
"""Certificates by the names of the OCSP responses about them, each with its issuer."""

_AUTHORITIES = ("platform", "processor")
_CHAIN = "/chain"
OCSP = "nvidia/ocsp/"
RIM = "nvidia/rim/"
_X509 = re.compile(rb"<(?:[A-Za-z]+:)?X509Certificate>([A-Za-z0-9+/=\s]{1,8192})</")
_MAX_SIGNERS = 8
_FMSPC = re.compile("[0-9A-F]{12}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request, and what of its answer is kept."""

    item: str  # the name of what the answer's body holds
    url: str
    body: bytes | None = None  # sent by POST
    content_type: str = ""  # of the body
    chain: str = ""  # the header with the certificates of those who signed it: PEM, in the form of a URL
    read: Callable[[str, bytes], bytes] = lambda _name, body: body

    def items(self, header: str | None, body: bytes) -> dict[str, bytes]:
        """Return the items of an answer; raises `FormatError`.

        Args:
            header: what `chain` names.
        """
        found = {self.item: self.read(self.item, body)}
        if self.chain:
            if not header:
                raise FormatError(Code.COLLATERAL_INVALID, f"an answer without the header {self.chain}")
            found[self.item + _CHAIN] = unquote(header, errors="replace").encode()
        return found


def request_for(item: str, certificates: Certified) -> Request:
    """Return how an item is asked for; of a chain, what it comes with.

    Args:
        certificates: those that OCSP may be asked about.

    Raises:
        UsageError: what no vendor publishes, or is asked about by a certificate that is not here.
    """
    name = item.removesuffix(_CHAIN)
    last = name.rpartition("/")[2]
    if name.startswith("amd/crl/") and last in PRODUCTS:
        return Request(item=name, url=f"{HOSTS['amd']}/vcek/v1/{last}/crl")
    if name.startswith("intel/pck-crl/") and last in _AUTHORITIES:
        url = f"{HOSTS['intel']}/sgx/certification/v4/pckcrl?ca={last}&encoding=der"
        return Request(item=name, url=url)  # its issuer's certificate is in each quote that it is about
    if name == "intel/root-crl":
        return Request(item=name, url=f"{HOSTS['intel-root']}/IntelSGXRootCA.der")
    if name == "intel/qe-identity":
        url = f"{HOSTS['intel']}/tdx/certification/v4/qe/identity"
        return Request(item=name, url=url, chain="SGX-Enclave-Identity-Issuer-Chain")
    if name.startswith("intel/tcb/") and _FMSPC.fullmatch(last):
        url = f"{HOSTS['intel']}/tdx/certification/v4/tcb?fmspc={last}"
        return Request(item=name, url=url, chain="TCB-Info-Issuer-Chain")
    if name.startswith(RIM):
        return Request(item=name, url=f"{HOSTS['nvidia-rim']}/v1/rim/{last}", read=_manifest)
    if name in certificates:
        # The service is asked with SHA-384, as NVIDIA's own verifier does.
        question = ocsp.OCSPRequestBuilder().add_certificate(*certificates[name], SHA384()).build()
        body = question.public_bytes(Encoding.DER)
        return Request(item=name, url=f"{HOSTS['nvidia-ocsp']}/", body=body, content_type="application/ocsp-request")
    if name.startswith(OCSP):
        why = f"the certificate that {name} is about is not known here"
        raise UsageError(Code.COLLATERAL_MISSING, why, hint="name a PEM file with the chain that it is in")
    raise UsageError(Code.USAGE, f"no vendor publishes {item}", hint="spec/hardware-evidence.md, 5, has the names")


def asked_about(chain: list[x509.Certificate]) -> Certified:
    """Return the certificates of a chain, leaf first, that OCSP is asked about: all but its root."""
    return {OCSP + sha256(one.public_bytes(Encoding.DER))[:16].hex(): (one, issuer) for one, issuer in pairwise(chain)}


def signers(manifest: bytes) -> list[x509.Certificate]:
    """Return the certificates in a reference manifest, **unverified**: what is asked about them does no harm.

    Raises:
        FormatError: `collateral-invalid`.
    """
    try:
        found = [base64.b64decode(text) for text in re.findall(_X509, manifest)]
        return [x509.load_der_x509_certificate(der) for der in found[:_MAX_SIGNERS]]
    except (ValueError, binascii.Error) as error:
        raise FormatError(Code.COLLATERAL_INVALID, f"a manifest with what is no certificate: {error}") from None


def _manifest(name: str, body: bytes) -> bytes:
    """Return the manifest in an answer of the RIM service, if it is the one that was asked for."""
    try:
        answer = json.loads(body)
        if answer["id"] != name.removeprefix(RIM):
            raise FormatError(Code.COLLATERAL_INVALID, f"another manifest than {name}")
        return base64.b64decode(answer["rim"], validate=True)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise FormatError(Code.COLLATERAL_INVALID, f"an answer without the manifest {name}") from None
