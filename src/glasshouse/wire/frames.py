"""Frames between agent and worker: length (4 bytes, big endian) ‖ kind (1 byte) ‖ payload."""

from __future__ import annotations

from collections.abc import Iterator

from glasshouse.errors import Code, FormatError
from glasshouse.wire.canonical import Json, decode, encode

CONTROL = 1
DATA = 2
MAX_PAYLOAD_BYTES = 1 << 20
MAX_CONTROL_BYTES = 1 << 18  # a row for each of 1,024 ranks


def control(message: Json) -> bytes:
    """Return a control frame: one canonical JSON value."""
    payload = encode(message)
    if len(payload) > MAX_CONTROL_BYTES:
        raise ValueError("a control message that is too long")
    return _header(len(payload), CONTROL) + payload


def data_header(length: int) -> bytes:
    """Return the header of a data frame; the caller sends the payload from its own buffer."""
    if not 0 < length <= MAX_PAYLOAD_BYTES:
        raise ValueError("a data frame carries 1 byte to 1 MiB")
    return _header(length, DATA)


def _header(length: int, kind: int) -> bytes:
    return length.to_bytes(4, "big") + bytes([kind])


class Decoder:
    """Cuts a byte stream into frames; keeps one incomplete frame, maybe plaintext, in a buffer that `wipe` zeroes."""

    HEADER_BYTES = 5

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, received: bytes | bytearray | memoryview) -> Iterator[tuple[int, Json | bytearray]]:
        """Yield ``(CONTROL, value)`` and ``(DATA, bytearray)`` for each frame completed by `received`.

        The caller zeroes each data payload when it is done with it.

        Raises:
            FormatError: `too-large` or `schema-invalid`.
        """
        self._buffer += received
        while len(self._buffer) >= self.HEADER_BYTES:
            length, kind = int.from_bytes(self._buffer[:4], "big"), self._buffer[4]
            if kind not in (CONTROL, DATA) or not 0 < length <= MAX_PAYLOAD_BYTES:
                raise FormatError(Code.SCHEMA, "not a frame")
            if kind == CONTROL and length > MAX_CONTROL_BYTES:
                raise FormatError(Code.TOO_LARGE, "a control message that is too long")
            end = self.HEADER_BYTES + length
            if len(self._buffer) < end:
                return
            payload = self._buffer[self.HEADER_BYTES : end]
            self._buffer[:end] = bytes(end)
            del self._buffer[:end]
            yield (kind, payload) if kind == DATA else (kind, decode(payload, max_bytes=MAX_CONTROL_BYTES))

    @property
    def within(self) -> bool:
        """Whether the beginning of a frame is kept."""
        return bool(self._buffer)

    def wipe(self) -> None:
        """Zero and drop what is kept."""
        self._buffer[:] = bytes(len(self._buffer))
        self._buffer.clear()
