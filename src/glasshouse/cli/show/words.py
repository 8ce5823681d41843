"""Plain words for levels, outcomes and times; no verdict is ever worded without its level."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal

__all__ = [
    "ASSURANCE",
    "OUTCOME",
    "RAW",
    "asked_words",
    "bytes_text",
    "clock",
    "files_words",
    "left_out_words",
    "network_words",
    "usd_text",
    "verdict_words",
]

ASSURANCE = {
    "software": "measurements signed in the runtime; a host with root could read the run's memory and forge them",
    "tpm": "a TPM quote over boot chain and runtime; a host with root could read the run's memory",
    "cpu-tee": "a CPU report binds the runtime; what crosses to the GPU is visible to the host",
    "gpu-tee": "CPU and GPU reports bind the runtime; physical attacks remain",
}

OUTCOME = {
    "completed": "completed",
    "refused": "refused: the gate did not release the key",
    "failed": "failed",
    "interrupted": "interrupted",
    "residue": "residue: something of yours was found after zeroization",
    "lost": "lost: what stayed behind is not known",
}

_SHOWN_LEFT_OUT = 6

RAW = "UNPROTECTED: the raw leg, for comparison; inputs and outputs are in the clear on this machine"


def verdict_words(verdict: str | None, assurance: str | None) -> str:
    """Say what verification of a receipt came to, and at which level."""
    level = assurance or "none"
    return {
        "good": f"genuine and complete, at assurance {level}",
        "incomplete": f"incomplete: not countersigned by the broker; authentic at assurance {level}, not good",
        "not-completed": f"genuine, of a run that did not complete; assurance {level}",
        "invalid": "does not hold: believe nothing of it",
        "no-receipt": "none",
    }.get(verdict or "", "unknown")


def network_words(egress: Sequence[str]) -> str:
    """Say whom a worker may reach."""
    return ", ".join("its own group's machines, sealed" if peer == "group" else peer for peer in egress) or "none"


def files_words(disk: bool) -> str:
    """Say where a worker's files may lie."""
    return "memory, or the machine's disk where memory has too little room" if disk else "memory alone"


def left_out_words(left_out: Sequence[str]) -> str | None:
    """Name what of the inputs' folders is not packed, the first few of many; None for nothing."""
    shown = ", ".join(left_out[:_SHOWN_LEFT_OUT])
    more = len(left_out) - _SHOWN_LEFT_OUT
    return (shown + (f" and {more} more" if more > 0 else "")) or None


def asked_words(providers: Sequence[str]) -> str:
    """Return by which providers' word beside the journals' something is said."""
    return f" and by {', '.join(providers)}" if providers else "; no provider was heard, which takes an account's key"


def bytes_text(count: int) -> str:
    """Return a size for people, in powers of 1000."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError("unreachable")


def usd_text(amount: Decimal) -> str:
    """Return US dollars with three digits: at least to the cent, and no further than a hundredth of one."""
    if amount and abs(amount) < Decimal("0.00005"):
        return "under 0.0001 $"
    digits = min(4, max(2, 2 - amount.adjusted())) if amount else 0
    return f"{amount.quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP):f} $"


def clock(seconds: float) -> str:
    """Return a remaining time as a clock shows it."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
