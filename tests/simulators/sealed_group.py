"""The ranks of one group in memory: they meet, and their frames pass through the test's hands."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from glasshouse.collectives.protocol.group_keys import Lane, Membership
from glasshouse.collectives.protocol.headers import (
    TAG_BYTES,
    Algorithm,
    Collective,
    Element,
    FrameHeader,
    FrameKind,
    ReductionCode,
)
from glasshouse.collectives.protocol.rendezvous import ConnectionHandshake, Rendezvous
from glasshouse.collectives.protocol.traffic import REKEY_AFTER, FrameOpener, FrameSealer, Traffic

SECRET = bytes(range(32))


def members(size: int, *, group: str = "0", incarnation: int = 1) -> list[Membership]:
    ranks = tuple(range(size))
    return [Membership(group=group, ranks=ranks, rank=rank, incarnation=incarnation) for rank in ranks]


def meetings(size: int, *, secret: bytes = SECRET, fixed: bool = False, **options: object) -> list[Rendezvous]:
    """Ranks that have not met; `fixed` gives each a contribution that is the same in every run."""
    return [
        Rendezvous(member, secret, contribution=bytes([member.rank + 1]) * 32 if fixed else None)
        for member in members(size, **options)  # type: ignore[arg-type]
    ]


Wire = Callable[[Lane, int, int, bytes], bytes]
"""What the network makes of a message: (lane, source, destination, message)."""


def untouched(lane: Lane, source: int, destination: int, message: bytes) -> bytes:
    return message


def shake_hands(
    parties: Sequence[Rendezvous], wire: Wire = untouched
) -> list[tuple[ConnectionHandshake, ConnectionHandshake]]:
    """Let every pair greet on both lanes over `wire`; return the connections, each (who connected, the other)."""
    connections = []
    for lane in Lane:
        for high in range(len(parties)):
            for low in range(high):
                there, here = ConnectionHandshake(parties[high], lane=lane, peer=low), ConnectionHandshake(parties[low])
                answer = here.receive(wire(lane, high, low, there.begin()))
                assert there.receive(wire(lane, low, high, answer)) == b""
                connections.append((there, here))
    for there, here in connections:
        assert there.lane is not None
        assert there.peer is not None
        assert here.peer is not None
        forth, back = there.confirm(), here.confirm()
        here.receive(wire(there.lane, here.peer, there.peer, forth))
        there.receive(wire(there.lane, there.peer, here.peer, back))
    return connections


def group(size: int, *, rekey_after: int = REKEY_AFTER, **options: object) -> list[Traffic]:
    """The traffic of ranks that have met."""
    parties = meetings(size, **options)  # type: ignore[arg-type]
    shake_hands(parties)
    return [Traffic(communicator.schedule(), rekey_after=rekey_after) for communicator in parties]


def header(source: int, destination: int, **fields: object) -> FrameHeader:
    known: dict[str, object] = {
        "kind": FrameKind.DATA,
        "collective": Collective.ALL_REDUCE,
        "algorithm": Algorithm.DIRECT,
        "element": Element.FLOAT32,
        "reduction": ReductionCode.SUM,
        "elements": 50,
    }
    return FrameHeader(source=source, destination=destination, **(known | fields))  # type: ignore[arg-type]


def seal(sealer: FrameSealer, plaintext: bytes, head: FrameHeader) -> tuple[bytes, bytes]:
    """One frame: header, and ciphertext with tag."""
    packed, out = head.encode(), bytearray(len(plaintext) + TAG_BYTES)
    sealer.seal_into(packed, plaintext, out)
    return bytes(packed), bytes(out)


def open_frame(opener: FrameOpener, frame: tuple[bytes, bytes], *, size: int | None = None) -> bytes:
    """Open one frame; when it fails, nothing is left in the destination."""
    packed, sealed = frame
    out = bytearray(b"\xaa" * (max(0, len(sealed) - TAG_BYTES) if size is None else size))
    try:
        opener.open_into(packed, sealed, out)
    except Exception:
        assert not any(out), "unverified plaintext was left in the destination"
        raise
    return bytes(out)
