"""Measures the event log: what an event costs the agent, and what a long log costs the verifier."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from typing import Any, BinaryIO, cast

from glasshouse.errors import Code, UsageError
from glasshouse.evidence.events import EventType
from glasshouse.evidence.heads import HEAD_TYPE, Head
from glasshouse.evidence.log import EventLog, read_lines, verify_log
from glasshouse.wire.canonical import Json, decode
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.signing import SigningKey
from glasshouse.wire.states import State

__all__ = ["run"]

BARS = {"append_us": 100.0, "verify_100k_s": 5.0}
_WAY = tuple(State)[1 : tuple(State).index(State.RUNNING) + 1]
_FEWEST = 100


def run(*, events: int = 100_000, repeats: int = 3) -> dict[str, Any]:
    """Append progress events to a log, sign its head, and verify it all.

    Args:
        events: length of the log.
        repeats: rounds; the numbers are medians.

    Returns:
        `append_us`, `verify_s`, `verify_100k_s`, `log_bytes`, `bars` and the raw seconds of every round.

    Raises:
        UsageError: fewer events or rounds than can be measured.
    """
    if events < _FEWEST or repeats < 1:
        raise UsageError(Code.USAGE, f"the benchmark needs at least {_FEWEST} events and one round")
    appending: list[float] = []
    verifying: list[float] = []
    size = 0
    for _ in range(repeats):
        # A real file, written event by event without a buffer, as the agent does it.
        with tempfile.TemporaryFile(buffering=0) as raw, open(raw.fileno(), "rb", closefd=False) as stored:
            seconds, head = _append(SigningKey.generate(), cast("BinaryIO", raw), events)
            appending.append(seconds)
            size = raw.tell()
            stored.seek(0)
            begin = time.perf_counter()
            verify_log(read_lines(stored), head)
            verifying.append(time.perf_counter() - begin)
    append_us = statistics.median(appending) / events * 1e6
    verify_s = statistics.median(verifying)
    values = {"append_us": append_us, "verify_100k_s": verify_s * 100_000 / events}
    return {
        "events": events,
        "append_us": round(append_us, 3),
        "verify_s": round(verify_s, 4),
        "verify_100k_s": round(values["verify_100k_s"], 4),
        "log_bytes": size,
        "bars": {
            name: {"at_most": limit, "found": round(values[name], 4), "met": values[name] <= limit}
            for name, limit in BARS.items()
        },
        "seconds": {"append": appending, "verify": verifying},
    }


def _append(key: SigningKey, stored: BinaryIO, events: int) -> tuple[float, Head]:
    """Write a log of so many events; return the seconds for its progress events, scaled to all, and its head."""
    # A clock that goes on by a second at each look: no log holds more reports than one a second.
    clock = itertools.count(1_000_000, 1_000_000)
    log = EventLog(run_id="0" * 32, evidence_key=key, clock_us=lambda: next(clock), sink=stored.write)
    for state in _WAY:
        log.transition(state)
    reports = events - log.size
    begin = time.perf_counter()
    for step in range(reports):
        work: dict[str, Json] = {"done": step, "elapsed_us": step * 1_000_000, "total": reports, "unit": "step"}
        log.append(EventType.PROGRESS, work | {"loss": "0.693147"})
    seconds = time.perf_counter() - begin
    payload = Envelope.parse(log.head(), max_bytes=1 << 16).verify(HEAD_TYPE, key.public)
    return seconds * events / reports, Head.from_json(decode(payload, max_bytes=1 << 16))
