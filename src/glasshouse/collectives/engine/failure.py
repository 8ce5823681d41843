"""The end of a group: errors, alerts, and frames that were not expected (spec/sealed-collectives.md, sections 7 and 8).

Law: nothing in a frame is used before it was opened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from glasshouse.collectives.protocol.alerts import REASONS, Alert
from glasshouse.collectives.protocol.headers import HEADER_BYTES, FrameHeader, FrameKind, frame_bytes
from glasshouse.collectives.protocol.traffic import Traffic
from glasshouse.collectives.transport.peer_link import PeerLink
from glasshouse.errors import Code, CollectiveError


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
