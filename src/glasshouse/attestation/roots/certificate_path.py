"""The way from a key's certificate to a root: signatures, authority, uses, critical extensions and dates in one place.

Law: who may be a root is the caller's, and never the evidence's. How each kind uses it:

- `tpm`: the roots are the policy's, and an endorsement key's own use is looked at afterwards;
- `tdx`: the root travels, so that its digest is compared with the pinned one before; so are Intel's lists signed;
- `gcp`: the root travels too; the key that signs tokens has a certificate that names no use;
- `nvidia`: not at all: a node's twelve chains share their issuers, so that each signature is checked once and kept, by
  the same rules (`nvidia_certificates`);
- `sev-snp`: not at all, for AMD's authorities are pinned as keys, and its certificates have the serial number 0.

Source: RFC 5280, section 6, as `cryptography` implements it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from cryptography import x509
from cryptography.x509.verification import Criticality, ExtensionPolicy, PolicyBuilder, Store

from glasshouse.attestation.refusal import utc
from glasshouse.attestation.roots.x509_errors import X509_ERRORS
from glasshouse.errors import Code, FormatError

_Found = x509.BasicConstraints | x509.KeyUsage | None


def _issues(expected: bool) -> Callable[[object, object, _Found], None]:
    def check(_policy: object, _certificate: object, found: _Found) -> None:
        issues = found.key_cert_sign if isinstance(found, x509.KeyUsage) else found is not None and found.ca
        if issues is not expected:
            raise ValueError("an issuer that may not issue, or a key that may and should not")

    return check


_AUTHORITY = (
    ExtensionPolicy.permit_all()
    .require_present(x509.BasicConstraints, Criticality.AGNOSTIC, _issues(True))
    .require_present(x509.KeyUsage, Criticality.AGNOSTIC, _issues(True))
)
_ANY_END = ExtensionPolicy.permit_all().may_be_present(x509.BasicConstraints, Criticality.AGNOSTIC, _issues(False))
_END = _ANY_END.require_present(x509.KeyUsage, Criticality.AGNOSTIC, _issues(False))


def certificate_path(
    given: Sequence[x509.Certificate], roots: Sequence[x509.Certificate], now_us: int, *, names_use: bool = True
) -> tuple[tuple[x509.Certificate, ...], int]:
    """These certificates, all and in their order, lead to one of the roots, and the first one's key signs none.

    Args:
        given: from the end to the last below the root.
        roots: authorities that are trusted; an intermediate one may be.
        names_use: whether the first one has to have a key usage.

    Returns:
        The given and the root; when the first of them ends, µs, exclusive.

    Raises:
        FormatError: also where one is not valid now, the root too.
    """
    when = f"at {utc(now_us)}, by the verifier's clock,"
    try:
        verifier = (
            PolicyBuilder()
            .store(Store([*roots]))
            .time(datetime.fromtimestamp(now_us // 1_000_000, UTC))
            .max_chain_depth(len(given))
            .extension_policies(ca_policy=_AUTHORITY, ee_policy=_END if names_use else _ANY_END)
            .build_client_verifier()
        )
        path = tuple(verifier.verify(given[0], list(given[1:])).chain)
    except X509_ERRORS as error:
        # Its text may have names that a stranger wrote.
        why = f"no way that holds {when} from its certificate to a root ({type(error).__name__})"
        raise FormatError(Code.SCHEMA, why) from None
    end_us = min(int(one.not_valid_after_utc.timestamp()) for one in path) * 1_000_000
    if path[:-1] != tuple(given) or now_us >= end_us:
        raise FormatError(Code.SCHEMA, f"a certificate that is over {when} or is not on the way to a root")
    return path, min(end_us, 2**53 - 1)
