"""The names of the workloads, as manifests, public artifacts and job files have them."""

from __future__ import annotations

SCRIPT = "script"
"""The one that runs an owner's own program, and in several ranks where it is asked to."""
WORKLOADS = ("lora", SCRIPT, "mlp")
"""All of them; what each is, is in `workloads.registry`."""
