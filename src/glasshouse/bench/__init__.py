"""Measurements: what sealing, the lifecycle, the evidence and the protection of a training step cost."""
