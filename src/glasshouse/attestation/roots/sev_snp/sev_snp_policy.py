"""What a deployment demands of SEV-SNP: how new the firmware is, how the machine was launched, and what with.

Source: spec/hardware-evidence.md, sections 4 and 7.2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from glasshouse.attestation.roots.sev_snp.amd_keys import PINNED
from glasshouse.errors import Code, FormatError
from glasshouse.wire.record import LEFT_OUT, Record, choice, digest, integer, items, table, text

GUEST_BITS: Mapping[str, int] = {
    "aes-256-xts": 22,
    "ciphertext-hiding": 24,
    "page-swap-disabled": 25,
    "rapl-disabled": 23,
    "single-socket": 20,
}
"""What a guest policy may demand of a machine beside what always holds, by the bit that does."""

_VERSION = re.compile(r"\d{1,3}(\.\d{1,3}){1,2}", re.ASCII)
_PRODUCTS = [product.name for product in PINNED]


@dataclass(frozen=True, kw_only=True, slots=True)
class TcbFloor(Record, name="policy.hardware.sev-snp.tcb"):
    """The least security version of each part of the firmware."""

    bootloader: Annotated[int, integer(0, 255)]
    fmc: Annotated[int, integer(0, 255), LEFT_OUT] = 0  # Turin alone has it
    microcode: Annotated[int, integer(0, 255)]
    snp: Annotated[int, integer(0, 255)]
    tee: Annotated[int, integer(0, 255)]


@dataclass(frozen=True, kw_only=True, slots=True)
class SevSnpPolicy(Record, name="policy.hardware.sev-snp"):
    """The object `sev-snp` of a policy.

    Law: it names what was measured at launch, or the key by which that is signed, and how new the firmware is; there is
    no default for either.
    """

    author_keys: Annotated[tuple[bytes, ...], items(16, digest(48)), LEFT_OUT] = ()  # SHA-384, as the report has it
    chain: Annotated[str, choice(("launch",)), LEFT_OUT] = ""
    chips: Annotated[tuple[bytes, ...], items(256, digest(64)), LEFT_OUT] = ()  # without one, each chip of AMD's
    # Clouds whose key may stand for the chip's (VLEK), as its certificate names them; without one, none.
    csps: Annotated[tuple[str, ...], items(16, text(128)), LEFT_OUT] = ()
    host_data: Annotated[tuple[bytes, ...], items(64, digest()), LEFT_OUT] = ()
    id_keys: Annotated[tuple[bytes, ...], items(16, digest(48)), LEFT_OUT] = ()  # SHA-384, as the report has it
    least_abi: Annotated[str, text(7, _VERSION), LEFT_OUT] = "0.0"  # that the machine was launched to need
    least_firmware: Annotated[str, text(11, _VERSION), LEFT_OUT] = "0.0.0"  # major, minor, build
    least_guest_svn: Annotated[int, integer(0, 2**32 - 1), LEFT_OUT] = 0
    measurements: Annotated[tuple[bytes, ...], items(64, digest(48)), LEFT_OUT] = ()
    mitigations: Annotated[int, LEFT_OUT] = 0  # bits, of the vectors that a report of version 5 has
    requires: Annotated[tuple[str, ...], items(len(GUEST_BITS), choice(GUEST_BITS)), LEFT_OUT] = ()
    smt: Annotated[bool, LEFT_OUT] = False  # whether cores may be shared with others' threads
    tcb: Annotated[Mapping[str, TcbFloor], table(len(_PRODUCTS), choice(_PRODUCTS), min_items=1)]  # by product
    vmpl: Annotated[int, integer(0, 3), LEFT_OUT] = 0  # exactly

    def __post_init__(self) -> None:
        if not self.chain or not (self.measurements or self.id_keys or self.author_keys):
            # The host chooses HOST_DATA, and with it whatever firmware it likes: by itself it leads nowhere.
            raise FormatError(
                Code.CHAIN_MISSING,
                "policy.hardware.sev-snp names no chain: launch, with measurements, id_keys or author_keys",
            )
        if any(not any(key) for key in (*self.id_keys, *self.author_keys)):
            raise FormatError(Code.POLICY_IMPOSSIBLE, "policy.hardware.sev-snp has zeros for a key: that is no key")

    @property
    def needed(self) -> tuple[str, ...]:
        """The items of a collateral pack that its appraisal reads."""
        return tuple(f"amd/crl/{product}" for product in self.tcb)


def version_of(text: str) -> tuple[int, ...]:
    """Return the numbers of a version."""
    return tuple(map(int, text.split(".")))
