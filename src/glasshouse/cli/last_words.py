"""The end of a failed run's log, decrypted for its owner: the reason that a code alone does not give."""

from __future__ import annotations

from typing import TYPE_CHECKING

from glasshouse.cli.output import printable

if TYPE_CHECKING:
    from glasshouse.jobs.rundir import RunFolder, RunRecord
    from glasshouse.wire.hpke import RecipientKey

__all__ = ["last_words"]

_LINES = 8
_LINE_CHARS = 200


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
    from glasshouse.jobs.logs import last_lines

    found, vouched = last_lines(folder, record, sealing=sealing, owner_signing=owner_signing)
    # What a progress bar drew over is not what stood there at the end.
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in found]
    return [_shown(line) for line in lines if line][-_LINES:], vouched


def _shown(line: str) -> str:
    text = printable(line.expandtabs(4), keep="")
    return text if len(text) <= _LINE_CHARS else text[: _LINE_CHARS - 1] + "…"
