"""Chunked AEAD in the STREAM manner (Hoang, Reyhanitabar, Rogaway, Vizár 2015).

Chunk *i* of a stream is sealed under nonce = prefix (7 bytes) ‖ i (4 bytes, big endian) ‖ last flag (1 byte). Removing,
repeating, reordering or splicing chunks, and cutting the stream short, all change a nonce and so fail authentication.
A key and prefix seal one stream once.
"""

from __future__ import annotations

from enum import StrEnum

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from glasshouse.errors import Code, PackageError

KEY_BYTES = 32
TAG_BYTES = 16
PREFIX_BYTES = 7
MAX_CHUNKS = 2**32 - 1

_ZEROS = memoryview(bytes(1 << 16))


class Suite(StrEnum):
    """The bulk ciphers of sealed packages and outputs."""

    AES_256_GCM = "AES-256-GCM"
    CHACHA20_POLY1305 = "ChaCha20-Poly1305"


def zero(buffer: bytearray | memoryview) -> None:
    """Overwrite a writable buffer with zero bytes, in steps: a second buffer as large might not be had."""
    view = memoryview(buffer).cast("B")
    for at in range(0, len(view), len(_ZEROS)):
        piece = view[at : at + len(_ZEROS)]
        piece[:] = _ZEROS[: len(piece)]


def chunk_nonce(prefix: bytes, index: int, *, last: bool) -> bytes:
    """Return the 12 bytes under which chunk `index` of a stream is sealed."""
    if not 0 <= index <= MAX_CHUNKS:
        raise ValueError("chunk index out of range")
    return prefix + index.to_bytes(4, "big") + (b"\x01" if last else b"\x00")


class ChunkCipher:
    """Seals and opens the chunks of one stream.

    Args:
        key: 32 bytes, used for this stream only.
        prefix: 7 bytes of nonce; constant zero is fine where the key is fresh.
    """

    __slots__ = ("_associated_data", "_cipher", "_prefix")

    def __init__(
        self, *, suite: Suite, key: bytes | bytearray | memoryview, prefix: bytes, associated_data: bytes
    ) -> None:
        if len(key) != KEY_BYTES or len(prefix) != PREFIX_BYTES:
            raise ValueError("a stream takes a key of 32 bytes and a prefix of 7")
        self._cipher = AESGCM(key) if suite is Suite.AES_256_GCM else ChaCha20Poly1305(key)
        self._prefix = prefix
        self._associated_data = associated_data

    def seal_into(
        self, index: int, *, last: bool, plaintext: bytes | bytearray | memoryview, out: bytearray | memoryview
    ) -> int:
        """Seal one chunk into `out`, which is exactly `TAG_BYTES` longer; return the bytes written."""
        nonce = chunk_nonce(self._prefix, index, last=last)
        return self._cipher.encrypt_into(nonce, plaintext, self._associated_data, out)

    def open_into(
        self, index: int, *, last: bool, sealed: bytes | bytearray | memoryview, out: bytearray | memoryview
    ) -> int:
        """Verify and open one chunk into `out`, which is exactly `TAG_BYTES` shorter.

        Raises:
            PackageError: `package-tampered`; `out` is zero then, where the library leaves unverified plaintext.
        """
        try:
            nonce = chunk_nonce(self._prefix, index, last=last)
            return self._cipher.decrypt_into(nonce, sealed, self._associated_data, out)
        except InvalidTag:
            zero(out)
            raise PackageError(
                Code.PACKAGE_TAMPERED, f"chunk {index} is not what was sealed: changed, moved, cut or of another key"
            ) from None
