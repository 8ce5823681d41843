"""Frames under attack, one at a time: whatever is done to one, it is refused before it is used."""

from __future__ import annotations

import copy
import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from glasshouse.collectives.protocol import traffic
from glasshouse.collectives.protocol.group_keys import ALL, Lane, next_key
from glasshouse.collectives.protocol.headers import (
    MAX_PAYLOAD_BYTES,
    TAG_BYTES,
    Collective,
    FrameHeader,
    FrameKind,
)
from glasshouse.collectives.protocol.traffic import REKEY_AFTER, FrameOpener, FrameSealer, Traffic
from glasshouse.errors import Code, CollectiveError
from glasshouse.wire.crypto import Suite
from simulators.sealed_group import group, header, meetings, open_frame, seal, shake_hands
from tools.forked import in_child

PLAINTEXT = b"a gradient, thirty-two bytes long"
SUITES = list(Suite)


def pair(suite: Suite = Suite.AES_256_GCM, **options: int) -> tuple[FrameSealer, FrameOpener]:
    here, there = group(2, **options)
    return here.sealer(Lane.COLLECTIVE, 1, suite), there.opener(Lane.COLLECTIVE, 0, suite)


def refused(opener: FrameOpener, frame: tuple[bytes, bytes], words: str, size: int | None = None) -> None:
    with pytest.raises(CollectiveError, match=words) as caught:
        open_frame(opener, frame, size=size)
    assert caught.value.code is Code.COLLECTIVE_TAMPERED
    assert "rank 0" in caught.value.message


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("size", [0, 1, 33, 100_000])
def test_what_was_sealed_is_opened(suite: Suite, size: int) -> None:
    sealer, opener = pair(suite)
    for _ in range(3):
        plaintext = os.urandom(size)
        frame = seal(sealer, plaintext, header(0, 1, suite=suite))
        assert open_frame(opener, frame) == plaintext
        assert size < 16 or plaintext[:16] not in frame[1]


def test_one_frame_for_all_is_opened_by_each_in_the_place_that_it_has_there() -> None:
    ranks = group(3)
    everyone, second = ranks[0].sealer(Lane.COLLECTIVE, ALL), ranks[0].sealer(Lane.COLLECTIVE, 2)
    alone = seal(second, b"for rank 2", header(0, 2))
    shared = [seal(everyone, bytes([number]), header(0, ALL)) for number in range(2)]
    for rank, frames in ((1, shared), (2, [shared[0], alone, shared[1]])):
        for frame in frames:
            opener = ranks[rank].route(Lane.COLLECTIVE, 0, frame[0])
            assert open_frame(opener, frame) in (b"for rank 2", b"\x00", b"\x01")


def test_an_expected_header_is_completed_to_equal_the_received_one() -> None:
    sealer, opener = pair()
    for chunk in range(2):
        head = header(0, 1, chunk=chunk)
        frame, expected = seal(sealer, PLAINTEXT, head), head.encode()
        opener.complete(expected, len(PLAINTEXT))
        assert expected == frame[0]
        assert open_frame(opener, frame) == PLAINTEXT


@pytest.mark.parametrize("suite", SUITES)
def test_no_bit_of_a_header_or_ciphertext_can_be_flipped(suite: Suite) -> None:
    for at in range(64):
        sealer, opener = pair(suite)
        packed, sealed = seal(sealer, PLAINTEXT, header(0, 1, suite=suite))
        changed = bytearray(packed)
        changed[at] ^= 0x40
        refused(opener, (bytes(changed), sealed), "not what it sealed")
    for at in (0, len(PLAINTEXT) - 1, len(PLAINTEXT), len(PLAINTEXT) + TAG_BYTES - 1):
        sealer, opener = pair(suite)
        packed, sealed = seal(sealer, PLAINTEXT, header(0, 1, suite=suite))
        damaged = bytearray(sealed)
        damaged[at] ^= 1
        refused(opener, (packed, bytes(damaged)), "changed on the way")


def test_frames_that_are_dropped_repeated_or_reordered_are_refused() -> None:
    for order in ([1], [0, 0], [0, 2], [0, 1, 0]):
        sealer, opener = pair()
        frames = [seal(sealer, PLAINTEXT, header(0, 1, chunk=chunk)) for chunk in range(3)]
        for index in order[:-1]:
            open_frame(opener, frames[index])
        refused(opener, frames[order[-1]], "dropped, repeated, reordered or put in")


def test_an_old_frame_with_the_counter_that_is_due_is_refused() -> None:
    """The attacker rewrites the counter in clear, so that a frame of an old step looks like the next one."""
    sealer, opener = pair()
    old = seal(sealer, PLAINTEXT, header(0, 1, sequence=1))
    due = seal(sealer, b"x" * len(PLAINTEXT), header(0, 1, sequence=2))
    open_frame(opener, old)
    refused(opener, (due[0], old[1]), "changed on the way")


