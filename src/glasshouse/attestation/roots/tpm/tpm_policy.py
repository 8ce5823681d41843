"""What a deployment demands of a TPM: whose keys count, and which values of its registers lead to the runtime.

Source: spec/hardware-evidence.md, sections 4 and 7.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from cryptography import x509

from glasshouse.attestation.roots.tpm.tpm_blob import QUOTED_PCRS
from glasshouse.errors import Code, FormatError
from glasshouse.wire.record import LEFT_OUT, Record, choice, digest, items, octets, table, text

Registers: TypeAlias = Annotated[
    Mapping[str, tuple[bytes, ...]],
    table(24, text(2, re.compile("[0-9]|[1-9][0-9]")), items(64, digest(), min_items=1)),
]
"""Of registers of the bank sha256 the values that are accepted."""

_NAME = re.compile("000b[0-9a-f]{64}|000c[0-9a-f]{96}")
_FIRMWARE = frozenset({0, 2, 4, 7})
_SYSTEMS = (frozenset({8, 9}), frozenset({11, 12, 13}), frozenset({9, 12}))


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
            except ValueError as error:
                message = f"policy.hardware.tpm.ek_roots has what is no certificate in DER: {error}"
                raise FormatError(Code.POLICY_IMPOSSIBLE, message) from None


def check_pcrs(where: str, pcrs: Mapping[str, tuple[bytes, ...]]) -> None:
    """Reference values lead from the firmware to the runtime's image.

    Raises:
        FormatError: `policy-impossible` for a register that anyone can extend or reset, `chain-missing` where what
            boots an image is not among them.
    """
    named = set(map(int, pcrs))
    if not named <= set(QUOTED_PCRS):
        wrong = ", ".join(map(str, sorted(named - set(QUOTED_PCRS))))
        raise FormatError(
            Code.POLICY_IMPOSSIBLE, f"{where}.pcrs names {wrong}, which all on the machine can extend or reset"
        )
    if not named >= _FIRMWARE or not any(named >= system for system in _SYSTEMS):
        raise FormatError(
            Code.CHAIN_MISSING,
            f"{where}.pcrs must have 0, 2, 4, 7, and what measures kernel, initrd and command line: "
            "8 and 9 (GRUB), 11, 12 and 13 (unified kernel image) or 9 and 12 (systemd-boot)",
        )
