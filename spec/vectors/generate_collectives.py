"""Writes spec/vectors/sealed-collectives/ again: fixed secrets and contributions, so the same bytes every time.

Run: python spec/vectors/generate_collectives.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from glasshouse.collectives.engine.failure import REASONS, Alert
from glasshouse.collectives.protocol.group_keys import ALL, Lane, Membership, Schedule, hello_key, next_key
from glasshouse.collectives.protocol.headers import (
    MAX_PAYLOAD_BYTES,
    TAG_BYTES,
    Algorithm,
    Collective,
    Element,
    FrameHeader,
    FrameKind,
    ReductionCode,
    digest,
    frame_bytes,
    set_counter,
)
from glasshouse.collectives.protocol.rendezvous import Hello, Rendezvous
from glasshouse.collectives.protocol.traffic import REKEY_AFTER, Traffic
from glasshouse.collectives.transport.local_link import INLINE, unit_of
from glasshouse.collectives.transport.send_pool import PAGE_BYTES
from glasshouse.errors import Code
from glasshouse.wire import ranks
from glasshouse.wire.crypto import Suite

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "sealed-collectives"

SECRET = bytes(range(32))
OTHER_SECRET = bytes(range(1, 33))
PARTS = tuple(bytes([0xA0 + rank]) * 32 for rank in range(3))
OLD_PARTS = tuple(bytes([0xB0 + rank]) * 32 for rank in range(3))
GROUP = Membership(group="default_pg", ranks=(0, 4, 2), rank=0, incarnation=(2 << 32) | 1)
AES, CHACHA = Suite.AES_256_GCM, Suite.CHACHA20_POLY1305
PLAINTEXT = bytes(range(100, 148))
TAMPERED, MISMATCH, DIFFERS = Code.COLLECTIVE_TAMPERED, Code.COLLECTIVE_MISMATCH, Code.GROUP_MISMATCH

Vector = tuple[str, dict[str, Any]]


def case(name: str, kind: str, description: str, given: dict[str, Any], **expect: Any) -> Vector:
    return name, {"description": description, "expect": {"code": None} | expect, "input": given, "kind": kind}


def schedule(rank: int, parts: tuple[bytes, ...] = PARTS, membership: Membership = GROUP) -> Schedule:
    return Schedule(replace(membership, rank=rank), SECRET, parts)


def the_group(parts: tuple[bytes, ...] = PARTS, membership: Membership = GROUP) -> dict[str, Any]:
    return {
        "contributions": [part.hex() for part in parts],
        "group": membership.group,
        "incarnation": str(membership.incarnation),
        "ranks": list(membership.ranks),
        "secret": SECRET.hex(),
    }


def schedules() -> Iterator[Vector]:
    """Every value that is derived, for three memberships."""
    lone = Membership(group="", ranks=(7,), rank=0, incarnation=0)
    named = Membership(group="größe/1", ranks=(3, 1), rank=0, incarnation=2**64 - 1)
    for name, membership, parts in (
        ("schedule-three-ranks", GROUP, PARTS),
        ("schedule-three-ranks-again", GROUP, OLD_PARTS),
        ("schedule-two-ranks-of-a-sub-group", named, PARTS[:2]),
        ("schedule-one-rank", lone, PARTS[:1]),
    ):
        size = membership.size
        keys, confirmations = {}, {}
        for source in range(size):
            own = schedule(source, parts, membership)
            for lane in Lane:
                for destination in (*range(size), ALL):
                    if destination == source or (destination == ALL and lane is Lane.P2P):
                        continue
                    place = f"{lane.name.lower()} {source}>{'all' if destination == ALL else destination}"
                    if destination != ALL:
                        confirmations[place] = own.confirmation(lane, source, destination).hex()
                    for suite in Suite:
                        key = own.traffic_key(suite, lane, source, destination)
                        keys[f"{suite.value} {place}"] = [key.hex(), next_key(key, suite).hex()]
        yield case(
            name,
            "schedule",
            "digest, transcript, confirmations, and the first two keys of each stream",
            the_group(parts, membership),
            confirmations=confirmations,
            hello_key=hello_key(SECRET).hex(),
            keys=keys,
            membership_digest=membership.digest().hex(),
            transcript=schedule(0, parts, membership).transcript.hex(),
        )


def hello_of(rank: int, membership: Membership = GROUP, secret: bytes = SECRET) -> Rendezvous:
    return Rendezvous(replace(membership, rank=rank), secret, contribution=PARTS[rank])


def hello_case(
    name: str,
    description: str,
    data: bytes,
    code: Code | None,
    *,
    rank: int = 0,
    lane: Lane | None = None,
    peer: int | None = None,
    before: tuple[bytes, ...] = (),
) -> Vector:
    """What rank `rank` makes of a hello, after others on other connections; `lane` and `peer` if it connected."""
    given = the_group() | {
        "before": [each.hex() for each in before],
        "hello": data.hex(),
        "lane": None if lane is None else int(lane),
        "peer": peer,
        "rank": rank,
    }
    expect: dict[str, Any] = {"code": code}
    if code is None:
        hello = Hello.parse(data)
        expect |= {"contribution": hello.contribution.hex(), "lane": int(hello.lane), "source": hello.source}
    return case(name, "hello", description, given, **expect)


def hellos() -> Iterator[Vector]:
    good = hello_of(1).hello(Lane.COLLECTIVE, 0)
    p2p = hello_of(1).hello(Lane.P2P, 0)

    def changed(at: int, value: bytes) -> bytes:
        return good[:at] + value + good[at + len(value) :]

    yield hello_case("hello-good", "from the higher rank, which connects", good, None)
    answer = hello_of(0).hello(Lane.P2P, 1)
    yield hello_case("hello-answer", "from the lower rank", answer, None, rank=1, lane=Lane.P2P, peer=0)
    yield hello_case("hello-second-lane", "the same contribution again", p2p, None, before=(good,))
    yield hello_case("hello-magic", "a stranger", changed(0, b"\x88"), Code.WRONG_TYPE)
    yield hello_case("hello-version", "version 2", changed(9, b"\x02"), Code.UNSUPPORTED)
    yield hello_case("hello-lane", "lane 3", changed(10, b"\x03"), Code.SCHEMA)
    yield hello_case("hello-zero-byte", "byte 11 is not zero", changed(11, b"\x01"), Code.SCHEMA)
    yield hello_case("hello-zero-bytes", "byte 23 is not zero", changed(23, b"\x01"), Code.SCHEMA)
    yield hello_case("hello-short", "127 bytes", good[:-1], Code.SCHEMA)
    other = hello_of(1, secret=OTHER_SECRET).hello(Lane.COLLECTIVE, 0)
    yield hello_case("hello-another-secret", "authenticated under another secret", other, DIFFERS)
    yield hello_case("hello-mac", "the last bit is flipped", changed(127, bytes([good[127] ^ 1])), DIFFERS)
    yield hello_case("hello-contribution", "the contribution is another", changed(64, b"\x00"), DIFFERS)
    for name, description, membership in (
        ("hello-another-size", "of a group of two", replace(GROUP, ranks=(0, 4))),
        ("hello-another-name", "of another group", replace(GROUP, group="1")),
        ("hello-another-order", "ranks in another order", replace(GROUP, ranks=(0, 2, 4))),
        ("hello-another-incarnation", "one initialisation earlier", replace(GROUP, incarnation=2 << 32)),
    ):
        yield hello_case(name, description, hello_of(1, membership).hello(Lane.COLLECTIVE, 0), DIFFERS)
    yield hello_case("hello-for-another", "for rank 2", hello_of(1).hello(Lane.COLLECTIVE, 2), TAMPERED)
    yield hello_case("hello-reflected", "its own", hello_of(0).hello(Lane.COLLECTIVE, 1), TAMPERED)
    yield hello_case(
        "hello-wrong-lane", "on the other connection", answer, TAMPERED, rank=1, lane=Lane.COLLECTIVE, peer=0
    )
    wrong = hello_of(1).hello(Lane.P2P, 2)
    yield hello_case("hello-wrong-peer", "rank 1 answers for rank 0", wrong, TAMPERED, rank=2, lane=Lane.P2P, peer=0)
    low = hello_of(0).hello(Lane.P2P, 1)
    yield hello_case("hello-from-below", "a lower rank connects", low, TAMPERED, rank=1)
    yield hello_case("hello-twice", "again on the same lane", good, TAMPERED, before=(good,))
    old = Rendezvous(replace(GROUP, rank=1), SECRET, contribution=OLD_PARTS[1]).hello(Lane.P2P, 0)
    yield hello_case("hello-old-on-the-second-lane", "an older contribution", old, TAMPERED, before=(good,))


def confirmations() -> Iterator[Vector]:
    """What rank 0 makes of the confirmation of rank 1 on its point-to-point connection."""

    def judged(name: str, description: str, data: bytes, code: Code | None) -> Vector:
        given = the_group() | {"confirmation": data.hex(), "lane": int(Lane.P2P), "rank": 0, "source": 1}
        return case(name, "confirmation", description, given, code=code)

    good = schedule(1).confirmation(Lane.P2P, 1, 0)
    yield judged("confirmation-good", "the same keys", good, None)
    yield judged("confirmation-flipped", "one bit flipped", bytes([good[0] ^ 1]) + good[1:], TAMPERED)
    reflected = schedule(0).confirmation(Lane.P2P, 0, 1)
    yield judged("confirmation-reflected", "its own", reflected, TAMPERED)
    other_lane = schedule(1).confirmation(Lane.COLLECTIVE, 1, 0)
    yield judged("confirmation-of-the-other-lane", "from the other connection", other_lane, TAMPERED)
    saw_old = schedule(1, (PARTS[0], PARTS[1], OLD_PARTS[2])).confirmation(Lane.P2P, 1, 0)
    yield judged("confirmation-over-an-old-hello", "rank 1 was shown an old hello of rank 2", saw_old, TAMPERED)


def units() -> Iterator[Vector]:
    """What a rank makes of a unit between ranks of one machine."""
    arena = 40 * PAGE_BYTES
    frame = frame_bytes(MAX_PAYLOAD_BYTES)

    def judged(name: str, description: str, place: int, size: int, code: Code | None, has: int = arena) -> Vector:
        expect: dict[str, Any] = {"code": code}
        if code is None:
            expect |= {"place": None if place == INLINE else place * PAGE_BYTES, "size": size}
        given = {"arena_bytes": has, "unit": unit_of(place, size).hex()}
        return case(name, "unit", description, given, **expect)

    yield judged("unit-placed", "8272 bytes on page 7", 7, frame_bytes(8192), None)
    yield judged("unit-placed-at-the-end", "the last bytes of the arena", 38, 2 * PAGE_BYTES, None)
    yield judged("unit-inline", "an alert's frame follows", INLINE, frame_bytes(512), None)
    yield judged("unit-inline-longest", "the longest frame follows", INLINE, frame, None, has=0)
    yield judged("unit-placed-behind-the-end", "one byte more than the arena has", 38, 2 * PAGE_BYTES + 1, TAMPERED)
    yield judged("unit-placed-far-behind-the-end", "the last place that can be said", INLINE - 1, 80, TAMPERED)
    yield judged("unit-placed-without-an-arena", "the sender has given none", 0, frame_bytes(8192), TAMPERED, has=0)
    yield judged("unit-too-short", "no frame is that short", INLINE, frame_bytes(0) - 1, TAMPERED)
    yield judged("unit-too-long", "no frame is that long", INLINE, frame + 1, TAMPERED)


def head(kind: FrameKind = FrameKind.DATA, destination: int = 0, source: int = 1, **fields: Any) -> FrameHeader:
    if kind is FrameKind.DATA and "collective" not in fields:
        fields = {
            "collective": Collective.ALL_REDUCE,
            "algorithm": Algorithm.DIRECT,
            "element": Element.FLOAT32,
            "reduction": ReductionCode.SUM,
            "sequence": 41,
            "elements": 36,
            "chunk": 2,
            "digest": digest("shape", 36),
        } | fields
    return FrameHeader(kind=kind, source=source, destination=destination, **fields)


class Wire:
    """What rank 1 sends to rank 0: each frame is header ‖ ciphertext ‖ tag."""

    def __init__(self, parts: tuple[bytes, ...] = PARTS, rekey_after: int = REKEY_AFTER, source: int = 1) -> None:
        self.traffic = Traffic(schedule(source, parts), rekey_after=rekey_after)

    def frame(self, header: FrameHeader, plaintext: bytes = PLAINTEXT, lane: Lane = Lane.COLLECTIVE) -> bytes:
        packed, out = header.encode(), bytearray(len(plaintext) + TAG_BYTES)
        self.traffic.sealer(lane, header.destination, header.suite).seal_into(packed, plaintext, out)
        return bytes(packed + out)


def frame_case(
    name: str,
    description: str,
    frames: list[bytes],
    opened: list[bytes],
    code: Code | None,
    *,
    lane: Lane = Lane.COLLECTIVE,
    rekey_after: int = REKEY_AFTER,
) -> Vector:
    """What rank 0 opens of the frames that come one after the other on its connection with rank 1."""
    given = the_group() | {
        "frames": [each.hex() for each in frames],
        "lane": int(lane),
        "rank": 0,
        "rekey_after": rekey_after,
        "source": 1,
    }
    return case(name, "frames", description, given, code=code, opened=[each.hex() for each in opened])


def good_frames() -> Iterator[Vector]:
    everyone = head(destination=ALL)
    for suite, short in ((AES, "aes"), (CHACHA, "chacha")):
        one = Wire().frame(replace(head(), suite=suite))
        yield frame_case(f"frame-data-{short}", f"data under {suite.value}", [one], [PLAINTEXT], None)
    yield frame_case("frame-data-for-all", "sealed once for every rank", [Wire().frame(everyone)], [PLAINTEXT], None)
    yield frame_case("frame-data-empty", "no payload", [Wire().frame(head(), b"")], [b""], None)
    wire = Wire()
    mixed = [wire.frame(head()), wire.frame(everyone), wire.frame(replace(head(), suite=CHACHA)), wire.frame(head())]
    yield frame_case("frame-streams", "each stream and suite counts for itself", mixed, [PLAINTEXT] * 4, None)
    message = {"sequence": 3, "elements": 12, "element": Element.FLOAT32, "tag": 99, "collective": Collective.SEND}
    wire = Wire()
    p2p = [
        wire.frame(head(FrameKind.OFFER, **message), b"", Lane.P2P),
        wire.frame(head(FrameKind.ACCEPT, **message | {"tag": 7, "sequence": 5}), b"", Lane.P2P),
        wire.frame(head(FrameKind.DATA, **message), PLAINTEXT, Lane.P2P),
        wire.frame(head(FrameKind.BYE), b"", Lane.P2P),
    ]
    for frame, short in zip(p2p[:1] + p2p[3:], ("offer", "bye"), strict=True):
        first = Wire().frame(FrameHeader.parse(frame[:64]), b"", Lane.P2P)
        yield frame_case(f"frame-{short}", "first on its stream", [first], [b""], None, lane=Lane.P2P)
    yield frame_case(
        "frame-point-to-point", "offer, accept, data, bye", p2p, [b"", b"", PLAINTEXT, b""], None, lane=Lane.P2P
    )
    alert = Alert(
        reason=TAMPERED, detected_by=1, culprit=2, operation=41, text="a frame was changed on the way"
    ).encode()
    yield frame_case("frame-alert", "the group is over", [Wire().frame(head(FrameKind.ALERT), alert)], [alert], None)
    wire = Wire(rekey_after=2)
    frames = [wire.frame(head(chunk=chunk)) for chunk in range(5)]
    yield frame_case("frame-rekey", "a new key after every two", frames, [PLAINTEXT] * 5, None, rekey_after=2)


FIELDS = {
    "version": 0, "kind": 1, "suite": 2, "collective": 3, "algorithm": 4, "element": 5, "reduction": 6, "phase": 7,
    "source": 9, "destination": 11, "payload-bytes": 15, "counter": 23, "sequence": 31, "elements": 39, "chunk": 43,
    "tag": 47, "digest": 63, "ciphertext": 64, "tag-of-the-cipher": 64 + len(PLAINTEXT),
}  # fmt: skip


def bad_frames() -> Iterator[Vector]:
    for field, at in FIELDS.items():
        frame = bytearray(Wire().frame(head()))
        frame[at] ^= 1
        yield frame_case(f"frame-flip-{field}", f"one bit of {field} is flipped", [bytes(frame)], [], TAMPERED)
    wire = Wire()
    one, two, three = (wire.frame(head(chunk=chunk)) for chunk in range(3))
    for name, description, frames, opened in (
        ("dropped", "the first is missing", [two], 0),
        ("dropped-later", "the second is missing", [one, three], 1),
        ("repeated", "the first comes again", [one, one], 1),
        ("reordered", "the second comes before the first", [two, one], 0),
        ("spliced", "the ciphertext of the first under the header of the second", [one, two[:64] + one[64:]], 1),
        ("cut", "the last byte is missing", [one[:-1]], 0),
    ):
        yield frame_case(f"frame-{name}", description, frames, [PLAINTEXT] * opened, TAMPERED)
    renumbered = bytearray(two)
    set_counter(renumbered, len(PLAINTEXT), 0)
    yield frame_case("frame-renumbered", "the second with the counter of the first", [bytes(renumbered)], [], TAMPERED)
    huge = bytearray(one)
    set_counter(huge, (1 << 24) + 1, 0)
    yield frame_case("frame-too-long", "announces 2^24 + 1 bytes", [bytes(huge)], [], TAMPERED)
    own = Wire(source=0).frame(head(source=0, destination=1))
    yield frame_case("frame-reflected", "rank 0's own frame", [own], [], TAMPERED)
    disguised = bytearray(own)
    disguised[8:12] = one[8:12]
    yield frame_case(
        "frame-reflected-readdressed", "rank 0's own, with the ranks exchanged", [bytes(disguised)], [], TAMPERED
    )
    third = Wire(source=2).frame(head(source=2))
    yield frame_case("frame-of-another-rank", "rank 2's, on the connection with rank 1", [third], [], TAMPERED)
    elsewhere = Wire().frame(head(destination=2))
    yield frame_case("frame-for-another-rank", "for rank 2", [elsewhere], [], TAMPERED)
    yield frame_case(
        "frame-of-the-other-lane", "from the point-to-point lane", [Wire().frame(head(), lane=Lane.P2P)], [], TAMPERED
    )
    broadcast = Wire().frame(head(destination=ALL))
    yield frame_case(
        "frame-for-all-between-two", "for all, on the other lane", [broadcast], [], TAMPERED, lane=Lane.P2P
    )
    addressed = bytearray(broadcast)
    addressed[10:12] = bytes(2)
    yield frame_case("frame-for-all-readdressed", "for all, as if for rank 0 alone", [bytes(addressed)], [], TAMPERED)
    old = Wire(OLD_PARTS).frame(head())
    yield frame_case("frame-of-an-earlier-initialisation", "other contributions", [old], [], TAMPERED)
    late = Wire(rekey_after=3)
    frames = [late.frame(head()) for _ in range(3)]
    yield frame_case("frame-late-rekey", "a key used too long", frames, [PLAINTEXT] * 2, TAMPERED, rekey_after=2)


def alerts() -> Iterator[Vector]:
    """Payloads of alert frames that have been opened."""

    def judged(name: str, description: str, data: bytes, **expect: Any) -> Vector:
        return case(name, "alert", description, {"payload": data.hex()}, **expect)

    for reason in REASONS:
        alert = Alert(reason=reason, detected_by=1, culprit=2, operation=41, text="größer als erlaubt")
        fields = {"culprit": 2, "detected_by": 1, "operation": "41", "reason": reason, "text": alert.text}
        yield judged(f"alert-{reason}", "a reason", alert.encode(), **fields)
    none = Alert(reason=Code.RANK_LOST, detected_by=0, culprit=None, operation=None, text="")
    fields = {"culprit": None, "detected_by": 0, "operation": None, "reason": none.reason, "text": ""}
    yield judged("alert-of-nobody", "no culprit, no operation, no text", none.encode(), **fields)
    good = none.encode()
    for name, description, data in (
        ("reason-0", "no reason", b"\x00" + good[1:]),
        ("padding", "byte 1 is not zero", good[:1] + b"\x01" + good[2:]),
        ("after-the-text", "the last byte is not zero", good[:-1] + b"\x01"),
        ("text-too-long", "497 bytes of text", good[:6] + (497).to_bytes(2, "big") + good[8:]),
        ("not-utf-8", "the text is no UTF-8", good[:6] + b"\x00\x01" + good[8:16] + b"\xff" + good[17:]),
        ("control-character", "an escape", good[:6] + b"\x00\x01" + good[8:16] + b"\x1b" + good[17:]),
        ("short", "511 bytes", good[:-1]),
    ):
        yield judged(f"alert-bad-{name}", description, data, code=MISMATCH)


def handovers() -> Iterator[Vector]:
    """The agent's socket: the frame that asks, and what may be answered."""
    token = bytes(range(64, 96)).hex()
    asked = ranks.ask_secret(token).hex()

    def judged(name: str, description: str, answer: bytes, **expect: Any) -> Vector:
        return case(name, "hand-over", description, {"answer": answer.hex(), "token": token}, asked=asked, **expect)

    yield judged("hand-over-good", "the secret", ranks.give_secret(SECRET), secret=SECRET.hex())
    yield judged("hand-over-refused", "refused", ranks.refuse(Code.GROUP_SECRET), code=Code.GROUP_SECRET)
    foreign = ranks.Request(kind="join", token=SECRET).frame()
    yield judged("hand-over-not-an-answer", "a request in the place of an answer", foreign, code=Code.SCHEMA)


def build() -> dict[str, bytes]:
    """Return every vector by its file's name."""
    makers = (schedules, hellos, confirmations, units, good_frames, bad_frames, alerts, handovers)
    found = {}
    for name, value in (vector for maker in makers for vector in maker()):
        if f"{name}.json" in found:
            raise RuntimeError(f"two vectors are called {name}")
        found[f"{name}.json"] = (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()
    return found


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for stale in FOLDER.glob("*.json"):
        stale.unlink()
    for file, data in build().items():
        (FOLDER / file).write_bytes(data)
    print(f"{len(build())} vectors in {FOLDER}")
