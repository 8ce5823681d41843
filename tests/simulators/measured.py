"""Measurements of files that are nowhere."""

from __future__ import annotations

import hashlib

from glasshouse.attestation.measurements.measured import PARTS, Measured

__all__ = ["measured"]


def measured(label: str) -> Measured:
    """Return a measurement that is told by its label."""
    return Measured(**{part: hashlib.sha256(f"{label} {part}".encode()).digest() for part in PARTS})