def test_a_frame_of_another_rank_direction_lane_or_suite_is_refused() -> None:
    ranks = group(3)
    for place in ("other-source", "echo", "lane", "suite", "broadcast"):
        there, here = group(3)[1], ranks[0]
        opener = there.opener(Lane.COLLECTIVE, 0)
        sealer = {
            "other-source": lambda: ranks[2].sealer(Lane.COLLECTIVE, 1),
            "echo": lambda there=there: there.sealer(Lane.COLLECTIVE, 0),
            "lane": lambda here=here: here.sealer(Lane.P2P, 1),
            "suite": lambda here=here: here.sealer(Lane.COLLECTIVE, 1, Suite.CHACHA20_POLY1305),
            "broadcast": lambda here=here: here.sealer(Lane.COLLECTIVE, ALL),
        }[place]()
        refused(opener, seal(sealer, PLAINTEXT, header(0, 1)), "changed on the way")


def test_a_frame_of_an_earlier_initialisation_of_the_same_group_is_refused() -> None:
    """Fresh contributions: neither a restart nor the same group name again brings a key back."""
    before, again = group(2), group(2)
    frame = seal(before[0].sealer(Lane.COLLECTIVE, 1), PLAINTEXT, header(0, 1))
    refused(again[1].opener(Lane.COLLECTIVE, 0), frame, "changed on the way")


def test_a_payload_of_another_size_than_expected_is_refused() -> None:
    for size in (len(PLAINTEXT) - 1, len(PLAINTEXT) + 1):
        sealer, opener = pair()
        refused(opener, seal(sealer, PLAINTEXT, header(0, 1)), "not what it sealed", size=size)
    sealer, opener = pair()
    packed, sealed = seal(sealer, PLAINTEXT, header(0, 1))
    refused(opener, (packed, sealed[:-1]), "not what it sealed", size=len(PLAINTEXT))


def test_after_a_failure_the_stream_opens_nothing_more() -> None:
    sealer, opener = pair()
    good, late = (seal(sealer, PLAINTEXT, header(0, 1)) for _ in range(2))
    refused(opener, (good[0], bytes(len(good[1]))), "changed on the way")
    with pytest.raises(CollectiveError) as caught:
        opener.open_into(*good, bytearray(len(PLAINTEXT)))
    assert caught.value.code is Code.COLLECTIVE_ABORTED
    with pytest.raises(CollectiveError):
        opener.open_into(*late, bytearray(len(PLAINTEXT)))


@pytest.mark.parametrize("suite", SUITES)
def test_keys_change_as_frames_go_by_and_both_ends_follow(suite: Suite) -> None:
    sealer, opener = pair(suite, rekey_after=3)
    keys = set()
    for number in range(10):
        frame = seal(sealer, PLAINTEXT, header(0, 1, suite=suite))
        keys.add(bytes(sealer._key))
        assert open_frame(opener, frame) == PLAINTEXT, number
        assert bytes(opener._key) == bytes(sealer._key)
    assert len(keys) == 4


def test_ranks_that_rekey_at_different_frames_do_not_understand_each_other() -> None:
    parties = meetings(2)
    shake_hands(parties)
    here, there = Traffic(parties[0].schedule(), rekey_after=2), Traffic(parties[1].schedule(), rekey_after=3)
    sealer, opener = here.sealer(Lane.P2P, 1), there.opener(Lane.P2P, 0)
    frames = [seal(sealer, PLAINTEXT, header(0, 1)) for _ in range(3)]
    for frame in frames[:2]:
        open_frame(opener, frame)
    refused(opener, frames[2], "changed on the way")


def test_a_key_bears_no_more_frames_than_its_limit() -> None:
    for beyond in (0, REKEY_AFTER + 1):
        with pytest.raises(ValueError, match="frames a key"):
            pair(rekey_after=beyond)


def test_no_counter_is_used_twice_even_by_threads_that_forgot_to_lock() -> None:
    sealer, _ = pair()

    def counters(_: int) -> list[bytes]:
        return [seal(sealer, b"", header(0, 1))[0][16:24] for _ in range(500)]

    with ThreadPoolExecutor(4) as pool:
        found = [counter for some in pool.map(counters, range(4)) for counter in some]
    assert len(set(found)) == len(found) == 2000


def test_a_sealer_exists_once_and_is_not_copied() -> None:
    here, _ = group(2)
    sealer = here.sealer(Lane.COLLECTIVE, 1)
    assert here.sealer(Lane.COLLECTIVE, 1) is sealer
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="not copied"):
            attempt(sealer)


def test_a_second_traffic_over_the_same_keys_cannot_seal() -> None:
    parties = meetings(2)
    shake_hands(parties)
    Traffic(parties[0].schedule()).sealer(Lane.P2P, 1)
    with pytest.raises(ValueError, match="once"):
        Traffic(parties[0].schedule()).sealer(Lane.P2P, 1)


