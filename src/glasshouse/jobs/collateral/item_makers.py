"""Whether what was fetched is of its makers: by the appraisers' own checks and pinned roots, as far as they are here.

Law: this makes a bad pack known early, and no more; a gate checks each item again when it uses it. Intel's lists of
processors are left to it: their issuers are in evidence.
"""

from __future__ import annotations

from collections.abc import Mapping

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.collateral import Item, Pack
from glasshouse.attestation.roots.sev_snp.amd_certificates import check_revocation
from glasshouse.attestation.roots.sev_snp.amd_keys import PINNED
from glasshouse.errors import Code, FormatError
from glasshouse.jobs.collateral.vendor_services import OCSP, RIM, Certified
from glasshouse.wire.crypto import sha256

_AGE_S = 400 * 24 * 3600  # whether an item is too old for a policy is another question
_LISTS = {"intel/qe-identity": "enclaveIdentity", "intel/tcb/": "tcbInfo"}


class Makers:
    """Checks items one by one; what does not hold is in `wrong`.

    Args:
        found: items by name.
        certified: the certificates that OCSP responses are about.
    """

    def __init__(self, found: Mapping[str, bytes], certified: Certified, *, now_us: int) -> None:
        self._found, self._certified, self._now_us = found, certified, now_us
        self._pack = Pack(items=tuple(Item(name=name, data=found[name]) for name in sorted(found)))
        self.wrong: dict[str, CheckFailedError] = {}  # by name
        self.unchecked: set[str] = set()  # names, where what checks them is not installed
        for name in sorted(found):
            try:
                self._check(name)
            except CheckFailedError as error:
                self.wrong[name] = error
            except (FormatError, ValueError, TypeError, InvalidSignature) as error:
                message = f"{name} is not signed by its maker: {error or type(error).__name__}"
                self.wrong[name] = CheckFailedError("12", Code.COLLATERAL_INVALID, message)
            except ModuleNotFoundError:  # of the extra `hardware`
                self.unchecked.add(name)

    def _check(self, name: str) -> None:
        for product in PINNED:
            if name == f"amd/crl/{product.name}":
                check_revocation(self._pack, product, serials=(), now_us=self._now_us)
        if name.startswith("intel/") and f"{name}/chain" in self._found:
            self._check_intel(name)
        if name.startswith(RIM):
            self._check_manifest(name)
        if name in self._certified and name.startswith(OCSP):
            self._check_response(name)

    def _check_intel(self, name: str) -> None:
        from glasshouse.attestation.roots.tdx.tdx_evidence import INTEL_ROOT_SHA256
        from glasshouse.attestation.roots.tdx.tdx_signatures import Judge

        chain = x509.load_pem_x509_certificates(self._found[f"{name}/chain"])
        if sha256(chain[-1].public_bytes(Encoding.DER)) != INTEL_ROOT_SHA256:
            raise ValueError("it does not lead to Intel's root")
        judge = Judge(self._pack, root_sha256=INTEL_ROOT_SHA256, now_us=self._now_us)
        judge.use_root(chain[-1])
        for begin, member in _LISTS.items():
            if name.startswith(begin):
                judge.signed_list(name, member, age_s=_AGE_S)

    def _check_manifest(self, name: str) -> None:
        from glasshouse.attestation.roots.nvidia.nvidia_certificates import MANIFEST_ROOT_SHA256, check_dates
        from glasshouse.attestation.roots.nvidia.reference_manifest import manifest_of

        chain = manifest_of(self._found[name], MANIFEST_ROOT_SHA256).chain
        check_dates(chain, self._now_us, Code.COLLATERAL_EXPIRED, f"{name}, which no gate takes")

    def _check_response(self, name: str) -> None:
        from glasshouse.attestation.roots.nvidia.nvidia_certificates import check_good

        about, issuer = (one.public_bytes(Encoding.DER) for one in self._certified[name])
        check_good(about, issuer, pack=self._pack, now_us=self._now_us, max_age_s=_AGE_S)
