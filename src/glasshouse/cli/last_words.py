"""The end of a failed run's log, decrypted for its owner: the reason that a code alone does not give."""

from __future__ import annotations

from typing import TYPE_CHECKING

from glasshouse.cli.output import printable
from glasshouse.errors import GlasshouseError

if TYPE_CHECKING:
    from glasshouse.jobs.rundir import RunFolder, RunRecord
    from glasshouse.wire.hpke import RecipientKey

__all__ = ["last_words"]

_LINES = 8
_LINE_CHARS = 200
# The last words may stand in the segment before the last; more are not read, a log can be long.
_SEGMENTS = 3


def last_words(
    folder: RunFolder, record: RunRecord, *, sealing: RecipientKey, owner_signing: bytes
) -> tuple[list[str], bool]:
    """Return the last lines that a run's worker wrote, and whether its receipt vouches for them.

    A log that cannot be read, or that its receipt contradicts, has no last words.

    Args:
        folder, record: the run, which has ended.
        sealing: the owner's sealing key.
        owner_signing: the owner's public signing key.
    """
    from glasshouse.jobs.logs import named_segments, segments

    try:
        named = named_segments(folder, owner_signing=owner_signing)
        manifest_sha256 = bytes.fromhex(record.manifest_sha256)
        found = segments(folder, named.events[-_SEGMENTS:], sealing=sealing, manifest_sha256=manifest_sha256)
        text = b"".join(one.data for one in found).decode(errors="replace")
    except GlasshouseError:
        return [], False
    # What a progress bar drew over is not what stood there at the end.
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return [_shown(line) for line in lines if line][-_LINES:], named.vouched


def _shown(line: str) -> str:
    text = printable(line.expandtabs(4), keep="")
    return text if len(text) <= _LINE_CHARS else text[: _LINE_CHARS - 1] + "…"