def test_buffers_that_are_not_a_frame_s_are_refused_and_cost_no_counter() -> None:
    sealer, opener = pair()
    packed = header(0, 1).encode()
    for plaintext, out, head in (
        (b"abc", bytearray(18), packed),
        (b"abc", bytearray(20), packed),
        (b"abc", bytearray(19), packed[:63]),
        (bytes(MAX_PAYLOAD_BYTES + 1), bytearray(MAX_PAYLOAD_BYTES + 17), packed),
    ):
        with pytest.raises(ValueError, match="not a frame"):
            sealer.seal_into(head, plaintext, out)
    assert open_frame(opener, seal(sealer, b"the first", header(0, 1))) == b"the first"


def test_a_cipher_of_the_callers_own_shares_key_counter_and_binding() -> None:
    """What a GPU seals, the library opens, and the other way round, in one stream."""
    suite = Suite.CHACHA20_POLY1305
    sealer, opener = pair(suite, rekey_after=2)
    for number in range(5):
        packed = header(0, 1, suite=suite, chunk=number).encode()
        reserved = sealer.reserve(packed, len(PLAINTEXT))
        sealed = ChaCha20Poly1305(reserved.key).encrypt(reserved.nonce, PLAINTEXT, reserved.associated_data)
        assert open_frame(opener, (bytes(packed), sealed)) == PLAINTEXT
        packed_back, sealed_back = seal(sealer, PLAINTEXT, header(0, 1, suite=suite))
        admitted = opener.admit(packed_back)
        opened = ChaCha20Poly1305(admitted.key).decrypt(admitted.nonce, sealed_back, admitted.associated_data)
        assert opened == PLAINTEXT


def test_an_admitted_frame_that_does_not_open_ends_the_stream() -> None:
    sealer, opener = pair(Suite.CHACHA20_POLY1305)
    head = header(0, 1, suite=Suite.CHACHA20_POLY1305)
    first, second = seal(sealer, PLAINTEXT, head), seal(sealer, PLAINTEXT, head)
    opener.admit(first[0])
    error = opener.refuse(first[0])
    assert error.code is Code.COLLECTIVE_TAMPERED
    assert "changed on the way" in error.message
    with pytest.raises(CollectiveError):
        opener.admit(second[0])


def test_frames_are_admitted_in_order_only() -> None:
    sealer, opener = pair(Suite.CHACHA20_POLY1305)
    head = header(0, 1, suite=Suite.CHACHA20_POLY1305)
    seal(sealer, PLAINTEXT, head)
    with pytest.raises(CollectiveError, match="dropped") as caught:
        opener.admit(seal(sealer, PLAINTEXT, head)[0])
    assert caught.value.code is Code.COLLECTIVE_TAMPERED


def test_a_key_of_aes_is_given_to_nobody() -> None:
    sealer, opener = pair()
    packed = header(0, 1).encode()
    with pytest.raises(ValueError, match="only keys of ChaCha20"):
        sealer.reserve(packed, 5)
    with pytest.raises(ValueError, match="only keys of ChaCha20"):
        opener.admit(header(0, 1).encode())


def test_a_forked_child_can_neither_seal_nor_open() -> None:
    """A DataLoader's child that sealed under its parent's counters would give two plaintexts one nonce."""
    here, there = group(2)
    sealer, opener = here.sealer(Lane.COLLECTIVE, 1), there.opener(Lane.COLLECTIVE, 0)
    frame = seal(sealer, PLAINTEXT, header(0, 1))

    def story() -> list[Code]:
        gone = []
        for attempt in (lambda: seal(sealer, b"child", header(0, 1)), lambda: opener.open_into(*frame, bytearray(33))):
            with pytest.raises(CollectiveError) as raised:
                attempt()
            gone.append(raised.value.code)
        assert not any(sealer._key)
        assert not any(opener._key)
        return gone

    assert in_child(story) == [Code.COLLECTIVE_ABORTED] * 2
    assert open_frame(opener, frame) == PLAINTEXT


def test_a_closed_group_has_no_keys() -> None:
    here, _ = group(2)
    sealer = here.sealer(Lane.COLLECTIVE, 1)
    here.forget()
    assert not any(sealer._key)
    with pytest.raises(CollectiveError) as caught:
        seal(sealer, PLAINTEXT, header(0, 1, collective=Collective.SEND))
    assert caught.value.code is Code.COLLECTIVE_ABORTED
    with pytest.raises(ValueError, match="forgotten"):
        here.sealer(Lane.P2P, 1)


def test_a_key_that_is_forgotten_while_it_is_replaced_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    sealer = FrameSealer(suite=Suite.CHACHA20_POLY1305, key=bytearray(range(32)), bound=bytes(32), rekey_after=1)
    packed = FrameHeader(
        kind=FrameKind.DATA, source=0, destination=1, sequence=0, suite=Suite.CHACHA20_POLY1305
    ).encode()
    sealer.reserve(packed, 0)

    def forgetful(key: bytes | bytearray, suite: Suite) -> bytes:
        sealer.forget()
        return next_key(key, suite)

    monkeypatch.setattr(traffic, "next_key", forgetful)
    for _ in range(2):
        with pytest.raises(CollectiveError, match="keys are gone"):
            sealer.reserve(packed, 0)
