"""Headers: one encoding each, sentences for errors, and what a connection never carries."""

from __future__ import annotations

import struct

import pytest

from glasshouse.collectives.protocol.group_keys import ALL, Lane
from glasshouse.collectives.protocol.headers import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    Collective,
    Element,
    FrameHeader,
    FrameKind,
    ReductionCode,
    Suite,
    counted,
    digest,
    payload_bytes,
    set_chunk,
    set_counter,
    set_route,
)
from glasshouse.errors import Code, CollectiveError
from simulators.sealed_group import group, header

FULL = header(
    3,
    ALL,
    suite=Suite.CHACHA20_POLY1305,
    sequence=2**64 - 1,
    phase=255,
    payload_bytes=MAX_PAYLOAD_BYTES,
    counter=2**64 - 2,
    elements=2**63,
    chunk=2**32 - 1,
    tag=2**31,
    digest=b"\xff" * 16,
)


def test_a_header_is_64_bytes_and_reads_back() -> None:
    for head in (FULL, header(0, 1), FrameHeader(kind=FrameKind.BYE, source=0, destination=1)):
        packed = head.encode()
        assert len(packed) == HEADER_BYTES
        assert FrameHeader.parse(packed) == head


def test_each_chunk_varies_the_one_prepared_header() -> None:
    packed = header(0, 1).encode()
    set_chunk(packed, 4)
    set_counter(packed, 48, 9)
    found = FrameHeader.parse(packed)
    assert (found.chunk, found.payload_bytes, found.counter) == (4, 48, 9)
    assert found == header(0, 1, chunk=4, payload_bytes=48, counter=9)
    assert counted(packed) == (48, 9)


def test_each_peer_varies_it_too() -> None:
    packed = header(0, 1, chunk=3).encode()
    set_route(packed, phase=9, source=4, destination=ALL, elements=12)
    assert FrameHeader.parse(packed) == header(4, ALL, phase=9, chunk=3, elements=12)


@pytest.mark.parametrize(
    "at", range(7), ids=["version", "kind", "suite", "collective", "algorithm", "type", "reduction"]
)
def test_a_code_that_is_not_known_is_a_mismatch(at: int) -> None:
    packed = header(0, 1).encode()
    packed[at] = 250
    with pytest.raises(CollectiveError, match="does not have") as caught:
        FrameHeader.parse(packed)
    assert caught.value.code is Code.COLLECTIVE_MISMATCH


def test_a_number_that_does_not_fit_is_refused() -> None:
    for fields in ({"phase": 256}, {"chunk": 2**32}, {"sequence": 2**64}, {"tag": -1}):
        with pytest.raises(struct.error):
            header(0, 1, **fields).encode()
    with pytest.raises(ValueError, match="16 bytes"):
        header(0, 1, digest=b"short").encode()


def test_an_error_can_say_what_the_other_rank_does() -> None:
    assert header(0, 1).described() == "all_reduce(sum) of 50 float32"
    broadcast = header(
        0, ALL, collective=Collective.BROADCAST, reduction=ReductionCode.NONE, element=Element.INT64, elements=3
    )
    assert broadcast.described() == "broadcast of 3 int64"
    assert header(0, 1, collective=Collective.BARRIER, reduction=ReductionCode.NONE).described() == "barrier"
    assert header(0, 1, kind=FrameKind.BYE).described() == "its leave"
    assert header(0, 1, kind=FrameKind.ALERT).described() == "an alert"


def test_a_digest_differs_where_any_part_does() -> None:
    found = [
        digest(),
        digest(""),
        digest("a", "b"),
        digest("ab"),
        digest("b", "a"),
        digest("root", 1),
        digest("root", 11),
    ]
    assert len({*found}) == len(found)
    assert {len(each) for each in found} == {16}
    assert digest(1, "2") == digest("1", 2)


def test_a_length_beyond_the_limit_is_refused_before_anything_is_read() -> None:
    packed = header(0, 1).encode()
    set_counter(packed, MAX_PAYLOAD_BYTES, 0)
    assert payload_bytes(packed) == MAX_PAYLOAD_BYTES
    set_counter(packed, MAX_PAYLOAD_BYTES + 1, 0)
    with pytest.raises(CollectiveError) as caught:
        payload_bytes(packed)
    assert caught.value.code is Code.COLLECTIVE_TAMPERED


def test_a_connection_carries_what_its_peer_sends_to_this_rank_or_to_all() -> None:
    here = group(4)[1]
    assert here.route(Lane.COLLECTIVE, 3, header(3, 1).encode()) is here.opener(Lane.COLLECTIVE, 3)
    for_all = here.opener(Lane.COLLECTIVE, 3, Suite.CHACHA20_POLY1305, broadcast=True)
    assert here.route(Lane.COLLECTIVE, 3, FULL.encode()) is for_all
    assert here.route(Lane.P2P, 3, header(3, 1).encode()) is here.opener(Lane.P2P, 3)


@pytest.mark.parametrize(
    ("lane", "head"),
    [
        (Lane.COLLECTIVE, header(2, 1)),
        (Lane.COLLECTIVE, header(3, 2)),
        (Lane.COLLECTIVE, header(1, 3)),
        (Lane.P2P, header(3, ALL)),
    ],
    ids=["another-source", "for-another", "an-echo", "broadcast-between-two"],
)
def test_what_belongs_on_another_connection_is_refused(lane: Lane, head: FrameHeader) -> None:
    with pytest.raises(CollectiveError, match="rank 3") as caught:
        group(4)[1].route(lane, 3, head.encode())
    assert caught.value.code is Code.COLLECTIVE_TAMPERED


@pytest.mark.parametrize(("at", "value"), [(0, 2), (1, 0), (1, 6), (2, 0), (2, 3)])
def test_an_unknown_version_kind_or_suite_is_refused_on_a_connection(at: int, value: int) -> None:
    packed = header(3, 1).encode()
    packed[at] = value
    with pytest.raises(CollectiveError) as caught:
        group(4)[1].route(Lane.COLLECTIVE, 3, packed)
    assert caught.value.code is Code.COLLECTIVE_TAMPERED
