"""What a run's machine sends to a gate that keeps it: a part of a file, and the line of the run's log that names it.

A countersigned head covers that line: a sender needs no key of the run, and can bring no other file than the run has.
Source: spec/owner-api.md section 7.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from glasshouse.errors import Code, FormatError, RefusedError
from glasshouse.evidence.events import MAX_EVENT_BYTES, Event, EventType
from glasshouse.evidence.heads import (
    MAX_COUNTERSIGNED_HEAD_BYTES,
    CountersignedHead,
    Head,
    Proof,
    claimed_in,
    refusal_of,
)
from glasshouse.evidence.receipt import MAX_BUNDLE_BYTES
from glasshouse.wire.canonical import Codec, decode, encode
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.merkle import leaf_hash, verify_inclusion
from glasshouse.wire.record import Member, Record, Sha256, integer, octets, text
from glasshouse.wire.states import State

MAX_STORE_BYTES = 256 * 1024
MAX_PART_BYTES = 176 * 1024
LOG_NAME = "events.log"
HEADS_NAME = "heads.log"
RECEIPT_NAME = "receipt.json"
_CLOSING = (LOG_NAME, HEADS_NAME, RECEIPT_NAME)
_LINE_BYTES = {LOG_NAME: MAX_EVENT_BYTES + 1, HEADS_NAME: MAX_COUNTERSIGNED_HEAD_BYTES + 1}  # of one event, at most
_SEALED = re.compile(r"(outputs|log)/([0-9]{4,6})\.sealed")
_NAMED_BY = {"outputs": EventType.OUTPUT, "log": EventType.SEGMENT}
ANY_NAME = re.compile(rf"{_SEALED.pattern}|{'|'.join(map(re.escape, _CLOSING))}")


_EVENT = Codec(
    lambda value, _where: Event.parse(encode(value)), lambda event: decode(event.encode(), max_bytes=MAX_EVENT_BYTES)
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPart(Record, name="part of a file", max_bytes=MAX_STORE_BYTES, max_elements=256):
    """The body of ``POST /v1/store``."""

    name: Annotated[str, text(pattern=ANY_NAME)]  # of the whole file, as size and digest
    size: Annotated[int, integer(1), Member("bytes")]
    sha256: Sha256
    start: Annotated[int, Member("from")]  # the place of the part's first byte in the file
    data: Annotated[bytes, octets(max_length=MAX_PART_BYTES)]  # may be empty
    event: Annotated[Event, _EVENT]  # the line of the log that names the file
    head: Envelope  # a countersigned head that covers it
    proof: Proof  # its inclusion in the head's tree

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview, **apart: Any) -> StoredPart:
        """Make check 1; no signature is looked at.

        Raises:
            RefusedError: `message-too-large` or `message-invalid`.
        """
        try:
            part = super(StoredPart, cls).parse(data, **apart)
            if part.start + len(part.data) > part.size:
                raise FormatError(Code.SCHEMA, "a part behind the end of its file")
            if part.name == RECEIPT_NAME and part.size > MAX_BUNDLE_BYTES:
                raise FormatError(Code.TOO_LARGE, f"a bundle of more than {MAX_BUNDLE_BYTES} bytes")
        except FormatError as error:
            raise refusal_of(error) from None
        return part

    def claimed(self, broker_public: bytes) -> tuple[str, str]:
        """Make the first half of check 2: return the run, and the key id of its runtime, that the head names.

        Raises:
            RefusedError: `run-unknown`: it is no head that this broker countersigned.
        """
        try:
            head, signer = claimed_in(self.head, broker_public)
            return head.run_id, signer
        except FormatError:
            raise _unknown() from None

    def check(self, *, run_id: str, broker_public: bytes, evidence_public: bytes) -> Head:
        """Make the second half of check 2, and checks 3 and 4: the run has this file, by its own log.

        Args:
            run_id: the run of the record that the evidence key belongs to.
            evidence_public: the key that the run was released to.

        Raises:
            RefusedError: `run-unknown` or `head-inconsistent`.
        """
        try:
            head = CountersignedHead.from_envelope(
                self.head, broker_public=broker_public, evidence_public=evidence_public
            ).head
        except FormatError:
            raise _unknown() from None
        if head.run_id != run_id:
            raise _unknown()
        try:
            leaf = leaf_hash(self.event.encode())
            verify_inclusion(
                leaf=leaf, index=self.event.sequence, size=head.size, root=head.root, proof=list(self.proof)
            )
        except FormatError:
            raise RefusedError(Code.HEAD_INCONSISTENT, "an event that is not in the log of the head") from None
        if not self._is_named(last=head.size - 1):
            raise RefusedError(Code.HEAD_INCONSISTENT, "a file that the event does not name")
        return head

    def _is_named(self, *, last: int) -> bool:
        event, match = self.event, _SEALED.fullmatch(self.name)
        if match is None:
            # Each head covers one event more at least: so there are no more heads than events.
            most = _LINE_BYTES.get(self.name, MAX_BUNDLE_BYTES) * (last + 1)
            return event.sequence == last and event.state is State.ZEROIZED and self.size <= most
        body = event.body
        return (
            event.type is _NAMED_BY[match[1]]
            and self.name == f"{match[1]}/{body['sequence']:04d}.sealed"
            and (body["sealed_bytes"], body["sealed_sha256"]) == (self.size, self.sha256.hex())
        )


def _unknown() -> RefusedError:
    return RefusedError(Code.RUN_UNKNOWN, "no head that this broker countersigned for a runtime that it released to")
