"""Seals a package in one pass over its content (spec/sealed-package.md 7, docs/adr/0002).

Every length follows from the sizes of the sources, so header and manifest are as long with zeros as with digests:
assets are streamed first, the index after them, and the front is written last. A file that was not finished has no
magic and is not a package.

One chunk is read and hashed while those before are encrypted and written: hash and cipher release the interpreter's
lock, so that the second thread nearly halves the time where there is a second core. Memory is five chunks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from io import UnsupportedOperation
from queue import SimpleQueue
from threading import Thread
from typing import BinaryIO, TypeAlias

from glasshouse.errors import Code, PackageError, UsageError
from glasshouse.package.content import content_hash
from glasshouse.package.index import INDEX_ID, Index, check_job
from glasshouse.package.layout import (
    DEFAULT_CHUNK_BYTES,
    MAX_ASSETS_BYTES,
    MAX_INDEX_BYTES,
    VERSION,
    Header,
    asset_key,
    chunk_count,
    key_commitment,
    sealed_size,
    stream_cipher,
)
from glasshouse.package.manifest import Manifest
from glasshouse.package.streams import write_all
from glasshouse.wire.canonical import Json
from glasshouse.wire.crypto import KEY_BYTES, TAG_BYTES, ChunkCipher, SigningKey, Suite, hpke_seal, sha256, zero
from glasshouse.wire.policy import Floor

Size: TypeAlias = int
Progress: TypeAlias = Callable[[int, int], None]

_WORTH_A_THREAD_BYTES = 1 << 17
# With two, each thread waits for the other to wake up at every chunk.
_BUFFERS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One file to be sealed."""

    path: str  # its name in the package
    bytes: Size  # its length; a source that turns out shorter or longer is refused
    open: Callable[[], BinaryIO]  # returns the content as a binary stream; called once, closed by the writer


@dataclass(frozen=True, kw_only=True, slots=True)
class SealedManifest:
    """What `write` made."""

    envelope: bytes  # the signed manifest, as it stands in the package
    manifest: Manifest  # the same, parsed


def write(
    out: BinaryIO,
    *,
    sources: Sequence[Source],
    job: dict[str, Json],
    workload: str,
    floor: Floor,
    owner: SigningKey,
    owner_sealing: bytes,
    recipients: Sequence[bytes],
    package_key: bytes | bytearray | memoryview,
    package_id: str,
    suite: Suite = Suite.AES_256_GCM,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    progress: Progress | None = None,
) -> SealedManifest:
    """Seal `sources` into `out`, from its beginning.

    Args:
        out: a seekable binary stream; what it held is replaced.
        sources: the files, in any order.
        job: the workload's parameters; canonical JSON, so no floats.
        workload, floor, owner, owner_sealing, recipients, package_id, suite, chunk_bytes: as `Manifest` has them.
        package_key: 32 random bytes, for this package alone.
        progress: called with (plaintext bytes done, plaintext bytes in all) after each chunk.

    Raises:
        PackageError: `package-path`, `package-limit` or `source-changed`.
        FormatError: `schema-invalid`.
        UsageError: `file-missing` when a source cannot be read.
        OSError: from `out`.
    """
    if len(package_key) != KEY_BYTES:
        raise UsageError(Code.USAGE, "a package key is 32 bytes")
    # A recipient's key that cannot be used would show only at the end of the training.
    for recipient in (*recipients, owner_sealing):
        hpke_seal(b"", recipient=recipient, info=b"")
    ordered = sorted(sources, key=lambda source: source.path.encode("utf-8", "surrogatepass"))
    draft = _draft(ordered, job, chunk_bytes)
    assets_bytes = sum(sealed_size(source.bytes, chunk_bytes) for source in ordered)
    if assets_bytes > MAX_ASSETS_BYTES:
        raise PackageError(Code.PACKAGE_LIMIT, f"{assets_bytes} bytes of assets; the limit is {MAX_ASSETS_BYTES}")
    manifest = Manifest(
        package_id=package_id,
        suite=suite,
        chunk_bytes=chunk_bytes,
        workload=workload,
        floor=floor,
        recipients=tuple(recipients),
        owner_signing=owner.public,
        owner_sealing=owner_sealing,
        key_commitment=key_commitment(package_key, package_id),
        index_sha256=bytes(32),
        index_bytes=sealed_size(len(draft.encode()), chunk_bytes),
        assets_bytes=assets_bytes,
    )
    header = manifest.header(len(manifest.sign(owner)))

    out.seek(header.assets_offset)
    digests = _seal_assets(header, package_key, ordered, out, progress)
    out.truncate()
    index = _draft(ordered, job, chunk_bytes, digests=digests, assets_offset=header.assets_offset)
    sealed_index = _seal_index(header, package_key, index.encode())
    manifest = replace(manifest, index_sha256=sha256(sealed_index))
    envelope = manifest.sign(owner)
    front = header.encode() + envelope + sealed_index
    if len(front) != header.assets_offset:
        raise AssertionError("the front of a package has another length than planned")
    out.seek(0)
    write_all(out, memoryview(front))
    out.flush()
    return SealedManifest(envelope=envelope, manifest=manifest)


