"""Frames over two pipes: what a runtime waits for goes before what can wait, and nothing is torn."""

from __future__ import annotations

import os

import pytest

from glasshouse.errors import Code, PeerError
from glasshouse.providers.protocol.link import Link, Message


def pair() -> tuple[Link, Link]:
    (a, b), (c, d) = os.pipe(), os.pipe()
    return Link(a, d), Link(c, b)


def everything(sender: Link, receiver: Link) -> list[Message]:
    found: list[Message] = []
    while sender.pending_bytes:
        sender.flush()
        found += receiver.receive()
    found += receiver.receive()
    return found


def test_calls_go_before_pieces_of_files_that_were_queued_earlier() -> None:
    place, owner = pair()
    for number in range(1, 4):
        place.send_data(number, bytes([number]) * 200_000, can_wait=True)
        place.send({"id": number, "ok": {"bytes": 200_000}}, can_wait=True)
    place.send_data(2**31, b"a call")
    found = everything(place, owner)
    kinds = [message if isinstance(message, dict) else message[0] for message in found]
    assert kinds[0] == 1, "what was begun is finished"
    assert kinds[1] == 2**31
    answers = [message["id"] for message in found if isinstance(message, dict)]
    assert answers == [1, 2, 3]
    assert kinds.index(3) < len(kinds) - 1
    place.close()
    owner.close()


def test_nothing_is_written_while_it_is_held() -> None:
    place, owner = pair()
    place.hold()
    place.send({"call": 1})
    assert list(owner.receive()) == []
    place.let_go()
    assert list(owner.receive()) == [{"call": 1}]
    place.close()
    owner.close()


def test_the_end_of_the_other_side_and_noise_are_told_apart() -> None:
    place, owner = pair()
    os.write(place.writer, b"Welcome to this machine\n")
    with pytest.raises(PeerError) as noise:
        list(owner.receive())
    assert noise.value.code is Code.SCHEMA
    place.close()
    with pytest.raises(PeerError) as gone:
        list(owner.receive())
    assert gone.value.code is Code.PLACE_UNREACHABLE
    owner.close()
