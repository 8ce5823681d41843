"""What a deployment demands of a machine of Google's Confidential Space, and that it takes Google's word for it.

Source: spec/hardware-evidence.md, sections 4 and 7.6.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from glasshouse.errors import Code, FormatError
from glasshouse.wire.record import LEFT_OUT, Record, choice, digest, integer, items, text

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}")
_MODEL = re.compile(r"[A-Z][A-Z0-9_]{0,63}")


@dataclass(frozen=True, kw_only=True, slots=True)
class GcpPolicy(Record, name="policy.hardware.gcp"):
    """The object `gcp` of a policy: the launcher is Google's, and its token names the container's image."""

    # Said by the owner, and never by a default: nothing here is shown by hardware.
    accept_issuers_word: Annotated[bool, LEFT_OUT] = False
    chain: Annotated[str, choice(("workload",)), LEFT_OUT] = ""
    hwmodels: Annotated[tuple[str, ...], items(16, text(64, _MODEL), min_items=1)]
    image_digests: Annotated[tuple[bytes, ...], items(64, digest(), min_items=1)]  # of the container's manifest
    least_swversion: Annotated[int, integer(1, 999999)]  # of the machine's image, as 250800
    projects: Annotated[tuple[str, ...], items(64, text(64, _NAME)), LEFT_OUT] = ()
    zones: Annotated[tuple[str, ...], items(64, text(64, _NAME)), LEFT_OUT] = ()

    def __post_init__(self) -> None:
        if not self.chain:
            raise FormatError(Code.CHAIN_MISSING, "policy.hardware.gcp names no chain: workload")
        if not self.accept_issuers_word:
            raise FormatError(
                Code.POLICY_IMPOSSIBLE,
                "policy.hardware.gcp has no accept_issuers_word = true: what a token says is Google's word about "
                "Google's machine, which no hardware bears out, and who does not take it takes another kind",
            )
