"""What passes between agent and custodian, a packet each; nothing secret does.

The custodian sends its own process id (4 bytes, big endian), takes three descriptors with a packet of one byte, sends
the public HPKE key, takes one `Request`, answers `Opened` or `Failed`, and ends. The descriptors are the two regions of
secret memory that it fills, and a file in memory: where a leg goes on from a checkpoint, that has, by the time of the
request, the fronts of the parts of this machine's ranks in their order, and the checkpoint's header behind them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from glasshouse.errors import Code
from glasshouse.package.limits import MAX_BYTES, MAX_COUNT, CheckpointLimits, OutputLimits
from glasshouse.wire.crypto import HPKE_PUBLIC_BYTES
from glasshouse.wire.group import Group
from glasshouse.wire.lines.line_start import LineStart
from glasshouse.wire.record import LEFT_OUT, Id, Record, Sha256, integer, octets, one_of

PID_BYTES = 4
MAX_PACKET_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Request(Record, name="request", max_bytes=MAX_PACKET_BYTES):
    """The agent's one message."""

    deployment: Id
    group: Group | None  # of a job with ranks, whose secret is derived beside the asset keys
    info: Annotated[bytes, octets()]  # from the checked release, as `sealed_key`; without the line
    line: LineStart | None  # the EAR's
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
    checkpoints: Annotated[CheckpointLimits | None, LEFT_OUT] = None  # what a line's may be
    # What the checkpoints of this leg are sealed to, beside the owner's recipients; None for no line.
    resume_public: Annotated[bytes | None, octets(HPKE_PUBLIC_BYTES), LEFT_OUT] = None

    @property
    def limits(self) -> OutputLimits:
        """What the job may return."""
        return OutputLimits(count=self.max_outputs, bytes=self.max_output_bytes)


ANSWER = one_of("answer", Failed, Opened)
