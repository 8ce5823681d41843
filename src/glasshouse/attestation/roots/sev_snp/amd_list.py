"""AMD's revocation list of a product, which its ARK signs.

It names no certificate of one chip: old firmware is refused by its security versions. Source: RFC 5280, section 5.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from cryptography import x509

from glasshouse.attestation.roots.collateral import Pack, check_current
from glasshouse.attestation.roots.sev_snp.amd_keys import Product
from glasshouse.attestation.roots.sev_snp.snp_checks import refused
from glasshouse.attestation.roots.x509_errors import X509_ERRORS
from glasshouse.errors import Code

_MAX_AGE_S = 400 * 24 * 3600  # they are signed once a year: their own end counts, not the policy's greatest age
_MAX_BYTES = 64 * 1024


def check_revocation(collateral: Pack, product: Product, *, serials: Collection[int], now_us: int) -> int:
    """None of these certificates is on the product's list.

    Returns:
        When the list ends, µs, exclusive.

    Raises:
        CheckFailedError: `collateral-missing`, `collateral-invalid`, `collateral-expired` or `hardware-revoked`.
    """
    name = f"amd/crl/{product.name}"
    data = collateral.named(name)
    try:
        found = _read(data, product) if len(data) <= _MAX_BYTES else None
    except X509_ERRORS:
        found = None
    if found is None:
        raise refused(Code.COLLATERAL_INVALID, f"{name} is not a complete list that {product.ark.name} signed")
    issued_us, ends_us, revoked = found
    check_current(name, issued_us=issued_us, expires_us=ends_us, now_us=now_us, max_age_s=_MAX_AGE_S)
    for serial in serials:
        if serial in revoked:
            raise refused(Code.HARDWARE_REVOKED, f"{name} revokes the certificate of number {serial}")
    return min(ends_us, issued_us + _MAX_AGE_S * 1_000_000)


def _read(data: bytes, product: Product) -> tuple[int, int, set[int]] | None:
    found = x509.load_der_x509_crl(data)
    # What stands before the signature says how many of its last bits are none, and is not signed itself.
    if not data.endswith(b"\0" + found.signature) or not found.is_signature_valid(product.ark.key):
        return None
    end = found.next_update_utc
    # A critical extension narrows what the list is about, or whose certificates it names.
    if end is None or any(one.critical for one in found.extensions):
        return None
    return _us(found.last_update_utc), _us(end), {entry.serial_number for entry in found}


def _us(time: datetime) -> int:
    return int(time.timestamp()) * 1_000_000
