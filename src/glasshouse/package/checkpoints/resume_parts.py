"""What a leg is given of the checkpoint that it goes on from: the custodian's half (spec/checkpoints.md section 7).

Laws: nothing is unwrapped that the digest in the release does not cover; a content key is compared with its commitment
before any cipher has it.
"""

from __future__ import annotations

from glasshouse.errors import Code, FormatError, PackageError
from glasshouse.package.grant import ResumePart
from glasshouse.package.layout import check_chunk_bytes, plain_size
from glasshouse.wire.crypto import KEY_BYTES, RecipientKey, key_id, sha256
from glasshouse.wire.lines.checkpoint import CheckpointHeader, PartHeader, is_padded
from glasshouse.wire.lines.line_start import LineStart


def open_header(
    data: bytes, start: LineStart, *, deployment: str, manifest_sha256: bytes, machines: int, ranks: int
) -> CheckpointHeader:
    """Return the header of the checkpoint that a leg begins from, if it is the one of its release.

    Args:
        start: the EAR's.
        machines, ranks: the world of the release.

    Raises:
        PackageError: `checkpoint-tampered`, or `checkpoint-foreign` for one of another line, package or world.
    """
    if sha256(data) != start.checkpoint:
        raise PackageError(Code.CHECKPOINT_TAMPERED, "a header that is not the one of the checkpoint that was released")
    try:
        header = CheckpointHeader.parse(data)
    except FormatError as error:
        raise PackageError(Code.CHECKPOINT_TAMPERED, f"a checkpoint's header that is none: {error.message}") from None
    found = (header.line, header.deployment, header.manifest_sha256, header.seq, header.machines, header.ranks)
    if found != (start.id, deployment, manifest_sha256, start.seq, machines, ranks):
        raise PackageError(Code.CHECKPOINT_FOREIGN, "a checkpoint of another line, package or world")
    return header


def unwrap(front: bytes, header: CheckpointHeader, key: RecipientKey, *, rank: int, offset: int) -> ResumePart:
    """Check the front of a rank's part and open its content key; in the custodian alone.

    Args:
        front: what stands before the part's chunks.
        header: from `open_header`.
        key: the line's resume key.
        offset: where the part's chunks will lie.

    Raises:
        PackageError: `checkpoint-tampered` or `checkpoint-foreign`.
    """
    row = header.parts[rank]
    if sha256(front) != row.head_sha256:
        raise PackageError(Code.CHECKPOINT_TAMPERED, "a part that is not the one of its checkpoint")
    try:
        part = PartHeader.parse_front(front)
        header.check_part(part)
        content = key.open(dict(part.recipients).get(key_id(key.public), b""), info=part.info)
        if part.rank != rank or len(content) != KEY_BYTES or part.commitment(content) != part.key_commitment:
            raise PackageError(Code.CHECKPOINT_TAMPERED, "a part of another rank, or with a key that is not its own")
        size = plain_size(row.bytes - len(front), check_chunk_bytes(part.chunk_bytes))
        if size is None or not is_padded(size):
            raise PackageError(Code.CHECKPOINT_TAMPERED, "a part of an impossible length")
        return ResumePart(
            bytes=size,
            chunk_bytes=part.chunk_bytes,
            front_sha256=row.head_sha256,
            key=content,
            offset=offset,
            rank=rank,
            suite=part.suite,
        )
    except (FormatError, PackageError) as error:
        code = Code.CHECKPOINT_FOREIGN if error.code is Code.CHECKPOINT_FOREIGN else Code.CHECKPOINT_TAMPERED
        raise PackageError(code, f"a part of a checkpoint that does not open: {error.message}") from None
