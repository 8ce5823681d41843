"""The dates inside an item of a collateral pack, as its maker signed them; no signature is checked here."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from cryptography import x509
from cryptography.x509 import ocsp

from glasshouse.attestation.roots.hardware_policy import MaxAges
from glasshouse.errors import Code, FormatError
from glasshouse.jobs.collateral.vendor_services import OCSP, RIM, signers

_YEARLY = ("amd/crl/", "intel/root-crl")  # are signed about once a year: their own end counts, and no greatest age
_SIGNED = {"intel/tcb/": "tcbInfo", "intel/qe-identity": "enclaveIdentity"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Dates:
    """From when to when an item may be used, in microseconds."""

    issued_us: int
    expires_us: int  # exclusive
    ages: str = ""  # the class in a policy's greatest ages: a field of `MaxAges`; empty where none applies
    evaluation: int | None = None  # Intel's number of what a list is of

    def until(self, ages: MaxAges) -> int:
        """Return until when a policy accepts it, exclusive."""
        if not self.ages:
            return self.expires_us
        most_s: int = getattr(ages, self.ages)
        return min(self.expires_us, self.issued_us + most_s * 1_000_000)


def dates_of(name: str, data: bytes) -> Dates:
    """Read the dates of an item; raises `FormatError`: `collateral-invalid` for what is not what its name says."""
    try:
        return _dates_of(name, data)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, x509.ExtensionNotFound) as error:
        raise FormatError(Code.COLLATERAL_INVALID, f"{name} is not what its name says: {error}") from None


def _dates_of(name: str, data: bytes) -> Dates:
    if name.endswith("/chain"):
        return _of_certificates(x509.load_pem_x509_certificates(data))
    if name.startswith(RIM):
        return _of_certificates(signers(data))
    if name.startswith(OCSP):
        response = ocsp.load_der_ocsp_response(data)
        if response.response_status is not ocsp.OCSPResponseStatus.SUCCESSFUL:
            raise ValueError(f"the service answered {response.response_status.name.lower()}")
        return _dates(response.this_update_utc, response.next_update_utc, "ocsp")
    for begin, member in _SIGNED.items():
        if name.startswith(begin):
            signed: dict[str, Any] = json.loads(data)[member]
            issued, expires = (datetime.fromisoformat(signed[date]) for date in ("issueDate", "nextUpdate"))
            return replace(_dates(issued, expires, "tcb"), evaluation=int(signed["tcbEvaluationDataNumber"]))
    revoked = x509.load_der_x509_crl(data)
    return _dates(revoked.last_update_utc, revoked.next_update_utc, "" if name.startswith(_YEARLY) else "crl")


def _of_certificates(found: list[x509.Certificate]) -> Dates:
    if not found:
        raise ValueError("it has no certificate")
    return _dates(max(one.not_valid_before_utc for one in found), min(one.not_valid_after_utc for one in found), "")


def _dates(issued: datetime, expires: datetime | None, ages: str) -> Dates:
    if expires is None:
        raise ValueError("it does not say until when it holds")
    return Dates(issued_us=_us(issued), expires_us=_us(expires), ages=ages)


def _us(moment: datetime) -> int:
    return int(moment.astimezone(UTC).timestamp()) * 1_000_000
