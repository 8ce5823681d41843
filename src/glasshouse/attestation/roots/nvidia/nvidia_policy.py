"""What a deployment demands of its GPUs: how many, and which drivers and firmware, by NVIDIA's manifests of them.

Source: spec/hardware-evidence.md, section 7.5.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from glasshouse.wire.record import LEFT_OUT, Record, integer, items, text

MAX_GPUS = 64
MAX_SWITCHES = 16
_MANIFEST = re.compile(r"NV_(GPU_DRIVER|GPU_CC_DRIVER|GPU_VBIOS|SWITCH_BIOS)_[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class NvidiaPolicy(Record, name="policy.hardware.nvidia"):
    """The object `nvidia` of a policy; what is debugged is never accepted, so no member speaks of it."""

    # Whether OCSP has to call each device itself good too, and not just those that vouch for it.
    device_ocsp: bool
    gpus: Annotated[int, integer(1, MAX_GPUS)]  # how many, no more and no fewer
    # Names of the drivers and firmware that are accepted, which say the chip too.
    manifests: Annotated[tuple[str, ...], items(64, text(96, _MANIFEST), min_items=1)]
    switches: Annotated[int, integer(0, MAX_SWITCHES), LEFT_OUT] = 0  # as `gpus`
    # Indices that may be measured though no manifest has them, excepted by number.
    unlisted: Annotated[tuple[int, ...], items(64, integer(0, 254)), LEFT_OUT] = ()

    @property
    def needed(self) -> tuple[str, ...]:
        """The items of a pack that hold these manifests."""
        return tuple(f"nvidia/rim/{name}" for name in self.manifests)
