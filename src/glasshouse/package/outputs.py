"""Sealed outputs and log segments: they leave the machine only to the manifest's recipients (spec/sealed-package.md 8).

Each is sealed under a fresh key, wrapped by HPKE once per recipient; who finds the file without a
recipient's private key opens nothing, and the host reads kind, number and size of it, but no name.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, TypeAlias

from glasshouse.errors import Code, FormatError, InternalError, PackageError
from glasshouse.package.layout import DEFAULT_CHUNK_BYTES, MAX_ASSETS_BYTES, chunk_count, plain_size
from glasshouse.package.output_header import (
    PRIVATE_BYTES,
    OutputHeader,
    OutputKind,
    commitment,
    output_info,
    private_block,
    read_private,
)
from glasshouse.package.streams import Positioned, size_of, write_all
from glasshouse.wire.crypto import (
    KEY_BYTES,
    TAG_BYTES,
    ChunkCipher,
    RecipientKey,
    Suite,
    hpke_seal,
    key_id,
    salted,
    zero,
)

Size: TypeAlias = int
Digest: TypeAlias = bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class SealedOutput:
    """What a finished output is, for the log and the receipt."""

    name: str  # as the worker called it; not for the public artifact
    kind: OutputKind  # what it is
    sequence: int  # its number among the run's outputs, or among its log segments
    bytes: Size  # plaintext length
    sha256: Digest  # digest of the plaintext; goes to no disk
    plain_hmac: Digest  # of that digest, under the salt that is sealed with the output
    sealed_sha256: Digest  # digest of the sealed file
    sealed_bytes: Size  # length of the sealed file


class ChunkSealer:
    """Seals a stream as its bytes arrive, chunk by chunk through one reused buffer of plaintext, which it wipes.

    Args:
        front: what stands before the chunks, which are bound to it by `cipher`.
        chunk_bytes: plaintext bytes of a full chunk, and of the buffer.
    """

    def __init__(self, out: BinaryIO, front: bytes, cipher: ChunkCipher, chunk_bytes: int) -> None:
        self._out, self._cipher = out, cipher
        self._sealed_digest = hashlib.sha256()
        self._bytes = self._sealed_bytes = self._index = self._filled = 0
        self._plain = memoryview(bytearray(chunk_bytes))
        self._sealed = memoryview(bytearray(chunk_bytes + TAG_BYTES))
        self._open = True
        self._write(memoryview(front))

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Take the next bytes of plaintext; the caller wipes its own buffer. Raises `OSError`."""
        self._check_open()
        view = memoryview(data).cast("B")
        self._bytes += len(view)
        done = 0
        while done < len(view):
            # A full chunk waits until more comes: only then it is known not to be the last.
            if self._filled == len(self._plain):
                self._emit(self._plain, last=False)
                self._filled = 0
            count = min(len(self._plain) - self._filled, len(view) - done)
            self._plain[self._filled : self._filled + count] = view[done : done + count]
            self._filled += count
            done += count

    def wipe(self) -> None:
        """Forget plaintext and key; may be called at any time and again."""
        zero(self._plain)
        if self._open:
            self._open = False
            del self._cipher  # OpenSSL cleanses its copy when the object goes

    def _end(self) -> None:
        """Seal the last chunk; raises `OSError`."""
        self._check_open()
        self._emit(self._plain[: self._filled], last=True)
        self._out.flush()

    def _emit(self, plain: memoryview, *, last: bool) -> None:
        part = self._sealed[: len(plain) + TAG_BYTES]
        self._cipher.seal_into(self._index, last=last, plaintext=plain, out=part)
        self._index += 1
        self._write(part)

    def _write(self, data: memoryview) -> None:
        write_all(self._out, data)
        self._sealed_digest.update(data)
        self._sealed_bytes += len(data)

    def _check_open(self) -> None:
        if not self._open:
            raise InternalError(Code.INTERNAL, "what was finished or wiped takes no more bytes")


