"""What a deployment demands of a TPM: whose keys count, and which values of its registers lead to the runtime.

Source: spec/hardware-evidence.md, sections 4 and 7.1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from cryptography import x509

from glasshouse.attestation.roots.tpm.tpm_registers import Registers, check_pcrs
from glasshouse.attestation.roots.x509_errors import X509_ERRORS
from glasshouse.errors import Code, FormatError
from glasshouse.wire.record import LEFT_OUT, Record, choice, items, octets, text

_NAME = re.compile("000b[0-9a-f]{64}|000c[0-9a-f]{96}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TpmPolicy(Record, name="policy.hardware.tpm"):
    """The object `tpm` of a policy.

    Law: it names whose TPM counts, and a chain from firmware to command line; there is no default for either.
    """

    # Names of attestation keys that need no endorsement, as TPM2_ReadPublic gives them.
    aks: Annotated[tuple[str, ...], items(256, text(100, _NAME)), LEFT_OUT] = ()
    chain: Annotated[str, choice(("image",)), LEFT_OUT] = ""
    # Certificates, DER, to which an endorsement key's certificate has to lead.
    ek_roots: Annotated[tuple[bytes, ...], items(16, octets(max_length=4096)), LEFT_OUT] = ()
    pcrs: Registers

    def __post_init__(self) -> None:
        if not self.chain:
            raise FormatError(Code.CHAIN_MISSING, "policy.hardware.tpm names no chain: image")
        check_pcrs("policy.hardware.tpm", self.pcrs)
        if not self.aks and not self.ek_roots:
            raise FormatError(Code.POLICY_IMPOSSIBLE, "policy.hardware.tpm names no TPM: give ek_roots or aks")
        for root in self.ek_roots:
            try:
                x509.load_der_x509_certificate(root)
            except X509_ERRORS as error:
                message = f"policy.hardware.tpm.ek_roots has what is no certificate in DER: {error}"
                raise FormatError(Code.POLICY_IMPOSSIBLE, message) from None
