"""One sealed asset as the ciphertext that it is, for who opens its chunks with a cipher of their own: on a GPU.

Laws: sealed bytes are copied into the caller's memory before anything looks at them, as everywhere
(`streams.Positioned`); what a chunk is opened with follows from its number alone, so that none opens in the place of
another.
Source: spec/sealed-package.md, section 4.
"""

from __future__ import annotations

from glasshouse.errors import Code, PackageError
from glasshouse.package.index import Entry
from glasshouse.package.layout import chunk_count, stream_binding, stream_nonce
from glasshouse.package.streams import Positioned
from glasshouse.wire.crypto import TAG_BYTES, Suite


class SealedAsset:
    """An asset's chunks, and what opens them. Holds the asset's key.

    Args:
        source: the whole package.
        chunk_bytes: plaintext bytes of every chunk but the last.
        key: the asset's key, 32 bytes.

    Attributes:
        entry, suite, chunk_bytes, header_sha256, key: as given.
        size: plaintext bytes.
        chunks: how many there are, at least one.
        associated_data: what every chunk is bound to.
    """

    def __init__(
        self, source: Positioned, entry: Entry, *, suite: Suite, chunk_bytes: int, header_sha256: bytes, key: bytes
    ) -> None:
        self.entry, self.suite, self.chunk_bytes = entry, suite, chunk_bytes
        self.header_sha256, self.key = header_sha256, key
        self.size = entry.bytes
        self.chunks = chunk_count(entry.bytes, chunk_bytes)
        self.associated_data = stream_binding(header_sha256, entry.id)
        self._source = source

    def plain_bytes(self, chunk: int) -> int:
        """Return the plaintext bytes of a chunk."""
        self._check(chunk)
        return min(self.chunk_bytes, self.size - chunk * self.chunk_bytes)

    def nonce(self, chunk: int) -> bytes:
        """Return the 12 bytes that a chunk is opened under."""
        self._check(chunk)
        return stream_nonce(chunk, last=chunk == self.chunks - 1)

    def read_sealed(self, chunk: int, out: memoryview) -> None:
        """Read sealed chunks, one behind the other, each ciphertext and tag, from the beginning of `chunk` on.

        Raises:
            PackageError: `package-truncated`.
        """
        self._check(chunk)
        self._source.read_exactly(self.entry.offset + chunk * (self.chunk_bytes + TAG_BYTES), out)

    def refused(self, chunk: int) -> PackageError:
        """Return the error of a chunk that did not open."""
        return PackageError(
            Code.PACKAGE_TAMPERED, f"chunk {chunk} is not what was sealed: changed, moved, cut or of another key"
        )

    def _check(self, chunk: int) -> None:
        if not 0 <= chunk < self.chunks:
            raise ValueError(f"an asset of {self.chunks} chunks has no chunk {chunk}")
