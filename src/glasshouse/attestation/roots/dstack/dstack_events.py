"""The blob of the kind `dstack`: a quote, and the events that extended RTMR3.

Law: every byte of an event is in its digest, which is made here. Source: spec/hardware-evidence.md, section 7.3.1.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from glasshouse.attestation.roots.kinds import MAX_BLOB_BYTES
from glasshouse.attestation.roots.tdx.tdx_quote import MAX_QUOTE_BYTES
from glasshouse.wire.canonical import encode
from glasshouse.wire.record import Record, integer, items, octets, text

_EVENT_TYPE = 0x08000001
# A digest of version 1 is over `type:name:payload`: with a colon in it a name could be read in two ways.
_NAME = re.compile(r"[!-9;-~ ]{1,128}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DstackEvent(Record, name="dstack.events"):
    """An event that extended RTMR3."""

    name: Annotated[str, text(128, _NAME)]
    payload: Annotated[bytes, octets(max_length=64 * 1024)]
    version: Annotated[int, integer(1, 2)]

    @property
    def digest(self) -> bytes:
        """What the register was extended by, 48 bytes."""
        if self.version == 1:
            preimage = b"%s:%s:%s" % (_EVENT_TYPE.to_bytes(4, "little"), self.name.encode(), self.payload)
        else:
            preimage = encode({"name": self.name, "payload": self.payload.hex(), "type": _EVENT_TYPE})
        return hashlib.sha384(preimage).digest()


@dataclass(frozen=True, kw_only=True, slots=True)
class DstackBlob(Record, name="dstack", max_bytes=MAX_BLOB_BYTES):
    """The blob."""

    events: Annotated[tuple[DstackEvent, ...], items(512)]
    quote: Annotated[bytes, octets(max_length=MAX_QUOTE_BYTES)]


def replay(events: Sequence[DstackEvent]) -> bytes:
    """Return the register that these events come to, 48 bytes."""
    register = bytes(48)
    for event in events:
        register = hashlib.sha384(register + event.digest).digest()
    return register
