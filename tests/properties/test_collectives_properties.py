"""Whatever somebody between the ranks does to hellos and frames: nothing of it is used, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glasshouse.collectives.engine.failure import REASONS, Alert
from glasshouse.collectives.protocol.group_keys import ALL, Lane
from glasshouse.collectives.protocol.headers import (
    HEADER_BYTES,
    TAG_BYTES,
    Algorithm,
    Collective,
    Element,
    FrameHeader,
    FrameKind,
    ReductionCode,
    payload_bytes,
    set_counter,
)
from glasshouse.collectives.protocol.rendezvous import (
    CONFIRM_BYTES,
    HELLO_BYTES,
    ConnectionHandshake,
    Hello,
    Rendezvous,
)
from glasshouse.collectives.protocol.traffic import Traffic
from glasshouse.errors import Code, CollectiveError, FormatError, GlasshouseError
from glasshouse.wire.crypto import Suite
from simulators.sealed_group import SECRET, group, header, meetings, members, seal, shake_hands

BOUNDED = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
SIZES = st.one_of(st.just(0), st.integers(1, 40), st.integers(250, 260))
HEADERS = st.builds(
    FrameHeader,
    kind=st.sampled_from(FrameKind),
    source=st.integers(0, 2**16 - 1),
    destination=st.integers(0, 2**16 - 1),
    sequence=st.integers(0, 2**64 - 1),
    suite=st.sampled_from(Suite),
    collective=st.sampled_from(Collective),
    algorithm=st.sampled_from(Algorithm),
    element=st.sampled_from(Element),
    reduction=st.sampled_from(ReductionCode),
    phase=st.integers(0, 255),
    payload_bytes=st.integers(0, 2**24),
    counter=st.integers(0, 2**64 - 1),
    elements=st.integers(0, 2**64 - 1),
    chunk=st.integers(0, 2**32 - 1),
    tag=st.integers(0, 2**32 - 1),
    digest=st.binary(min_size=16, max_size=16),
)


@dataclass(frozen=True)
class Sent:
    """One frame that rank 0 sent on its connection with rank 1."""

    stream: tuple[bool, Suite]
    plaintext: bytes
    data: bytes

    @property
    def halves(self) -> tuple[bytes, bytes]:
        return self.data[:HEADER_BYTES], self.data[HEADER_BYTES:]


# What a rank sends: to the other alone or to all, under either suite, of some size.
STEPS = st.lists(st.tuples(st.booleans(), st.sampled_from(Suite), SIZES), min_size=1, max_size=8)


def send(traffic: Traffic, steps: Sequence[tuple[bool, Suite, int]], source: int = 0, to: int = 1) -> list[Sent]:
    found = []
    for number, (for_all, suite, size) in enumerate(steps):
        destination = ALL if for_all else to
        plaintext = bytes((number * 37 + at) % 255 + 1 for at in range(size))
        head = header(source, destination, suite=suite, sequence=number)
        packed, sealed = seal(traffic.sealer(Lane.COLLECTIVE, destination, suite), plaintext, head)
        found.append(Sent((for_all, suite), plaintext, packed + sealed))
    return found


def read(
    traffic: Traffic, frames: Sequence[bytes]
) -> tuple[list[tuple[tuple[bool, Suite], bytes]], CollectiveError | None]:
    """Read a connection as a rank does; return what was opened before the first refusal, and the refusal."""
    opened = []
    for frame in frames:
        packed, sealed = frame[:HEADER_BYTES], frame[HEADER_BYTES:]
        out = bytearray()
        try:
            opener = traffic.route(Lane.COLLECTIVE, 0, packed)
            out = bytearray(b"\xaa" * payload_bytes(packed))
            opener.open_into(packed, sealed, out)
            head = FrameHeader.parse(packed)
        except CollectiveError as error:
            assert not any(out), "unverified plaintext was left in the destination"
            return opened, error
        opened.append(((head.destination == ALL, head.suite), bytes(out)))
    return opened, None


def honest(sent: Sequence[Sent], opened: Sequence[tuple[tuple[bool, Suite], bytes]]) -> bool:
    """Return whether what was opened is, stream by stream, the beginning of what was sent."""
    for stream in {each.stream for each in sent}:
        said = [each.plaintext for each in sent if each.stream == stream]
        heard = [plaintext for at, plaintext in opened if at == stream]
        if heard != said[: len(heard)]:
            return False
    return {at for at, _ in opened} <= {each.stream for each in sent}


@BOUNDED
@given(steps=STEPS, rekey=st.integers(1, 4))
def test_what_is_sent_is_what_is_opened_across_any_rekey(steps: Any, rekey: int) -> None:
    here, there = group(2, rekey_after=rekey)
    sent = send(here, steps)
    opened, error = read(there, [each.data for each in sent])
    assert error is None
    assert opened == [(each.stream, each.plaintext) for each in sent]


@BOUNDED
@given(steps=STEPS, data=st.data())
def test_one_flipped_bit_anywhere_is_refused_at_its_frame(steps: Any, data: st.DataObject) -> None:
    here, there = group(2)
    sent = send(here, steps)
    frames = [bytearray(each.data) for each in sent]
    victim = data.draw(st.integers(0, len(frames) - 1))
    at = data.draw(st.integers(0, len(frames[victim]) * 8 - 1))
    frames[victim][at // 8] ^= 1 << at % 8
    opened, error = read(there, [bytes(frame) for frame in frames])
    assert error is not None
    assert error.code is Code.COLLECTIVE_TAMPERED
    assert len(opened) == victim
    assert honest(sent, opened)


@BOUNDED
@given(steps=STEPS, order=st.lists(st.integers(0, 7), max_size=12))
def test_dropped_repeated_and_reordered_frames_never_open_out_of_their_place(steps: Any, order: list[int]) -> None:
    """The network delivers any of the frames, in any order and any number of times."""
    here, there = group(2)
    sent = send(here, steps)
    delivered = [sent[index % len(sent)] for index in order]
    opened, error = read(there, [each.data for each in delivered])
    assert honest(sent, opened)
    in_place = True
    due = dict.fromkeys({each.stream for each in sent}, 0)
    streams = {stream: [each for each in sent if each.stream == stream] for stream in due}
    for each in delivered:
        in_place &= streams[each.stream][due[each.stream] :][:1] == [each]
        due[each.stream] += 1
    assert (error is None) == in_place, "refused exactly if a stream was not delivered as it was sent"


@BOUNDED
@given(steps=STEPS, data=st.data())
def test_spliced_reflected_and_foreign_frames_are_refused(steps: Any, data: st.DataObject) -> None:
    """Any frame of any rank, direction, step or earlier group, with its header rewritten to be the one that is due."""
    ranks, earlier = group(3), group(3)
    sent = send(ranks[0], steps)
    victim = data.draw(st.integers(0, len(sent) - 1))
    foreign = {
        "an old step": lambda: sent[data.draw(st.integers(0, len(sent) - 1))],
        "reflected": lambda: send(ranks[1], steps, source=1, to=0)[victim],
        "another rank": lambda: send(ranks[2], steps, source=2, to=1)[victim],
        "an earlier group": lambda: send(earlier[0], steps)[victim],
    }[data.draw(st.sampled_from(["an old step", "reflected", "another rank", "an earlier group"]))]()
    rewritten = data.draw(st.booleans())
    size = len(foreign.data) - HEADER_BYTES - TAG_BYTES
    head = bytearray(sent[victim].data[:HEADER_BYTES] if rewritten else foreign.data[:HEADER_BYTES])
    if rewritten:
        set_counter(head, size, int.from_bytes(head[16:24], "big"))
    frame = bytes(head) + foreign.data[HEADER_BYTES:]
    frames = [each.data for each in sent]
    if frame == frames[victim]:
        return
    opened, error = read(ranks[1], [*frames[:victim], frame, *frames[victim + 1 :]])
    assert error is not None
    assert error.code is Code.COLLECTIVE_TAMPERED
    assert honest(sent, opened)


@BOUNDED
@given(size=SIZES, given_size=SIZES, suite=st.sampled_from(Suite))
def test_a_frame_of_another_size_than_the_destination_is_refused(size: int, given_size: int, suite: Suite) -> None:
    here, there = group(2)
    (sent,) = send(here, [(False, suite, size)])
    out = bytearray(b"\xaa" * given_size)
    opener = there.opener(Lane.COLLECTIVE, 0, suite)
    if size == given_size:
        opener.open_into(*sent.halves, out)
        assert bytes(out) == sent.plaintext
        return
    with pytest.raises(CollectiveError) as caught:
        opener.open_into(*sent.halves, out)
    assert caught.value.code is Code.COLLECTIVE_TAMPERED
    assert not any(out)


@BOUNDED
@given(frame=st.binary(min_size=HEADER_BYTES, max_size=200))
def test_arbitrary_bytes_never_open(frame: bytes) -> None:
    _, there = group(2)
    opened, error = read(there, [frame])
    assert opened == []
    assert error is not None
    assert error.code is Code.COLLECTIVE_TAMPERED


@BOUNDED
@given(head=HEADERS)
def test_every_header_reads_back(head: FrameHeader) -> None:
    assert FrameHeader.parse(head.encode()) == head


@BOUNDED
@given(data=st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_a_header_is_refused_or_has_one_encoding(data: bytes) -> None:
    try:
        head = FrameHeader.parse(data)
    except CollectiveError as error:
        assert error.code is Code.COLLECTIVE_MISMATCH  # noqa: PT017 - one of two outcomes
        return
    assert head.encode() == data


@BOUNDED
@given(
    reason=st.sampled_from(sorted(REASONS)),
    detected_by=st.integers(0, 4095),
    culprit=st.none() | st.integers(0, 4095),
    operation=st.none() | st.integers(0, 2**64 - 2),
    text=st.text(max_size=600),
)
def test_an_alert_reads_back_as_far_as_its_text_fits(text: str, **fields: Any) -> None:
    alert = Alert(text=text, **fields)
    found = Alert.parse(alert.encode())
    assert Alert.parse(found.encode()) == found
    assert found.text.isprintable()
    assert (found.reason, found.detected_by, found.culprit, found.operation) == (
        alert.reason,
        alert.detected_by,
        alert.culprit,
        alert.operation,
    )


@BOUNDED
@given(payload=st.binary(max_size=600) | st.binary(min_size=512, max_size=512))
def test_an_alert_payload_is_refused_or_has_one_encoding(payload: bytes) -> None:
    try:
        alert = Alert.parse(payload)
    except CollectiveError:
        return
    assert alert.encode() == payload


@dataclass(frozen=True)
class Message:
    """One handshake message on its way."""

    lane: Lane
    source: int
    destination: int
    data: bytes


def listen(parties: Sequence[Rendezvous]) -> list[Message]:
    """Everything that is said in an honest handshake, in order."""
    heard: list[Message] = []

    def wire(lane: Lane, source: int, destination: int, message: bytes) -> bytes:
        heard.append(Message(lane, source, destination, message))
        return message

    shake_hands(parties, wire)
    return heard


ATTACKS: dict[str, Callable[[Message, list[Message], list[Message], st.DataObject], bytes]] = {
    "flip": lambda now, said, old, data: _flipped(now.data, data.draw(st.integers(0, len(now.data) * 8 - 1))),
    "replay within": lambda now, said, old, data: data.draw(st.sampled_from(said)).data,
    "replay an earlier meeting": lambda now, said, old, data: data.draw(st.sampled_from(old)).data,
    "random": lambda now, said, old, data: data.draw(st.binary(min_size=len(now.data), max_size=len(now.data))),
}


def _flipped(message: bytes, at: int) -> bytes:
    changed = bytearray(message)
    changed[at // 8] ^= 1 << at % 8
    return bytes(changed)


@BOUNDED
@given(size=st.integers(2, 3), data=st.data())
def test_a_handshake_in_which_one_message_is_another_never_ends_in_keys_for_all(size: int, data: st.DataObject) -> None:
    old = listen(meetings(size))
    parties = meetings(size)
    said: list[Message] = []
    victim = data.draw(st.integers(0, size * (size - 1) * 2 - 1))
    attack = ATTACKS[data.draw(st.sampled_from(sorted(ATTACKS)))]
    touched = False

    def wire(lane: Lane, source: int, destination: int, message: bytes) -> bytes:
        nonlocal touched
        said.append(now := Message(lane, source, destination, message))
        if len(said) - 1 != victim:
            return message
        fitting = [each for each in said if len(each.data) == len(message)]
        before = [each for each in old if len(each.data) == len(message)]
        put = attack(now, fitting, before, data)
        touched = put != message
        return put

    try:
        shake_hands(parties, wire)
    except GlasshouseError as error:
        assert touched
        assert isinstance(error, CollectiveError | FormatError)  # noqa: PT017 - one of two outcomes
    else:
        assert not touched


@BOUNDED
@given(data=st.binary(min_size=HELLO_BYTES, max_size=HELLO_BYTES) | st.binary(max_size=300))
def test_arbitrary_bytes_are_a_stranger(data: bytes) -> None:
    meeting = meetings(2)[0]
    with pytest.raises(FormatError):
        meeting.meet(data, lane=None, peer=None)
    assert meeting.missing == (1,)


@BOUNDED
@given(
    lane=st.sampled_from(Lane),
    source=st.integers(0, 2**16 - 1),
    destination=st.integers(0, 2**16 - 1),
    size=st.integers(0, 2**32 - 1),
    incarnation=st.integers(0, 2**64 - 1),
    digest=st.binary(min_size=32, max_size=32),
    contribution=st.binary(min_size=32, max_size=32),
)
def test_every_hello_reads_back_and_only_the_one_that_fits_is_met(digest: bytes, **fields: Any) -> None:
    hello = Hello(group=digest, **fields)
    key = bytes(range(32))
    assert Hello.parse(hello.encode(key)) == hello
    with pytest.raises(CollectiveError) as caught:
        Rendezvous(members(2)[0], SECRET).meet(hello.encode(key), lane=None, peer=None)
    assert caught.value.code is Code.GROUP_MISMATCH


@BOUNDED
@given(confirmation=st.binary(min_size=CONFIRM_BYTES, max_size=CONFIRM_BYTES))
def test_no_guess_confirms(confirmation: bytes) -> None:
    parties = meetings(2)
    greetings = [(ConnectionHandshake(parties[1], lane=lane, peer=0), ConnectionHandshake(parties[0])) for lane in Lane]
    for there, here in greetings:
        there.receive(here.receive(there.begin()))
    _, here = greetings[0]
    here.confirm()
    with pytest.raises(CollectiveError) as caught:
        here.receive(confirmation)
    assert caught.value.code is Code.COLLECTIVE_TAMPERED
    assert not here.done
