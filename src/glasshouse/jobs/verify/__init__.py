"""Verdicts on receipts, packages, artifacts and runs: genuine, by which owner, and what they claim."""
