"""Three other looks at the same blocks, none of which is the result (spec/measurement.md, section 6)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glasshouse_bench.estimate import Estimate, estimate
from glasshouse_bench.sessions import Blocks

__all__ = ["Sensitivity", "sensitivity", "trimmed_contrast"]

DRAWS = 1999
TRIM = 0.1
_DOMAIN = b"glasshouse/slots/v1/randomisation\x00"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """The three checks.

    Args:
        trimmed: from 10 % trimmed block contrasts, which bunched cost escapes; None where a session has no whole block.
        processor: from the processor time of all steps; None where an arm used none.
        randomisation_p: of blocks whose two orders were drawn the other way; small too where the process pairs differ.
    """

    trimmed: Estimate | None
    processor: Estimate | None
    randomisation_p: float


def sensitivity(sessions: Sequence[Blocks], *, seed: bytes) -> Sensitivity:
    """Return the three checks over the blocks of all complete sessions.

    Args:
        seed: of the design; the draws of the randomisation test follow from it.
    """
    trimmed = [trimmed_contrast(blocks) for blocks in sessions]
    whole = [value for value in trimmed if value is not None]
    used = all(blocks.cpu_ns.sum(axis=0).all() for blocks in sessions)
    return Sensitivity(
        trimmed=estimate(whole) if len(whole) == len(trimmed) else None,
        processor=estimate([blocks.cpu_contrast for blocks in sessions]) if used else None,
        randomisation_p=_randomisation(sessions, seed),
    )


def trimmed_contrast(blocks: Blocks) -> float | None:
    """Return the mean of the block contrasts without the ⌊n/10⌋ smallest and largest; None where no block has both."""
    both = blocks.steps.all(axis=1)
    if not both.any():
        return None
    means = np.log(blocks.time_ns[both] / blocks.steps[both])
    ordered = np.sort(means[:, 1] - means[:, 0])
    cut = math.floor(TRIM * len(ordered) + 1e-9)
    return float(ordered[cut : len(ordered) - cut].mean())


def _randomisation(sessions: Sequence[Blocks], seed: bytes) -> float:
    """Return p = (1 + #{|statistic| ≥ |actual|})/(draws + 1), where a draw exchanges the arms of random blocks."""
    total = np.zeros(DRAWS)
    actual = 0.0
    for number, blocks in enumerate(sessions):
        exchange = _bits(seed, number, len(blocks.steps))
        sums = []
        for amounts in (blocks.time_ns, blocks.steps):
            # Column 0 takes what column 1 loses, in each block that is exchanged.
            moved = exchange @ (amounts[:, 1] - amounts[:, 0]).astype(float)
            raw, protected = amounts.sum(axis=0)
            sums.append((raw + moved, protected - moved))
        (time_r, time_p), (steps_r, steps_p) = sums
        with np.errstate(divide="ignore", invalid="ignore"):
            total += np.log(time_p / steps_p) - np.log(time_r / steps_r)
        actual += blocks.contrast
    # A draw in which an arm keeps no step has no statistic, and counts against a difference.
    extreme = ~np.isfinite(total) | (np.abs(total) >= abs(actual) * (1 - 1e-9))
    return float((1 + np.count_nonzero(extreme)) / (DRAWS + 1))


def _bits(seed: bytes, session: int, blocks: int) -> NDArray[np.float64]:
    """Return the draws of one session, (draws, blocks): bits of SHA-256 in counter mode, most significant first."""
    drawn = []
    for draw in range(DRAWS):
        prefix = _DOMAIN + seed + session.to_bytes(8, "big") + draw.to_bytes(8, "big")
        octets = b"".join(
            hashlib.sha256(prefix + part.to_bytes(8, "big")).digest() for part in range(-(-blocks // 256))
        )
        drawn.append(np.unpackbits(np.frombuffer(octets, dtype=np.uint8))[:blocks])
    return np.array(drawn, dtype=float).reshape(DRAWS, blocks)
