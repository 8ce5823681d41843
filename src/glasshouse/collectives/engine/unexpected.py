"""Frames that were not expected: an alert, a goodbye, another operation, or an attack.

Law: nothing in such a frame is used before it was opened.
Source: spec/sealed-collectives.md, sections 7 and 8.
"""

from __future__ import annotations

from dataclasses import replace

from glasshouse.collectives.protocol.alerts import Alert
from glasshouse.collectives.protocol.headers import HEADER_BYTES, Header, Kind, frame_bytes
from glasshouse.collectives.transport.mesh import Mesh
from glasshouse.collectives.transport.peer_link import PeerLink
from glasshouse.errors import Code, CollectiveError

__all__ = ["PeerAlertError", "explain"]


class PeerAlertError(CollectiveError):
    """What another rank found."""

    def __init__(self, alert: Alert) -> None:
        alerted = alert.error()
        super().__init__(alerted.code, alerted.message, rank=alerted.rank)
        self.alert = alert


def explain(
    mesh: Mesh, link: PeerLink, frame: memoryview, work: object = None, expected: bytearray | None = None
) -> None:
    """Find out what a frame is that was not expected, and raise for it unless nothing depends on it.

    Raises:
        CollectiveError: what another rank says has happened; `rank-lost`, it left; `collective-mismatch`, it is
            at another operation; `collective-tampered`, it did not send this, or not in this order.
    """
    called = mesh.membership.called
    header, sealed = frame[:HEADER_BYTES], frame[HEADER_BYTES : link.wanted]
    payload = bytearray(link.wanted - frame_bytes(0))
    mesh.traffic.route(link.lane, link.peer, header).open_into(header, sealed, payload)
    theirs = Header.parse(header)
    who = called(link.peer)
    if theirs.kind is Kind.ALERT:
        raise PeerAlertError(Alert.parse(payload))
    if theirs.kind is Kind.BYE:
        link.bye_received = True
        if work is None:
            return
        raise CollectiveError(Code.RANK_LOST, f"{who} left the group", rank=link.peer)
    if work is None or expected is None:
        raise CollectiveError(Code.COLLECTIVE_MISMATCH, f"{who} sends what nothing led to", rank=link.peer)
    due = Header.parse(expected)
    if theirs.chunk != due.chunk or theirs.phase != due.phase:
        moved = replace(
            theirs,
            chunk=due.chunk,
            phase=due.phase,
            destination=due.destination,
            payload_bytes=due.payload_bytes,
            counter=due.counter,
        )
        if moved == due:
            raise CollectiveError(
                Code.COLLECTIVE_TAMPERED,
                f"from {who} something else came than it sealed: frames were reordered",
                rank=link.peer,
            )
    ours = due.described()
    place = "" if theirs.suite is due.suite else f", sealed for {theirs.suite.value} and not {due.suite.value},"
    raise CollectiveError(
        Code.COLLECTIVE_MISMATCH,
        f"{who} is at {theirs.described()} (operation {theirs.sequence}){place} where"
        f" {called(mesh.membership.rank)} is at {ours} (operation {due.sequence})",
        hint="every rank must call the same collectives in the same order with tensors of the same shape and type",
        rank=link.peer,
    )
