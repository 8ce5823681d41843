"""NVIDIA's reference integrity manifests: which measurements of a driver or firmware are right, signed as XML.

Laws: only a document without DTD, entities, comments and processing instructions is parsed; what is read is what was
digested. A manifest is a pure function of its bytes, so each is verified once and kept; its caller judges its dates.
Source: TCG RIM information model; ISO/IEC 19770-2; XML Signature 1.1 in the one form that NVIDIA uses.
"""

from __future__ import annotations

import binascii
import copy
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from lxml import etree

from glasshouse.attestation.roots.nvidia.nvidia_certificates import check_chain
from glasshouse.attestation.roots.nvidia.spdm_report import is_signed
from glasshouse.attestation.roots.refusing import require
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
_DOCUMENT = f"{_SWID}SoftwareIdentity"
_SIGNATURE = [f"{_DS}SignedInfo", f"{_DS}SignatureValue", f"{_DS}KeyInfo"]
_NUMBER = re.compile(r"0|[1-9][0-9]{0,2}")
_VALUE = re.compile(r"[0-9a-fA-F]{96}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceManifest:
    """A manifest whose signature held."""

    about: tuple[str, str, str]  # GPU or SWITCH, its chip, and the version of the driver or firmware
    active: Mapping[int, frozenset[bytes]]  # by index, the values that are right
    chain: tuple[bytes, ...]  # of its signer, DER, with the root


@lru_cache(maxsize=128)
def manifest_of(data: bytes, root_sha256: bytes) -> ReferenceManifest:
    """Verify and read a manifest.

    Args:
        root_sha256: of the certificate, DER, to which its signer has to lead.

    Raises:
        FormatError: whatever does not hold.
    """
    is_plain = len(data) <= MAX_MANIFEST_BYTES and not _REFUSED.search(data)
    require(is_plain, "a manifest of another form than NVIDIA's")
    try:
        parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False)
        document = etree.fromstring(data, parser)
        # The last child, with nothing behind it: taking it out leaves all other text as it is.
        signature = document[-1] if len(document) else document
        is_whole = document.tag == _DOCUMENT and not signature.tail
        require(is_whole and [each.tag for each in signature] == _SIGNATURE, "a manifest not signed as a whole")
        info, value, keys = signature
        methods = [(each.tag, dict(each.attrib)) for each in info.iter()]
        require(methods == _SIGNED_INFO, "a manifest that is signed by other methods")
        digest, signed, raw = _base64(info[-1][-1]), _canonical(_alone(info)), _base64(value)
        chain = tuple(_base64(each) for each in keys.iter(f"{_DS}X509Certificate"))
        document.remove(signature)  # with it go the namespaces that it inherits
        is_same = digest == hashlib.sha384(_canonical(document)).digest()
        require(bool(chain) and is_same, "a manifest that was changed")
        key = check_chain(chain, root_sha256).key
        require(is_signed(signed, key, raw), "a manifest that its certificate's key did not sign")
        (meta,), (payload,) = (document.findall(f"{_SWID}{name}") for name in ("Meta", "Payload"))
        edition, product, version = (meta.get(name, "") for name in ("edition", "product", "colloquialVersion"))
        require(document.get("name") == product, "a manifest of two products")
        return ReferenceManifest(about=(edition, product, version.upper()), active=_active(payload), chain=chain)
    except (etree.LxmlError, ValueError) as error:
        raise FormatError(Code.SCHEMA, f"a manifest that cannot be read: {error}") from None


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


def _active(payload: etree._Element) -> dict[int, frozenset[bytes]]:
    found: dict[int, frozenset[bytes] | None] = {}
    for each in payload:
        index, count = (_NUMBER.fullmatch(each.get(name, "")) for name in ("index", "alternatives"))
        if each.tag != f"{_SWID}Resource" or index is None or count is None or int(index[0]) in found:
            raise FormatError(Code.SCHEMA, "a measurement of another form, or two of one index")
        values = [each.get(f"{_HASH}{number}", "") for number in range(int(count[0]))]
        state = {"True": True, "False": False}.get(each.get("active"))
        has_values = bool(values) and all(map(_VALUE.fullmatch, values)) and each.get("size") == "48"
        require(has_values and state is not None, "a measurement without its values")
        found[int(index[0])] = frozenset(map(bytes.fromhex, values)) if state else None
    return {index: values for index, values in found.items() if values is not None}


def _base64(element: etree._Element) -> bytes:
    return binascii.a2b_base64(element.text or "")