class OutputSealer(ChunkSealer):
    """Seals one output as its bytes arrive.

    Args:
        recipients: HPKE public keys, from the owner-signed manifest alone.
        name: a relative path of at most 255 bytes.

    Raises:
        PackageError: `package-path` or `package-limit`.
        FormatError: `schema-invalid`.
    """

    def __init__(
        self,
        out: BinaryIO,
        *,
        recipients: Sequence[bytes],
        run_id: str,
        manifest_sha256: bytes,
        name: str,
        sequence: int,
        kind: OutputKind | str,
        suite: Suite = Suite.AES_256_GCM,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> None:
        self._name, self._kind, self._sequence = name, OutputKind(kind), sequence
        key, self._salt, private = fresh_key(), fresh_key(), bytearray()
        try:
            commit = commitment(key, run_id=run_id, manifest_sha256=manifest_sha256)
            info = output_info(run_id, manifest_sha256, self._kind, sequence, commit)
            private = private_block(key, self._salt, name)
            sealed = {key_id(each): hpke_seal(private, recipient=each, info=info) for each in recipients}
            header = OutputHeader(
                run_id=run_id,
                manifest_sha256=manifest_sha256,
                kind=self._kind,
                sequence=sequence,
                suite=suite,
                chunk_bytes=chunk_bytes,
                key_commitment=commit,
                recipients=tuple(sorted(sealed.items())),
            )
            cipher = header.cipher(key)
        finally:
            zero(private)
            zero(key)
        self._digest = hashlib.sha256()  # of the plaintext
        super().__init__(out, header.encode(), cipher, chunk_bytes)

    def update(self, data: bytes | bytearray | memoryview) -> None:
        super().update(data)
        self._digest.update(data)

    def finish(self) -> SealedOutput:
        """Seal the last chunk and wipe; raises `OSError`."""
        try:
            self._end()
            sha256 = self._digest.digest()
            plain_hmac = salted(self._salt, sha256)
        finally:
            self.wipe()
        return SealedOutput(
            name=self._name,
            kind=self._kind,
            sequence=self._sequence,
            bytes=self._bytes,
            sha256=sha256,
            plain_hmac=plain_hmac,
            sealed_sha256=self._sealed_digest.digest(),
            sealed_bytes=self._sealed_bytes,
        )

    def wipe(self) -> None:
        """Forget plaintext, salt and key; may be called at any time and again."""
        super().wipe()
        zero(self._salt)


class OpenedOutput:
    """A sealed output whose header has been checked and whose key is known.

    Attributes:
        name: as the worker called it; a checked relative path.
        salt: of the plaintext's digest, for `wire.crypto.salted`.
        bytes: plaintext length.
        sealed_sha256: digest of the sealed file as `copy_to` read it; None before.
    """

    def __init__(self, source: Positioned, header: OutputHeader, private: bytearray, sealed_bytes: int) -> None:
        self.salt, self.name = read_private(private)
        self.kind, self.sequence = header.kind, header.sequence
        self._source, self._offset, self._chunk_bytes = source, header.length, header.chunk_bytes
        plain_bytes = plain_size(sealed_bytes, header.chunk_bytes)
        if plain_bytes is None:
            raise PackageError(Code.OUTPUT_TAMPERED, "a sealed output of an impossible length")
        self.bytes: Size = plain_bytes
        self._cipher = header.cipher(private[:KEY_BYTES])
        self._header = header.encode()
        self.sealed_sha256: Digest | None = None

    def copy_to(self, out: BinaryIO) -> Digest:
        """Write the plaintext, chunk by authentic chunk, and return its SHA-256.

        Raises:
            PackageError: `output-tampered`; what was written by then is to be thrown away.
            OSError: from `out`.
        """
        # Of the very bytes that are opened: a file that is hashed first and opened then may change in between.
        digest, sealed_digest = hashlib.sha256(), hashlib.sha256(self._header)
        chunks = chunk_count(self.bytes, self._chunk_bytes)
        largest = min(self.bytes, self._chunk_bytes)
        plain, sealed = memoryview(bytearray(largest)), memoryview(bytearray(largest + TAG_BYTES))
        try:
            for index in range(chunks):
                length = min(self._chunk_bytes, self.bytes - index * self._chunk_bytes)
                part, piece = sealed[: length + TAG_BYTES], plain[:length]
                self._source.read_exactly(self._offset + index * (self._chunk_bytes + TAG_BYTES), part)
                sealed_digest.update(part)
                self._cipher.open_into(index, last=index == chunks - 1, sealed=part, out=piece)
                digest.update(piece)
                write_all(out, piece)
        except PackageError as error:
            raise PackageError(Code.OUTPUT_TAMPERED, f"a sealed output that does not open: {error.message}") from None
        finally:
            zero(plain)
        self.sealed_sha256 = sealed_digest.digest()
        return digest.digest()


def open_output(stream: BinaryIO, key: RecipientKey, *, run_id: str, manifest_sha256: bytes) -> OpenedOutput:
    """Check a sealed output's header and unwrap its key.

    Anyone can seal to a public key: that the output is the run's shows in the receipt, which names the sealed file's
    digest. Of another run or package it is refused.

    Raises:
        PackageError: `package-not-recognised`, `output-tampered`, `package-owner-mismatch`,
            `key-commitment-mismatch`, `package-path` or `package-limit`.
        FormatError: `too-large`, `not-canonical` or `schema-invalid`.
    """
    source, total = Positioned(stream), size_of(stream)
    if total > MAX_ASSETS_BYTES:
        raise PackageError(Code.PACKAGE_LIMIT, f"a sealed output of {total} bytes; the limit is {MAX_ASSETS_BYTES}")
    header = OutputHeader.read(source, total)
    if header.run_id != run_id or header.manifest_sha256 != manifest_sha256:
        raise PackageError(Code.OUTPUT_TAMPERED, "a sealed output of another run or package")
    sealed = dict(header.recipients).get(key_id(key.public))
    if sealed is None:
        raise PackageError(Code.PACKAGE_OWNER, "a sealed output that is not sealed to this key")
    try:
        private = bytearray(key.open(sealed, info=header.info))
    except FormatError:
        raise PackageError(Code.OUTPUT_TAMPERED, "a sealed output whose key does not open") from None
    try:
        if len(private) != PRIVATE_BYTES:
            raise PackageError(Code.OUTPUT_TAMPERED, "a sealed output whose key has another form")
        found = commitment(private[:KEY_BYTES], run_id=run_id, manifest_sha256=manifest_sha256)
        if not hmac.compare_digest(found, header.key_commitment):
            raise PackageError(Code.KEY_COMMITMENT, "a sealed output under another key than it commits to")
        return OpenedOutput(source, header, private, total - header.length)
    finally:
        zero(private)


def fresh_key() -> bytearray:
    """Draw a key, or a salt, into memory that can be wiped: `os.urandom` would leave it in an immutable object."""
    key = bytearray(KEY_BYTES)
    source = os.open("/dev/urandom", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.readv(source, [key]) != KEY_BYTES:
            raise InternalError(Code.INTERNAL, "the system gave no randomness")
    finally:
        os.close(source)
    return key
