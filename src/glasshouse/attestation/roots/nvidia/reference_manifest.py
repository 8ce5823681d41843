"""NVIDIA's reference integrity manifests: which measurements of a driver or firmware are right, signed as XML.

Laws: only a document without DTD, entities, comments and processing instructions is parsed; what is read is what was
digested. A manifest is a pure function of its bytes, so each is verified once and kept; its caller judges its dates.
Source: TCG RIM information model; ISO/IEC 19770-2; XML Signature 1.1 in the one form that NVIDIA uses.
"""

from __future__ import annotations

import binascii
import copy
import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384
from lxml import etree

from glasshouse.attestation.roots.nvidia.nvidia_certificates import Validity, certificate_of, check_chain, key_of
from glasshouse.errors import Code, FormatError

MAX_MANIFEST_BYTES = 256 * 1024
_SWID = "{http://standards.iso.org/iso/19770/-2/2015/schema.xsd}"
_HASH = "{http://www.w3.org/2001/04/xmlenc#sha384}Hash"
_DS = "{http://www.w3.org/2000/09/xmldsig#}"
_C14N = {"Algorithm": "http://www.w3.org/2006/12/xml-c14n11"}
# Declarations, comments, sections, instructions, references; and attributes that canonical forms treat apart.
_REFUSED = re.compile(rb"<[!?]|&|[ \t\r\n]xml:|[^\t\n\r -~]")
_SIGNED_INFO = [
    (f"{_DS}SignedInfo", {}),
    (f"{_DS}CanonicalizationMethod", _C14N),
    (f"{_DS}SignatureMethod", {"Algorithm": "http://www.w3.org/2001/04/xmldsig-more#ecdsa-sha384"}),
    (f"{_DS}Reference", {"URI": ""}),
    (f"{_DS}Transforms", {}),
    (f"{_DS}Transform", {"Algorithm": "http://www.w3.org/2000/09/xmldsig#enveloped-signature"}),
    (f"{_DS}Transform", _C14N),
    (f"{_DS}DigestMethod", {"Algorithm": "http://www.w3.org/2001/04/xmldsig-more#sha384"}),
    (f"{_DS}DigestValue", {}),
]
_DIGEST_BYTES = 48
_NUMBER = re.compile(r"0|[1-9][0-9]{0,2}")
_VALUE = re.compile(r"[0-9a-fA-F]{96}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceManifest:
    """A manifest whose signature held."""

    version: str  # of the driver or firmware
    active: Mapping[int, frozenset[bytes]]  # by index, the values that are right
    chain: tuple[bytes, ...]  # of its signer, DER, without the root
    validity: Validity  # of the chain


@lru_cache(maxsize=128)
def manifest_of(data: bytes, root: bytes) -> ReferenceManifest:
    """Verify and read a manifest.

    Args:
        root: certificate, DER, to which its signer has to lead.

    Raises:
        FormatError: whatever does not hold.
    """
    if len(data) > MAX_MANIFEST_BYTES or _REFUSED.search(data):
        raise FormatError(Code.SCHEMA, "a manifest of another form than NVIDIA's")
    parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False)
    try:
        document = etree.fromstring(data, parser)
        # The last child, with nothing behind it: taking it out leaves all other text as it is.
        signature = document[-1] if len(document) else document
        if document.tag != f"{_SWID}SoftwareIdentity" or signature.tag != f"{_DS}Signature" or signature.tail:
            raise FormatError(Code.SCHEMA, "a manifest that is not signed as a whole")
        info, value, chain = _signature(signature, root)
        digest, signed = binascii.a2b_base64(info[-1][-1].text or ""), _canonical(_alone(info))
        document.remove(signature)  # with it go the namespaces that it inherits
        if not hmac.compare_digest(digest, hashlib.sha384(_canonical(document)).digest()):
            raise FormatError(Code.SCHEMA, "a manifest that was changed")
        validity = check_chain(chain, root)
        numbers = (int.from_bytes(value[at : at + _DIGEST_BYTES], "big") for at in (0, _DIGEST_BYTES))
        key_of(certificate_of(chain[0])).verify(encode_dss_signature(*numbers), signed, ec.ECDSA(SHA384()))
        return ReferenceManifest(
            version=_one(document, "Meta").get("colloquialVersion", ""),
            active=_active(_one(document, "Payload")),
            chain=tuple(chain),
            validity=validity,
        )
    except InvalidSignature:
        raise FormatError(Code.SCHEMA, "a manifest that its certificate's key did not sign") from None
    except (etree.LxmlError, binascii.Error) as error:
        raise FormatError(Code.SCHEMA, f"no manifest: {error}") from None


def _signature(signature: etree._Element, root: bytes) -> tuple[etree._Element, bytes, list[bytes]]:
    """Return what was signed, the signature and the certificates of who signed, without the root."""
    if [each.tag for each in signature] != [f"{_DS}{name}" for name in ("SignedInfo", "SignatureValue", "KeyInfo")]:
        raise FormatError(Code.SCHEMA, "a signature of another form")
    info, value, keys = signature
    if [(each.tag, dict(each.attrib)) for each in info.iter()] != _SIGNED_INFO:
        raise FormatError(Code.SCHEMA, "a signature by other methods")
    raw = binascii.a2b_base64(value.text or "")
    chain = [binascii.a2b_base64(each.text or "") for each in keys.iter(f"{_DS}X509Certificate")]
    if len(raw) != 2 * _DIGEST_BYTES or not 3 <= len(chain) <= 5 or chain[-1] != root:
        raise FormatError(Code.SCHEMA, "a manifest that does not lead to NVIDIA's root")
    return info, raw, chain[:-1]


def _alone(element: etree._Element) -> etree._Element:
    """Return the element as a document that has all namespaces in its scope, as its canonical form has them."""
    alone = etree.Element(element.tag, nsmap=element.nsmap)
    alone.text = element.text
    alone.extend(copy.deepcopy(child) for child in element)
    return alone


def _canonical(element: etree._Element) -> bytes:
    # Version 1.1 differs from 1.0 in attributes `xml:…` alone, which are refused.
    canonical: bytes = etree.tostring(element, method="c14n", exclusive=False, with_comments=False)
    return canonical


def _one(document: etree._Element, name: str) -> etree._Element:
    found = document.findall(f"{_SWID}{name}")
    if len(found) != 1:
        raise FormatError(Code.SCHEMA, f"a manifest without one {name}")
    return found[0]


def _active(payload: etree._Element) -> dict[int, frozenset[bytes]]:
    found: dict[int, frozenset[bytes] | None] = {}
    for each in payload:
        index, count = (_NUMBER.fullmatch(each.get(name, "")) for name in ("index", "alternatives"))
        state = {"True": True, "False": False}.get(each.get("active", ""))
        if each.tag != f"{_SWID}Resource" or index is None or count is None or state is None or int(index[0]) in found:
            raise FormatError(Code.SCHEMA, "a measurement of another form, or two of one index")
        values = [each.get(f"{_HASH}{number}", "") for number in range(int(count[0]))]
        if not values or each.get("size") != str(_DIGEST_BYTES) or not all(map(_VALUE.fullmatch, values)):
            raise FormatError(Code.SCHEMA, "a measurement without its values")
        found[int(index[0])] = frozenset(map(bytes.fromhex, values)) if state else None
    return {index: values for index, values in found.items() if values is not None}
