"""The end of a group on every rank: alerts, errors, and frames that were not expected.

Law: nothing in a frame is used before it was opened. Source: spec/sealed-collectives.md, sections 7 and 8.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from glasshouse.collectives.protocol.headers import HEADER_BYTES, FrameHeader, FrameKind, frame_bytes
from glasshouse.collectives.protocol.traffic import Traffic
from glasshouse.collectives.transport.peer_link import PeerLink
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


class PeerAlertError(CollectiveError):
    """The failure that another rank found."""

    def __init__(self, alert: Alert) -> None:
        error = alert.error()
        super().__init__(error.code, error.message, rank=error.rank)
        self.alert = alert


def late(
    timeout_s: float, missing: Sequence[int], awaited: Sequence[int], called: Callable[[int], str]
) -> CollectiveError:
    """Return the error for an operation whose time is up, with the ranks that have not begun it."""
    if missing:
        what = f"nothing came from {' and '.join(map(called, missing))} within the timeout of {timeout_s:g} s"
    else:
        begun = " and ".join(map(called, awaited)) or "any rank"
        what = f"no more came from {begun} within the timeout of {timeout_s:g} s; who is missing is not seen here"
    return CollectiveError(Code.COLLECTIVE_TIMEOUT, what, rank=missing[0] if len(missing) == 1 else None)


def alert_of(error: CollectiveError, rank: int, operation: int | None) -> Alert:
    """Return the alert for the other ranks: the one that this rank received, or one for its own finding."""
    if isinstance(error, PeerAlertError):
        return error.alert
    return Alert(
        reason=error.code if error.code in REASONS else Code.COLLECTIVE_ABORTED,
        detected_by=rank,
        culprit=error.rank,
        operation=operation,
        text=error.message,
    )


def opened(traffic: Traffic, link: PeerLink) -> bytearray:
    """Return the payload of the frame that has come on a connection, of whichever stream.

    Raises:
        CollectiveError: `collective-tampered`, it is not the next frame of its stream.
    """
    header, payload = link.frame[:HEADER_BYTES], bytearray(link.wanted - frame_bytes(0))
    traffic.route(link.lane, link.peer, header).open_into(header, link.frame[HEADER_BYTES : link.wanted], payload)
    return payload


def explain(traffic: Traffic, link: PeerLink, expected: bytearray | None = None) -> None:
    """Open the frame on a connection, which has not the expected header, and raise for it unless nothing depends on it.

    Raises:
        CollectiveError: the reason that another rank sent; `rank-lost`, it left; `collective-mismatch`, it is at
            another operation; `collective-tampered`, it did not send this, or not in this order.
    """
    payload = opened(traffic, link)
    theirs = FrameHeader.parse(link.frame)
    called = traffic.membership.called
    who, own = called(link.peer), called(traffic.membership.rank)
    if theirs.kind is FrameKind.ALERT:
        raise PeerAlertError(Alert.parse(payload))
    if theirs.kind is FrameKind.BYE:
        link.bye_received = True
        if expected is None:
            return
        raise CollectiveError(Code.RANK_LOST, f"{who} left the group", rank=link.peer)
    if expected is None:
        raise CollectiveError(Code.COLLECTIVE_MISMATCH, f"{who} sends what nothing led to", rank=link.peer)
    due = FrameHeader.parse(expected)
    free = ("chunk", "phase", "destination", "payload_bytes", "counter")
    moved = replace(theirs, **{name: getattr(due, name) for name in free})
    if moved == due and (theirs.chunk, theirs.phase) != (due.chunk, due.phase):
        reordered = f"from {who} something else came than it sealed: frames were reordered"
        raise CollectiveError(Code.COLLECTIVE_TAMPERED, reordered, rank=link.peer)
    place = "" if theirs.suite is due.suite else f", sealed for {theirs.suite.value} and not {due.suite.value},"
    raise CollectiveError(
        Code.COLLECTIVE_MISMATCH,
        f"{who} is at {theirs.described()} (operation {theirs.sequence}){place} where"
        f" {own} is at {due.described()} (operation {due.sequence})",
        hint="every rank must call the same collectives in the same order with tensors of the same shape and type",
        rank=link.peer,
    )


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)
