"""The frame that ends a group on every rank (spec/sealed-collectives.md, section 8)."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from glasshouse.errors import Code, CollectiveError

ALERT_BYTES = 512  # fixed, so that the length does not give the reason away

REASONS = {
    Code.COLLECTIVE_TAMPERED: 1,
    Code.COLLECTIVE_MISMATCH: 2,
    Code.COLLECTIVE_TIMEOUT: 3,
    Code.COLLECTIVE_ABORTED: 4,
    Code.COLLECTIVE_UNSEALED: 5,
    Code.RANK_LOST: 6,
    Code.RANK_REFUSED: 7,
    Code.GROUP_SECRET: 8,
    Code.GROUP_MISMATCH: 9,
}
_CODES = {number: code for code, number in REASONS.items()}
_FIXED = struct.Struct(">BxHHHQ")  # reason, detected by, culprit, bytes of text, operation
_NO_RANK = 0xFFFF
_NO_OPERATION = 2**64 - 1
_MAX_TEXT_BYTES = ALERT_BYTES - _FIXED.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """The reason for a group's end.

    Law: ``Alert.parse(alert.encode()) == alert``, for texts without characters that a terminal obeys.
    """

    reason: Code  # one of `REASONS`
    detected_by: int
    culprit: int | None  # the rank whose frames or silence it is about, if one is
    operation: int | None  # the sequence number of the operation that failed, if one was under way
    text: str  # a sentence for people; never data

    def encode(self) -> bytes:
        """Return the `ALERT_BYTES` of an alert frame's payload; a text that is too long is cut."""
        text = _printable(self.text).encode()[:_MAX_TEXT_BYTES].decode(errors="ignore").encode()
        culprit = _NO_RANK if self.culprit is None else self.culprit
        operation = _NO_OPERATION if self.operation is None else self.operation
        fixed = _FIXED.pack(REASONS[self.reason], self.detected_by, culprit, len(text), operation)
        return (fixed + text).ljust(ALERT_BYTES, b"\0")

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview) -> Alert:
        """Read the payload of an alert frame that has been opened.

        Raises:
            CollectiveError: `collective-mismatch`, any other form.
        """
        try:
            if len(data) != ALERT_BYTES:
                raise ValueError
            number, detected_by, culprit, length, operation = _FIXED.unpack_from(data)
            end = _FIXED.size + length
            alert = cls(
                reason=_CODES[number],
                detected_by=detected_by,
                culprit=None if culprit == _NO_RANK else culprit,
                operation=None if operation == _NO_OPERATION else operation,
                text=_printable(bytes(data[_FIXED.size : end]).decode()),
            )
            if alert.encode() != bytes(data):
                raise ValueError
        except (KeyError, ValueError):
            raise CollectiveError(Code.COLLECTIVE_MISMATCH, "an alert that is not in its one form") from None
        return alert

    def error(self) -> CollectiveError:
        """Return the error that a rank raises when it receives the alert."""
        return CollectiveError(self.reason, f"rank {self.detected_by} ended the group: {self.text}", rank=self.culprit)


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)
