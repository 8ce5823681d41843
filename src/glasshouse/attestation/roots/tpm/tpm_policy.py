"""What a deployment demands of a TPM: whose keys count, and which values of its registers lead to the runtime.

Source: spec/hardware-evidence.md, sections 4 and 7.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from cryptography import x509

from glasshouse.attestation.roots.x509_errors import X509_ERRORS
from glasshouse.errors import Code, FormatError
from glasshouse.wire.record import LEFT_OUT, Record, choice, digest, items, octets, table, text

QUOTED_PCRS = (*range(10), *range(11, 16))
"""What a quote selects: neither IMA's 10 nor 16 to 23, which can be reset or extended by all."""

Registers: TypeAlias = Annotated[
    Mapping[str, tuple[bytes, ...]],
    table(24, text(2, re.compile("[0-9]|[1-9][0-9]")), items(64, digest(), min_items=1)),
]
"""Of registers of the bank sha256 the values that are accepted."""

_FIRMWARE = frozenset({0, 2, 4, 7})
_SYSTEMS = (frozenset({8, 9}), frozenset({11, 12, 13}), frozenset({9, 12}))
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
        check_image("policy.hardware.tpm", self.chain, self.pcrs)
        if not self.aks and not self.ek_roots:
            raise FormatError(Code.POLICY_IMPOSSIBLE, "policy.hardware.tpm names no TPM: give ek_roots or aks")
        try:
            self.roots()
        except X509_ERRORS as error:
            message = f"policy.hardware.tpm.ek_roots has what is no certificate in DER: {error}"
            raise FormatError(Code.POLICY_IMPOSSIBLE, message) from None

    def roots(self) -> list[x509.Certificate]:
        """Return the authorities."""
        return [x509.load_der_x509_certificate(root) for root in self.ek_roots]


def check_image(where: str, chain: str, pcrs: Mapping[str, tuple[bytes, ...]]) -> None:
    """The chain is `image`, and reference values lead from the firmware to it.

    Raises:
        FormatError: `policy-impossible` for a register that anyone can extend or reset, `chain-missing` without a
            chain, or where what boots an image is not among them.
    """
    if not chain:
        raise FormatError(Code.CHAIN_MISSING, f"{where} names no chain: image")
    named = set(map(int, pcrs))
    if wrong := sorted(named.difference(QUOTED_PCRS)):
        message = f"{where}.pcrs names {', '.join(map(str, wrong))}, which all on the machine can extend or reset"
        raise FormatError(Code.POLICY_IMPOSSIBLE, message)
    if not named >= _FIRMWARE or not any(named >= system for system in _SYSTEMS):
        raise FormatError(
            Code.CHAIN_MISSING,
            f"{where}.pcrs must have 0, 2, 4, 7, and what measures kernel, initrd and command line: "
            "8 and 9 (GRUB), 11, 12 and 13 (unified kernel image) or 9 and 12 (systemd-boot)",
        )
