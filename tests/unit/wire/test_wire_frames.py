"""Frames between agent and worker: however they arrive, and whatever a worker that was taken over sends."""

from __future__ import annotations

from typing import Any

import pytest

from glasshouse.errors import Code, FormatError
from glasshouse.wire.frames import (
    CONTROL,
    DATA,
    MAX_CONTROL_BYTES,
    MAX_PAYLOAD_BYTES,
    Decoder,
    control,
    data_header,
)

MESSAGES: list[Any] = [{"type": "ready", "pid": 7}, {"type": "stop"}, None, [1, 2], {"text": "köln"}]
BODY = bytes(range(256)) * 4


def frames_of(data: bytes, step: int) -> list[tuple[int, Any]]:
    decoder = Decoder()
    found: list[tuple[int, Any]] = []
    for at in range(0, len(data), step):
        found += [(kind, bytes(v) if kind == DATA else v) for kind, v in decoder.feed(data[at : at + step])]
    return found


@pytest.mark.parametrize("step", [1, 2, 3, 5, 7, 1000, 10**6])
def test_frames_arrive_whole_however_they_are_cut(step: int) -> None:
    stream = b"".join(control(message) for message in MESSAGES) + data_header(len(BODY)) + BODY + control("end")
    expected = [*((CONTROL, message) for message in MESSAGES), (DATA, BODY), (CONTROL, "end")]
    assert frames_of(stream, step) == expected


def refusal(data: bytes) -> Code:
    with pytest.raises(FormatError) as caught:
        frames_of(data, 10**7)
    return caught.value.code


def frame(kind: int, payload: bytes, length: int | None = None) -> bytes:
    return (len(payload) if length is None else length).to_bytes(4, "big") + bytes([kind]) + payload


@pytest.mark.parametrize("kind", [0, 3, 255])
def test_a_frame_of_no_kind(kind: int) -> None:
    assert refusal(frame(kind, b"x")) is Code.SCHEMA


def test_an_empty_or_enormous_frame_is_refused_by_its_header_alone() -> None:
    assert refusal(frame(DATA, b"")) is Code.SCHEMA
    assert refusal(frame(DATA, b"", length=MAX_PAYLOAD_BYTES + 1)) is Code.SCHEMA
    assert refusal(frame(DATA, b"", length=2**32 - 1)) is Code.SCHEMA
    assert refusal(frame(CONTROL, b"", length=MAX_CONTROL_BYTES + 1)) is Code.TOO_LARGE


@pytest.mark.parametrize("payload", [b"{", b"\xff", b"{} ", b"1.5", b'{"a":1,"a":1}', b"NaN", b"[" * 5000])
def test_a_control_frame_is_canonical_json(payload: bytes) -> None:
    assert refusal(frame(CONTROL, payload)) in (Code.SCHEMA, Code.NOT_CANONICAL)


def test_the_largest_frames_there_may_be() -> None:
    body = b"x" * MAX_PAYLOAD_BYTES
    assert frames_of(data_header(len(body)) + body, 1 << 16) == [(DATA, body)]
    text = "x" * (MAX_CONTROL_BYTES - 2)
    assert frames_of(control(text), 1 << 16) == [(CONTROL, text)]
    with pytest.raises(ValueError, match="too long"):
        control(text + "x")
    for length in (0, -1, MAX_PAYLOAD_BYTES + 1):
        with pytest.raises(ValueError, match="1 MiB"):
            data_header(length)


def test_an_incomplete_frame_waits_and_can_be_wiped() -> None:
    decoder = Decoder()
    assert list(decoder.feed(data_header(10) + b"secret")) == []
    decoder.wipe()
    assert list(decoder.feed(control("hello"))) == [(CONTROL, "hello")]


def test_data_payloads_are_the_callers_to_wipe() -> None:
    decoder = Decoder()
    ((kind, payload),) = decoder.feed(data_header(6) + b"secret")
    assert kind == DATA
    assert isinstance(payload, bytearray)
    payload[:] = bytes(6)
