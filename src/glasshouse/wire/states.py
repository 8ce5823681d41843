"""The one table of states: runtime, gate, log verifier, receipt verifier and documentation use it.

```
created → hardened → measured → attested → released → opened → running → sealed → zeroizing → zeroized
any state before zeroizing → zeroizing
```
"""

from __future__ import annotations

from enum import StrEnum
from itertools import pairwise


class State(StrEnum):
    """Of a run, in order."""

    CREATED = "created"
    HARDENED = "hardened"
    MEASURED = "measured"
    ATTESTED = "attested"
    RELEASED = "released"
    OPENED = "opened"
    RUNNING = "running"
    SEALED = "sealed"
    ZEROIZING = "zeroizing"
    ZEROIZED = "zeroized"


class Outcome(StrEnum):
    """How a run ended; `lost` only at the broker, for a runtime that is silent beyond its lease."""

    COMPLETED = "completed"
    REFUSED = "refused"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    RESIDUE = "residue"
    SUPERSEDED = "superseded"
    LOST = "lost"


NEXT = {before: frozenset({after, State.ZEROIZING}) for before, after in pairwise(State)}
NEXT |= {State.ZEROIZING: frozenset({State.ZEROIZED}), State.ZEROIZED: frozenset()}


def is_legal(before: State, after: State) -> bool:
    """Return whether a run may go from `before` to `after` in one step."""
    return after in NEXT[before]