def _draft(
    sources: Sequence[Source],
    job: dict[str, Json],
    chunk_bytes: int,
    *,
    digests: Sequence[bytes] | None = None,
    assets_offset: int = 0,
) -> Index:
    """Return the index; with zeros for digests it has its final length already."""
    known = digests or [bytes(32)] * len(sources)
    files = [(source.path, source.bytes, digest) for source, digest in zip(sources, known, strict=True)]
    index = Index.of(
        job=check_job(job), files=files, chunk_bytes=chunk_bytes, assets_offset=assets_offset, version=VERSION
    )
    if (size := sealed_size(len(index.encode()), chunk_bytes)) > MAX_INDEX_BYTES:
        raise PackageError(Code.PACKAGE_LIMIT, f"an index of {size} bytes; the limit is {MAX_INDEX_BYTES}")
    return index


def _seal_assets(
    header: Header,
    package_key: bytes | bytearray | memoryview,
    sources: Sequence[Source],
    out: BinaryIO,
    progress: Progress | None,
) -> list[bytes]:
    """Seal every source behind the other; return the digest of each one's plaintext."""
    chunk_bytes, total, done = header.chunk_bytes, sum(source.bytes for source in sources), 0
    digests: list[bytes] = []
    with _Pipeline(out, min(chunk_bytes, max((source.bytes for source in sources), default=0))) as pipeline:
        for number, source in enumerate(sources, start=1):
            digest, cipher = content_hash(header.version), _cipher(header, package_key, number)
            chunks = chunk_count(source.bytes, chunk_bytes)
            with _opened(source) as stream:
                before = _stamp(stream)
                for index in range(chunks):
                    buffer, size = pipeline.buffer(), min(chunk_bytes, source.bytes - index * chunk_bytes)
                    _fill(stream, buffer[:size], source)
                    digest.update(buffer[:size])
                    pipeline.put(_Chunk(cipher, index, index == chunks - 1, buffer, size))
                    done += size
                    if progress is not None:
                        progress(done, total)
                if stream.read(1) or _stamp(stream) != before:
                    raise _changed(source)
            digests.append(digest.digest())
    return digests


def _seal_index(header: Header, package_key: bytes | bytearray | memoryview, data: bytes) -> bytes:
    cipher, chunk_bytes = _cipher(header, package_key, INDEX_ID), header.chunk_bytes
    chunks = chunk_count(len(data), chunk_bytes)
    out = bytearray()
    for index in range(chunks):
        plain = data[index * chunk_bytes : (index + 1) * chunk_bytes]
        sealed = bytearray(len(plain) + TAG_BYTES)
        cipher.seal_into(index, last=index == chunks - 1, plaintext=plain, out=sealed)
        out += sealed
    return bytes(out)


