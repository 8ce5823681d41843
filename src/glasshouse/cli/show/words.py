"""Text for levels, outcomes, sizes and times; no verdict is ever shown without its level."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

OUTCOME = {
    "completed": "completed",
    "refused": "refused: the gate did not release the key",
    "failed": "failed",
    "interrupted": "interrupted",
    "residue": "residue: something of yours was found after zeroization",
    "lost": "lost: what stayed behind is not known",
}

_SHOWN_LEFT_OUT = 6


def verdict_words(verdict: str | None, assurance: str | None) -> str:
    """Return what verification of a receipt came to, and at which level."""
    level = assurance or "none"
    return {
        "good": f"genuine and complete, at assurance {level}",
        "incomplete": f"incomplete: not countersigned by the broker; authentic at assurance {level}, not good",
        "not-completed": f"genuine, of a run that did not complete; assurance {level}",
        "invalid": "does not hold: believe nothing of it",
        "no-receipt": "none",
    }.get(verdict or "", "unknown")


def network_words(egress: Sequence[str]) -> str:
    """Return which addresses a worker may reach."""
    return ", ".join("its own group's machines, sealed" if peer == "group" else peer for peer in egress) or "none"


def files_words(disk: bool) -> str:
    """Return where a worker's files may lie."""
    return "memory, or the machine's disk where memory has too little room" if disk else "memory alone"


def left_out_words(left_out: Sequence[str]) -> str | None:
    """Return what of the inputs' folders is not packed, the first few of many; None for nothing."""
    shown = ", ".join(left_out[:_SHOWN_LEFT_OUT])
    more = len(left_out) - _SHOWN_LEFT_OUT
    return (shown + (f" and {more} more" if more > 0 else "")) or None


def asked_words(providers: Sequence[str]) -> str:
    """Return which providers were asked beside the journals here."""
    return f" and by {', '.join(providers)}" if providers else "; no provider was heard, which takes an account's key"


def again(home: Path | None) -> str:
    """Return what a proposed command repeats to use the same state home: ` --home DIR`, or nothing."""
    return "" if home is None else f" --home {shlex.quote(str(home))}"


def counted(number: int, noun: str) -> str:
    """Return a number of things: `1 file`, `2 files`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def bytes_text(count: int) -> str:
    """Return a size for people, in powers of 1000."""
    if count < 1000:
        return f"{count} B"
    power = min(3, (len(str(count)) - 1) // 3)
    return f"{count / 1000**power:.1f} {' kMG'[power]}B"


def clock(seconds: float) -> str:
    """Return a remaining time as a clock shows it."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
