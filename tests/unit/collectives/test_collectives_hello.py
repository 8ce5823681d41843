"""The meeting of a group, honest and attacked: each rank learns at once what does not fit, and whose it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest

from glasshouse.collectives.protocol.group_keys import Lane, Membership, hello_key
from glasshouse.collectives.protocol.rendezvous import (
    CONFIRM_BYTES,
    HELLO_BYTES,
    ConnectionHandshake,
    Hello,
    Rendezvous,
)
from glasshouse.errors import Code, CollectiveError, FormatError, GlasshouseError
from simulators.sealed_group import (
    SECRET,
    group,
    header,
    meetings,
    members,
    open_frame,
    seal,
    shake_hands,
)
from tools.forked import in_child

HELLO = Hello(
    lane=Lane.P2P, source=1, destination=0, size=2, incarnation=1, group=members(2)[0].digest(), contribution=b"c" * 32
)
KEY = hello_key(SECRET)


def met(one: Rendezvous, data: bytes, *, lane: Lane | None = None, peer: int | None = None) -> CollectiveError:
    with pytest.raises(CollectiveError) as caught:
        one.meet(data, lane=lane, peer=peer)
    return caught.value


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_ranks_that_agree_have_keys_for_each_other(size: int) -> None:
    parties = meetings(size)
    connections = shake_hands(parties)
    assert len(connections) == size * (size - 1)
    assert all(end.done and end.wants == 0 for both in connections for end in both)
    assert {communicator.missing for communicator in parties} == {()}
    assert len({communicator.schedule().transcript for communicator in parties}) == 1


def test_frames_pass_between_every_two_ranks_that_have_met() -> None:
    ranks = group(3)
    for lane in Lane:
        for source in range(3):
            for destination in set(range(3)) - {source}:
                frame = seal(ranks[source].sealer(lane, destination), b"x", header(source, destination))
                assert open_frame(ranks[destination].route(lane, source, frame[0]), frame) == b"x"


def test_each_meeting_makes_a_contribution_of_its_own() -> None:
    first, second = (Hello.parse(meetings(2)[0].hello(Lane.P2P, 1)) for _ in range(2))
    assert first.contribution != second.contribution
    assert replace(first, contribution=second.contribution) == second


def test_a_hello_reads_back_and_has_one_length() -> None:
    data = HELLO.encode(KEY)
    assert len(data) == HELLO_BYTES
    assert Hello.parse(data) == HELLO
    assert ConnectionHandshake(meetings(2)[0]).wants == HELLO_BYTES


def test_keys_are_made_when_nobody_is_missing_and_not_before() -> None:
    here, there = meetings(2)
    assert here.missing == (1,)
    here.meet(there.hello(Lane.COLLECTIVE, 0), lane=None, peer=None)
    assert here.missing == (1,), "the second lane has not been greeted on"
    with pytest.raises(ValueError, match="every rank"):
        here.schedule()
    here.meet(there.hello(Lane.P2P, 0), lane=None, peer=None)
    assert here.missing == ()
    assert here.schedule() is here.schedule()


def test_the_secret_is_dropped_with_the_meeting() -> None:
    parties = meetings(2)
    shake_hands(parties)
    assert not any(parties[0]._secret)
    assert not any(parties[0]._key)
    with pytest.raises(ValueError, match="over"):
        parties[0].hello(Lane.P2P, 1)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda data: b"GET / HTTP/1.1\r\n" + data[16:], Code.WRONG_TYPE),
        (lambda data: bytes(HELLO_BYTES), Code.WRONG_TYPE),
        (lambda data: data[:-1], Code.SCHEMA),
        (lambda data: data[:9] + b"\x02" + data[10:], Code.UNSUPPORTED),
        (lambda data: data[:10] + b"\x03" + data[11:], Code.SCHEMA),
        (lambda data: data[:11] + b"\x01" + data[12:], Code.SCHEMA),
        (lambda data: data[:20] + b"\x01" + data[21:], Code.SCHEMA),
    ],
    ids=["http", "zeros", "short", "version", "lane", "padding", "more-padding"],
)
def test_a_stranger_is_told_from_a_rank(change: Callable[[bytes], bytes], code: Code) -> None:
    """Whoever scans ports does not end the job: its connection is dropped."""
    with pytest.raises(FormatError) as caught:
        meetings(2)[0].meet(change(HELLO.encode(KEY)), lane=None, peer=None)
    assert caught.value.code is code


def test_another_secret_is_told_at_once_and_on_both_sides() -> None:
    here, there = meetings(2)[0], meetings(2, secret=b"another secret of thirty-two b..")[1]
    for error in (met(here, there.hello(Lane.P2P, 0)), met(there, here.hello(Lane.P2P, 1), lane=Lane.P2P, peer=0)):
        assert error.code is Code.GROUP_MISMATCH
        assert "holds another group secret" in error.message
        assert "same group secret" in error.hint
    assert here.missing == (1,)


def test_who_was_refused_gets_a_hello_to_see_the_difference_by_itself() -> None:
    here, there = (
        ConnectionHandshake(meetings(2)[0]),
        ConnectionHandshake(meetings(2, secret=b"x" * 32)[1], lane=Lane.P2P, peer=0),
    )
    first = there.begin()
    with pytest.raises(CollectiveError):
        here.receive(first)
    with pytest.raises(CollectiveError, match="rank 0 holds another group secret"):
        there.receive(here.answer(first))
    with pytest.raises(FormatError):
        here.answer(bytes(HELLO_BYTES))


OTHERS = {
    "counts 3 ranks where rank 0 counts 2": members(3)[1],
    "another group than '0'": replace(members(2)[1], group="1"),
    "ranks in another order": Membership(group="0", ranks=(1, 0), rank=1, incarnation=1),
    "at initialisation 2 after restart 0": replace(members(2)[1], incarnation=2),
    "at initialisation 1 after restart 3": replace(members(2)[1], incarnation=(3 << 32) | 1),
}


@pytest.mark.parametrize("words", OTHERS)
def test_a_rank_that_believes_another_group_hears_how_it_differs(words: str) -> None:
    here, there = meetings(2)[0], Rendezvous(OTHERS[words], SECRET)
    error = met(here, there.hello(Lane.COLLECTIVE, 0))
    assert error.code is Code.GROUP_MISMATCH
    assert words in error.message
    assert "rank 1" in error.message
    assert met(there, here.hello(Lane.COLLECTIVE, 1), lane=Lane.COLLECTIVE, peer=0).code is Code.GROUP_MISMATCH


def test_hellos_that_are_rerouted_or_reflected_are_refused() -> None:
    parties = meetings(3)
    attempts = [
        (parties[0], parties[2].hello(Lane.P2P, 1), None, None),  # brought to rank 0 instead of 1
        (parties[1], parties[1].hello(Lane.P2P, 0), None, None),  # its own, sent back
        (parties[1], parties[1].hello(Lane.P2P, 0), Lane.P2P, 0),
        (parties[2], parties[0].hello(Lane.P2P, 2), None, None),  # a lower rank never connects
        (parties[2], parties[1].hello(Lane.P2P, 2), Lane.P2P, 0),  # rank 1 answers at rank 0's address
        (parties[2], parties[0].hello(Lane.P2P, 2), Lane.COLLECTIVE, 0),  # on the other connection
    ]
    for here, data, lane, peer in attempts:
        error = met(here, data, lane=lane, peer=peer)
        assert error.code is Code.COLLECTIVE_TAMPERED
        assert "rerouted or reflected" in error.message


def test_an_old_hello_beside_a_new_one_is_refused() -> None:
    """The attacker kept the hello of an earlier initialisation with the same name, ranks and incarnation."""
    here, old, new = meetings(2)[0], meetings(2)[1], meetings(2)[1]
    here.meet(new.hello(Lane.COLLECTIVE, 0), lane=None, peer=None)
    for data in (old.hello(Lane.P2P, 0), new.hello(Lane.COLLECTIVE, 0)):
        error = met(here, data)
        assert error.code is Code.COLLECTIVE_TAMPERED
        assert "sent two different hellos" in error.message


def test_old_hellos_on_both_lanes_are_found_by_the_confirmation() -> None:
    """Whoever replays has no keys; and who was left out derives others."""
    here, there = meetings(2)
    old = meetings(2)[1]
    for lane in Lane:
        here.meet(old.hello(lane, 0), lane=None, peer=None)
        there.meet(here.hello(lane, 1), lane=lane, peer=0)
    assert not here.schedule().confirms(Lane.P2P, 1, there.schedule().confirmation(Lane.P2P, 1, 0))
    assert not here.schedule().confirms(Lane.P2P, 1, os.urandom(32))


def test_a_rank_that_two_others_saw_differently_is_found_by_the_confirmation() -> None:
    """Rank 2 shows ranks 0 and 1 different contributions (or somebody replays to one of them): they notice."""
    parties, impostor = meetings(3), meetings(3)[2]
    kept = {(lane, 1): impostor.hello(lane, 1) for lane in Lane}

    def wire(lane: Lane, source: int, destination: int, message: bytes) -> bytes:
        return kept.get((lane, destination), message) if source == 2 and len(message) == HELLO_BYTES else message

    with pytest.raises(CollectiveError, match="other keys, though the same secret") as caught:
        shake_hands(parties, wire)
    assert caught.value.code is Code.COLLECTIVE_TAMPERED


def test_an_own_contribution_that_comes_back_as_a_peers_is_refused() -> None:
    here = meetings(2)[0]
    echo = replace(HELLO, contribution=Hello.parse(here.hello(Lane.P2P, 1)).contribution)
    for lane in Lane:
        here.meet(replace(echo, lane=lane).encode(KEY), lane=None, peer=None)
    with pytest.raises(CollectiveError) as caught:
        here.schedule()
    assert caught.value.code is Code.COLLECTIVE_TAMPERED


@pytest.mark.parametrize("turn", range(4), ids=["hello", "answer", "confirmation", "confirmation-back"])
def test_any_flip_in_any_message_ends_the_meeting(turn: int) -> None:
    length = HELLO_BYTES if turn < 2 else CONFIRM_BYTES
    for at in range(length):
        sent = 0

        def wire(lane: Lane, source: int, destination: int, message: bytes, at: int = at) -> bytes:
            nonlocal sent
            connection, number = divmod(sent, 2)
            sent += 1
            first_hellos = 4  # two connections, hello and answer each, come before the confirmations
            now = number == turn and connection == 0 if turn < 2 else sent - 1 == first_hellos + turn - 2
            return message[:at] + bytes([message[at] ^ 0x10]) + message[at + 1 :] if now else message

        with pytest.raises(GlasshouseError):
            shake_hands(meetings(2), wire)


def test_messages_out_of_turn_are_refused() -> None:
    one = ConnectionHandshake(meetings(2)[0])
    with pytest.raises(ValueError, match="128 are due"):
        one.receive(b"short")
    with pytest.raises(ValueError, match="no rank"):
        one.confirm()
    with pytest.raises(ValueError, match="both"):
        ConnectionHandshake(meetings(2)[0], lane=Lane.P2P)
    parties = meetings(2)
    here = ConnectionHandshake(parties[0])
    here.receive(ConnectionHandshake(parties[1], lane=Lane.P2P, peer=0).begin())
    with pytest.raises(ValueError, match="after the own one"):
        here.receive(bytes(CONFIRM_BYTES))


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Rendezvous(members(2)[0], b"short")


def test_a_forked_child_cannot_meet_in_its_parents_name() -> None:
    here = meetings(2)[0]

    def story() -> bool:
        with pytest.raises(ValueError, match="forked"):
            here.hello(Lane.P2P, 1)
        return not any(here._key)

    assert in_child(story)
