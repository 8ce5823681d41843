"""The log's bars, in seconds of CPU: an append costs at most 100 µs, 100,000 events verify in at most 5 s."""

from __future__ import annotations

import time

from glasshouse.evidence.events import EventType
from glasshouse.evidence.heads import Head
from glasshouse.evidence.log import EventLog, verify_log
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.states import State

EVENTS = 10_000


def test_appending_and_verifying_stay_within_their_bars() -> None:
    key, lines = SigningKey(b"e" * 32), list[bytes]()
    log = EventLog(run_id="ab" * 16, evidence_key=key, clock_us=lambda: 1, sink=lines.append)
    for state in list(State)[1 : list(State).index(State.SEALED)]:
        log.transition(state)
    start = time.process_time()
    for number in range(EVENTS):
        body = {"done": number, "elapsed_us": number * 1_000_000, "loss": "0.53125", "total": EVENTS, "unit": "step"}
        log.append(EventType.PROGRESS, body)
    appended = time.process_time()
    head = Head.parse_signed(log.head(), key.public)
    verify_log(lines, head)
    verified = time.process_time()
    assert (appended - start) / EVENTS <= 100e-6
    assert verified - appended <= 5 * EVENTS / 100_000
