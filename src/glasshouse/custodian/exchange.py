"""What passes between agent and custodian, a packet each; nothing secret does.

The custodian sends its own process id (4 bytes, big endian), takes the descriptors of the two regions of secret memory
that it fills, with a packet of one byte, sends the public HPKE key, takes one `Request`, answers `Opened` or `Failed`,
and ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from glasshouse.errors import Code
from glasshouse.package.limits import MAX_BYTES, MAX_COUNT, OutputLimits
from glasshouse.wire.group import Group
from glasshouse.wire.record import Record, Sha256, integer, octets, one_of

PID_BYTES = 4
MAX_PACKET_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Request(Record, name="request", max_bytes=MAX_PACKET_BYTES):
    """The agent's one message."""

    group: Group | None  # of a job with ranks, whose secret is derived beside the asset keys
    info: Annotated[bytes, octets()]  # from the checked release, as `sealed_key`
    manifest_sha256: Sha256  # of the package that the release is for
    sealed_key: Annotated[bytes, octets()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed(Record, name="custodian", constants={"answer": "failed"}):
    """The answer where the release did not open."""

    code: Code


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened(Record, name="custodian", constants={"answer": "opened"}):
    """What the agent learns of an opened release."""

    assets: int  # how many
    patterns: int
    max_outputs: Annotated[int, integer(0, MAX_COUNT)]  # what the job may return
    max_output_bytes: Annotated[int, integer(0, MAX_BYTES)]

    @property
    def limits(self) -> OutputLimits:
        """What the job may return."""
        return OutputLimits(count=self.max_outputs, bytes=self.max_output_bytes)


ANSWER = one_of("answer", Failed, Opened)
