"""The kept blob of a software TPM, appraised as its case says: what altered forms of it are compared with."""

from __future__ import annotations

from glasshouse.attestation.roots.appraised import Appraised
from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.collateral import EMPTY
from glasshouse.attestation.roots.tpm.tpm_blob import TpmBlob
from glasshouse.attestation.roots.tpm.tpm_evidence import appraise
from glasshouse.errors import FormatError
from tools.hardware_cases import FOLDER, hardware_cases

__all__ = ["AK", "BLOB", "EK", "KEPT", "appraise_kept", "as_other_keys"]

CASE = next(case for case in hardware_cases() if case.name == "tpm-swtpm")
KEPT, AK, EK = ((FOLDER / "tpm" / name).read_bytes() for name in ("swtpm.json", "swtpm-ak.bin", "swtpm-ek.der"))
BLOB = TpmBlob.parse(KEPT)
_BOUND = CASE.bound or b""


def appraise_kept(data: bytes) -> Appraised:
    """Appraise what should be the kept blob, by the keys that its challenge request named."""
    return _appraise(data, AK, EK)


def as_other_keys(data: bytes) -> Appraised:
    """Appraise a blob by a challenge request that named the keys in it: those of an attacker."""
    try:
        blob = TpmBlob.parse(data)
    except FormatError:
        return appraise_kept(data)
    return _appraise(data, blob.ak, blob.ek)


def _appraise(data: bytes, ak: bytes, ek: bytes) -> Appraised:
    bound = Bound(composite=_BOUND[:32], secret=_BOUND[32:], ak=ak, ek=ek)
    return appraise(data, bound=bound, now_us=CASE.now_us, collateral=EMPTY, policy=CASE.policy)
