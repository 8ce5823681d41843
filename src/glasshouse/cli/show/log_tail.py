"""The ends of a failed run's logs, shown to its owner: the reason that a code alone does not give."""

from __future__ import annotations

import os

from glasshouse.cli.show.output import printable
from glasshouse.errors import Code
from glasshouse.jobs.owner.files import open_regular
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.results.run_logs import last_lines
from glasshouse.wire.crypto import RecipientKey

_LINES = 8
_LINE_CHARS = 200
# Of a runtime's log, which comes from a machine that could write anything of any length.
_HINT_CHARS = 1000
_TAIL_BYTES = 1 << 16


def log_tail(folder: RunFolder, *, sealing: RecipientKey, owner_signing: bytes) -> tuple[list[str], bool]:
    """Return the last lines that an ended run's worker printed, and whether its receipt vouches for them.

    A log that cannot be read, or that its receipt contradicts, has none.
    """
    found, vouched = last_lines(folder, sealing=sealing, owner_signing=owner_signing)
    # What a progress bar drew over is not what stood there at the end.
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in found]
    return [_cut(line, _LINE_CHARS) for line in lines if line][-_LINES:], vouched


def runtime_hint(folder: RunFolder, code: Code) -> str | None:
    """Return what a runtime wrote into its log beneath the code that it ended with; None where it wrote nothing.

    Nothing vouches for it: the log is neither sealed nor signed.
    """
    try:
        with open_regular(folder.runtime_log) as log:
            log.seek(-min(_TAIL_BYTES, log.seek(0, os.SEEK_END)), os.SEEK_END)
            lines = log.read(_TAIL_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return None
    named = f"glasshouse runtime: {code.value}"
    after = max((number for number, line in enumerate(lines, 1) if line == named), default=len(lines))
    return _cut(lines[after], _HINT_CHARS) if after < len(lines) else None


def _cut(line: str, most: int) -> str:
    text = printable(line.expandtabs(4), keep="")
    return text if len(text) <= most else text[: most - 1] + "…"
