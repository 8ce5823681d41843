"""Which registers of a TPM count for anything, and which of them an image boots by.

Source: spec/hardware-evidence.md, sections 4 and 7.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, TypeAlias

from glasshouse.errors import Code, FormatError
from glasshouse.wire.record import digest, items, table, text

QUOTED_PCRS = (*range(10), *range(11, 16))
"""What a quote selects: neither IMA's 10 nor 16 to 23, which can be reset or extended by all."""

Registers: TypeAlias = Annotated[
    Mapping[str, tuple[bytes, ...]],
    table(24, text(2, re.compile("[0-9]|[1-9][0-9]")), items(64, digest(), min_items=1)),
]
"""Of registers of the bank sha256 the values that are accepted."""

_FIRMWARE = frozenset({0, 2, 4, 7})
_SYSTEMS = (frozenset({8, 9}), frozenset({11, 12, 13}), frozenset({9, 12}))


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
