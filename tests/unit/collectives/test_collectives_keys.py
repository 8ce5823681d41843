"""The key schedule: what every key hangs on, and that a key to seal with exists once."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest

from glasshouse.collectives.protocol.group_keys import ALL, Lane, Membership, Schedule, hello_key, next_key
from glasshouse.wire.crypto import Suite
from tools.forked import in_child

SECRET, OTHER = b"s" * 32, b"o" * 32
PARTS = [b"a" * 32, b"b" * 32, b"c" * 32]
MEMBER = Membership(group="0", ranks=(0, 1, 2), rank=0, incarnation=7)
AES = Suite.AES_256_GCM


def key(
    member: Membership = MEMBER, secret: bytes = SECRET, parts: list[bytes] = PARTS, suite: Suite = AES, to: int = 1
) -> bytes:
    return bytes(Schedule(member, secret, parts).traffic_key(suite, Lane.COLLECTIVE, member.rank, to))


def test_both_ends_derive_the_same_key() -> None:
    there = Schedule(replace(MEMBER, rank=1), SECRET, PARTS)
    assert there.traffic_key(AES, Lane.COLLECTIVE, 0, 1) == key()


def test_every_stream_has_a_key_of_its_own() -> None:
    schedule = Schedule(MEMBER, SECRET, PARTS)
    found = [
        bytes(schedule.traffic_key(suite, lane, source, destination))
        for suite in Suite
        for lane in Lane
        for source, destination in ((0, 1), (0, 2), (1, 0), (2, 0), (0, ALL), (1, ALL), (2, ALL))
        if not (lane is Lane.P2P and destination == ALL)
    ]
    assert len(set(found)) == len(found) == 2 * (7 + 4)


@pytest.mark.parametrize(
    "member",
    [
        replace(MEMBER, group="1"),
        replace(MEMBER, ranks=(0, 2, 1)),
        replace(MEMBER, ranks=(0, 1, 3)),
        replace(MEMBER, incarnation=8),
        replace(MEMBER, incarnation=7 + 2**32),
    ],
    ids=["name", "order", "ranks", "initialisation", "restart"],
)
def test_whatever_the_ranks_must_agree_on_changes_every_key(member: Membership) -> None:
    assert key(member) != key()


def test_secret_and_each_contribution_change_every_key() -> None:
    assert key(secret=OTHER) != key()
    for index in range(3):
        fresh = [part if at != index else b"fresh" + part[5:] for at, part in enumerate(PARTS)]
        assert key(parts=fresh) != key()
    assert key(parts=[PARTS[1], PARTS[0], PARTS[2]]) != key()


def test_a_name_cannot_flow_over_into_the_ranks() -> None:
    """Fields of variable length are length-prefixed: no two memberships have the same digest."""
    one = Membership(group="a", ranks=(0x62000000, 1), rank=0, incarnation=0)
    other = Membership(group="ab", ranks=(0, 1), rank=0, incarnation=0)
    assert one.digest() != other.digest()


def test_a_sealing_key_is_given_out_once() -> None:
    """Whoever had it a second time would count its nonces from zero again."""
    schedule = Schedule(MEMBER, SECRET, PARTS)
    schedule.traffic_key(AES, Lane.COLLECTIVE, 0, ALL)
    with pytest.raises(ValueError, match="once"):
        schedule.traffic_key(AES, Lane.COLLECTIVE, 0, ALL)
    schedule.traffic_key(AES, Lane.COLLECTIVE, 1, 0)
    schedule.traffic_key(AES, Lane.COLLECTIVE, 1, 0)  # opening twice repeats no nonce


@pytest.mark.parametrize(
    ("lane", "source", "destination"),
    [(Lane.P2P, 0, ALL), (Lane.P2P, 1, ALL), (Lane.COLLECTIVE, 0, 0), (Lane.COLLECTIVE, 1, 2), (Lane.P2P, 3, 0),
     (Lane.P2P, 0, 3), (Lane.COLLECTIVE, -1, 0)],
)  # fmt: skip
def test_a_stream_that_this_rank_is_no_end_of_has_no_key(lane: Lane, source: int, destination: int) -> None:
    with pytest.raises(ValueError, match="stream"):
        Schedule(MEMBER, SECRET, PARTS).traffic_key(AES, lane, source, destination)


def test_the_ratchet_gives_another_key_each_time_and_suites_do_not_meet() -> None:
    first = key()
    chain = [first, next_key(first, AES)]
    chain.append(next_key(chain[-1], AES))
    assert len({*chain, next_key(first, Suite.CHACHA20_POLY1305)}) == 4


def test_a_confirmation_holds_for_its_lane_and_direction_only() -> None:
    here, there = (Schedule(replace(MEMBER, rank=rank), SECRET, PARTS) for rank in (0, 1))
    shown = there.confirmation(Lane.P2P, 1, 0)
    assert here.confirms(Lane.P2P, 1, shown)
    assert not here.confirms(Lane.COLLECTIVE, 1, shown)
    assert not here.confirms(Lane.P2P, 2, shown)
    assert not here.confirms(Lane.P2P, 1, here.confirmation(Lane.P2P, 0, 1)), "an echo of the own one"
    assert not here.confirms(Lane.P2P, 1, shown[:-1] + bytes([shown[-1] ^ 1]))
    other = Schedule(replace(MEMBER, rank=1), SECRET, [*PARTS[:2], b"x" * 32])
    assert not here.confirms(Lane.P2P, 1, other.confirmation(Lane.P2P, 1, 0))


def test_the_hello_key_says_nothing_of_the_others() -> None:
    assert hello_key(SECRET) not in (SECRET, key())
    assert hello_key(SECRET) != hello_key(OTHER)


@pytest.mark.parametrize("parts", [PARTS[:2], [*PARTS, b"d" * 32], [*PARTS[:2], b"short"], [PARTS[0], *PARTS[:2]]])
def test_contributions_that_are_not_one_of_each_rank_are_refused(parts: list[bytes]) -> None:
    with pytest.raises(ValueError, match="contribution"):
        Schedule(MEMBER, SECRET, parts)


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Schedule(MEMBER, SECRET[:16], PARTS)


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": ()},
        {"ranks": tuple(range(4097))},
        {"ranks": (0, 1, 1)},
        {"ranks": (0, 1, -1)},
        {"ranks": (0, 1, 2**32)},
        {"rank": 3},
        {"rank": -1},
        {"incarnation": -1},
        {"incarnation": 2**64},
        {"group": "é" * 513},
    ],
    ids=str,
)
def test_a_membership_beyond_its_limits_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - ours, each with its own words
        replace(MEMBER, **change)  # type: ignore[arg-type]


def test_errors_call_a_rank_by_its_index_and_its_global_rank_where_they_differ() -> None:
    member = Membership(group="pair", ranks=(0, 6), rank=0, incarnation=0)
    assert [member.called(index) for index in (0, 1, 9)] == ["rank 0", "rank 1 (global rank 6)", "rank 9"]
    assert (member.size, member.peers) == (2, (1,))


def test_keys_are_not_copied() -> None:
    schedule = Schedule(MEMBER, SECRET, PARTS)
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="not copied"):
            attempt(schedule)


def test_a_forked_child_has_no_keys() -> None:
    schedule = Schedule(MEMBER, SECRET, PARTS)

    def story() -> bool:
        with pytest.raises(ValueError, match="forgotten"):
            schedule.traffic_key(AES, Lane.COLLECTIVE, 0, 1)
        return not any(schedule._root) and not any(schedule._confirmation)

    assert in_child(story)
    assert schedule.traffic_key(AES, Lane.COLLECTIVE, 0, 1), "the parent keeps its own"
