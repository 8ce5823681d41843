"""What every case is made of: one line, its keys, and the place of one checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from package_parts import fixed

from glasshouse.wire.crypto import SigningKey

Case = tuple[str, dict[str, Any]]

OWNER, BROKER, STORE, EVIDENCE, STRANGER = (
    SigningKey(fixed(f"line {name}", 32)) for name in ("owner", "broker", "store", "evidence", "stranger")
)
PACKAGE_KEY = fixed("line package key", 32)
DEPLOYMENT, LINE, MANIFEST = fixed("deployment", 16).hex(), fixed("line", 32).hex(), fixed("manifest hash", 32).hex()
RUN_ID = fixed("run id", 16).hex()
NOW_US = 1_900_000_000_123_456


def case(name: str, description: str, given: Mapping[str, Any], *, code: str | None = None, **expect: Any) -> Case:
    """Return a vector's file name and content; its kind is all of the name before the first ``--``."""
    document = {
        "description": description,
        "expect": {"code": code, **expect},
        "input": dict(given),
        "kind": name.partition("--")[0],
    }
    return f"{name.replace('--', '-')}.json", document


def place(**changes: Any) -> dict[str, Any]:
    """Return the members that part headers and header have in common; one that is None is left out."""
    value = {
        "deployment": DEPLOYMENT,
        "environment_sha256": fixed("environment", 32).hex(),
        "leg": 2,
        "line": LINE,
        "machines": 1,
        "manifest_sha256": MANIFEST,
        "previous": fixed("checkpoint 4", 32).hex(),
        "ranks": 1,
        "seq": 5,
        "step": 120,
    }
    return {name: one for name, one in (value | changes).items() if one is not None}
