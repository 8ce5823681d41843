"""A checkpoint of a line, as the machines of a leg left it in the store: sealed parts and a header."""

from __future__ import annotations

import io
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from glasshouse.package.checkpoints.part_content import PartWriter
from glasshouse.package.checkpoints.part_sealer import PartSealer
from glasshouse.wire.crypto import sha256
from glasshouse.wire.lines.checkpoint import CheckpointHeader, PartHeader, Place, front_length, resume_key
from glasshouse.wire.lines.line_start import LineStart

CHUNK_BYTES = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class SealedCheckpoint:
    """What a store has of one, and what the next leg's release says of it."""

    header: CheckpointHeader
    parts: tuple[bytes, ...]
    plain: tuple[bytes, ...]  # of each part

    @property
    def start(self) -> LineStart:
        """Where a leg begins that goes on from it."""
        return LineStart(
            id=self.header.line, leg=self.header.leg + 1, seq=self.header.seq, checkpoint=self.header.digest
        )

    def fronts(self, *ranks: int) -> bytes:
        """Return what stands before the chunks of some parts."""
        return b"".join(part[: front_length(part)] for part in (self.parts[rank] for rank in ranks))


def part_of(files: dict[str, bytes]) -> bytes:
    """Return the plaintext of a part."""
    out = bytearray()
    writer = PartWriter(out.extend)
    for path, data in files.items():
        writer.begin(path)
        writer.update(data)
    writer.finish()
    return bytes(out)


def sealed_checkpoint(
    package_key: bytes,
    *,
    deployment: str,
    manifest_sha256: bytes,
    plain: Sequence[bytes] = (part_of({"state": b"where the training stood"}),),
    recipients: Sequence[bytes] = (),
    machines: int = 1,
    line: bytes | None = None,
    **other: Any,
) -> SealedCheckpoint:
    """Seal one of as many ranks as there are plaintexts; `other` goes into the header and the fronts."""
    place = Place(
        **{
            "deployment": deployment,
            "environment_sha256": bytes(32),
            "leg": 1,
            "line": line or secrets.token_bytes(32),
            "machines": machines,
            "manifest_sha256": manifest_sha256,
            "ranks": len(plain) // machines,
            "seq": 3,
            "step": 30,
            "previous": bytes(32),
        }
        | other
    )
    opener = resume_key(package_key, deployment=place.deployment, line=place.line)
    parts, rows = [], []
    for rank, content in enumerate(plain):
        out = io.BytesIO()
        keys = [*recipients, opener.public]
        sealer = PartSealer(out, place=place, rank=rank, recipients=keys, chunk_bytes=CHUNK_BYTES)
        sealer.update(content)
        rows.append(sealer.finish().row)
        parts.append(out.getvalue())
        assert PartHeader.parse_front(out.getvalue()[: front_length(parts[-1])]).rank == rank
        assert rows[-1].sha256 == sha256(parts[-1])
    header = CheckpointHeader(**place.shared(), environment_sha256=place.environment_sha256, parts=tuple(rows))
    return SealedCheckpoint(header=header, parts=tuple(parts), plain=tuple(plain))
