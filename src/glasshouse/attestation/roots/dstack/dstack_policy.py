"""What a deployment demands of a machine of dstack: its images, the compose files, and who has its disk's key.

Source: spec/hardware-evidence.md, sections 4 and 7.3.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from glasshouse.attestation.roots.tdx.tdx_policy import TdxTerms
from glasshouse.errors import Code, FormatError
from glasshouse.wire.record import LEFT_OUT, choice, digest, items, text


@dataclass(frozen=True, kw_only=True, slots=True)
class DstackPolicy(TdxTerms, name="policy.hardware.dstack"):
    """The object `dstack` of a policy: the launcher is measured, and its event names the compose file."""

    chain: Annotated[str, choice(("workload",)), LEFT_OUT] = ""
    compose_hashes: Annotated[tuple[bytes, ...], items(64, digest(), min_items=1)]  # SHA-256 of app-compose.json
    # Payloads of the event `key-provider`: who has the disk's key can change a container's files beneath it.
    key_providers: Annotated[tuple[str, ...], items(16, text(1024), min_items=1)]

    def __post_init__(self) -> None:
        if not self.chain:
            raise FormatError(Code.CHAIN_MISSING, "policy.hardware.dstack names no chain: workload")
