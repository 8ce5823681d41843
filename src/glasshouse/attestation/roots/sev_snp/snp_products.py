"""AMD's products with SEV-SNP: which processors they are, and where their security versions stand.

Source: spec/hardware-evidence.md, section 7.2; AMD, 57230, 3.
"""

from __future__ import annotations

from collections.abc import Mapping

_TCB = {"bootloader": 0, "tee": 1, "snp": 6, "microcode": 7}
_LATER_TCB = {"fmc": 0, "bootloader": 1, "tee": 2, "snp": 3, "microcode": 7}
# Pages of CPUID that AMD gave to each product: family, and models.
_PRODUCTS = (
    ("Milan", 0x19, 0x00, 0x0F),
    ("Genoa", 0x19, 0x10, 0x1F),
    ("Genoa", 0x19, 0xA0, 0xAF),
    ("Turin", 0x1A, 0x00, 0x11),
)


def product_of(family: int, model: int) -> str:
    """Return the product that a processor is one of; empty for another."""
    return next((name for name, of, low, high in _PRODUCTS if family == of and low <= model <= high), "")


def parts_of(product: str) -> Mapping[str, int]:
    """Return the place of each part's security version, in the eight bytes of a TCB."""
    return _LATER_TCB if product == "Turin" else _TCB
