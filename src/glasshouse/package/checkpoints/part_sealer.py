"""Seals one rank's part of a checkpoint as its bytes arrive: the agent's half (spec/checkpoints.md sections 2 and 3).

Laws: recipients are the owner's and the line's resume key; the content key is gone when the part is whole, so that the
machine that wrote a checkpoint cannot open it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO

from glasshouse.errors import Code, RunError
from glasshouse.package.layout import DEFAULT_CHUNK_BYTES, bound_cipher, check_chunk_bytes
from glasshouse.package.outputs import ChunkSealer, fresh_key
from glasshouse.wire.crypto import Suite, hpke_seal, key_id, sha256, zero
from glasshouse.wire.lines.checkpoint import PartHeader, PartRow, Place, is_padded


@dataclass(frozen=True, kw_only=True, slots=True)
class SealedPart:
    """What a finished part is."""

    row: PartRow  # as the checkpoint's header names it
    plain_bytes: int


class PartSealer(ChunkSealer):
    """Seals one part.

    Args:
        place: which checkpoint of which line, with this machine's environment.
        recipients: HPKE public keys: those of the owner-signed manifest, and the resume key.

    Raises:
        PackageError: `package-limit`.
        FormatError: `schema-invalid`.
        OSError: from `out`.
    """

    def __init__(
        self,
        out: BinaryIO,
        *,
        place: Place,
        rank: int,
        recipients: Sequence[bytes],
        suite: Suite = Suite.AES_256_GCM,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> None:
        check_chunk_bytes(chunk_bytes)
        key = fresh_key()
        try:
            header = PartHeader(
                **place.shared(),
                environment_sha256=place.environment_sha256,
                rank=rank,
                suite=suite,
                chunk_bytes=chunk_bytes,
                key_commitment=bytes(32),
                recipients=(),
            )
            header = replace(header, key_commitment=header.commitment(key))
            info = header.info
            front = header.with_recipients(
                {key_id(each): hpke_seal(key, recipient=each, info=info) for each in recipients}
            ).front()
            self._head_sha256 = sha256(front)
            cipher = bound_cipher(suite=suite, key=key, binding=self._head_sha256)
        finally:
            zero(key)
        super().__init__(out, front, cipher, chunk_bytes)

    def finish(self) -> SealedPart:
        """Seal the last chunk and wipe.

        Raises:
            RunError: `worker-failed`: the plaintext is of no padded size, which would tell the host more.
            OSError: from `out`.
        """
        try:
            if not is_padded(self._bytes):
                raise RunError(Code.WORKER_FAILED, "the worker sent a part of a checkpoint that is not padded")
            self._end()
        finally:
            self.wipe()
        return SealedPart(
            row=PartRow(bytes=self._sealed_bytes, head_sha256=self._head_sha256, sha256=self._sealed_digest.digest()),
            plain_bytes=self._bytes,
        )