def _cipher(header: Header, package_key: bytes | bytearray | memoryview, asset_id: int) -> ChunkCipher:
    binding = header.sha256
    key = asset_key(package_key, asset_id, header.suite, binding)
    return stream_cipher(suite=header.suite, key=key, header_sha256=binding, asset_id=asset_id)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The first `bytes` of a buffer, to be sealed."""

    cipher: ChunkCipher
    index: int
    last: bool
    buffer: memoryview
    bytes: Size


class _Pipeline:
    """Buffers of plaintext: one is filled while those before it are sealed and written in a second thread.

    Leaving it waits for that thread and wipes them.
    """

    def __init__(self, out: BinaryIO, largest: int) -> None:
        self._out = out
        self._plain = [memoryview(bytearray(largest)) for _ in range(_BUFFERS)]
        self._sealed = memoryview(bytearray(largest + TAG_BYTES))
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        for plain in self._plain:
            self._free.put(plain)
        self._filled: SimpleQueue[_Chunk | None] = SimpleQueue()
        self._error: BaseException | None = None
        # Handing over costs some tens of microseconds: neither small chunks nor a single core win them back.
        worth_it = largest >= _WORTH_A_THREAD_BYTES and _cores() > 1
        self._thread = Thread(target=self._write) if worth_it else None

    def buffer(self) -> memoryview:
        """Return a buffer that is free; raises what writing another one raised."""
        plain = self._free.get()
        if self._error is not None:
            raise self._error
        return plain

    def put(self, chunk: _Chunk) -> None:
        """Have a chunk sealed and written behind those before it; its buffer is free after that."""
        if self._thread is None:
            self._seal(chunk)
            self._free.put(chunk.buffer)
        else:
            self._filled.put(chunk)

    def __enter__(self) -> _Pipeline:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._thread is not None:
            self._filled.put(None)
            self._thread.join()
        for plain in self._plain:
            zero(plain)
        if kind is None and self._error is not None:
            raise self._error

    def _write(self) -> None:
        while (chunk := self._filled.get()) is not None:
            try:
                if self._error is None:
                    self._seal(chunk)
            except BaseException as error:
                self._error = error
            self._free.put(chunk.buffer)

    def _seal(self, chunk: _Chunk) -> None:
        part = self._sealed[: chunk.bytes + TAG_BYTES]
        chunk.cipher.seal_into(chunk.index, last=chunk.last, plaintext=chunk.buffer[: chunk.bytes], out=part)
        write_all(self._out, part)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _opened(source: Source) -> BinaryIO:
    try:
        return source.open()
    except OSError as error:
        raise _unreadable(source, error) from error


def _fill(stream: BinaryIO, piece: memoryview, source: Source) -> None:
    done = 0
    while done < len(piece):
        try:
            count = stream.readinto(piece[done:])  # type: ignore[attr-defined]  # typeshed: BinaryIO lacks it
        except OSError as error:
            raise _unreadable(source, error) from error
        if not count:
            raise _changed(source)
        done += count


def _stamp(stream: BinaryIO) -> tuple[int, ...] | None:
    """Return the kernel's record of a file's last change, or None for a stream that is no file."""
    try:
        status = os.fstat(stream.fileno())
    except (UnsupportedOperation, AttributeError):
        return None
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _unreadable(source: Source, error: OSError) -> UsageError:
    # Of an input: other errors of the system are taken for the output's.
    return UsageError(Code.FILE_MISSING, f"{source.path[:64]!a} cannot be read: {error.strerror}")


def _changed(source: Source) -> PackageError:
    return PackageError(
        Code.SOURCE_CHANGED,
        f"{source.path[:64]!a} changed while it was being sealed",
        hint="seal again when nothing writes to the inputs",
    )
