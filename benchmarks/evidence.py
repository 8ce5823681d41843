"""What an event costs the agent, and what a long log costs its verifier: ``make bench-evidence``.

pyperf runs it in fresh processes and writes its own format with `-o`: every raw value, and the machine. Each value is
one whole log, written event by event to an unbuffered file as the agent does it, divided by its events.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import tempfile
import time
from typing import BinaryIO, cast

import pyperf

from benchmarks.kept import Bar, judge
from glasshouse.evidence.events import EventType
from glasshouse.evidence.heads import HEAD_TYPE, Head
from glasshouse.evidence.log import EventLog, read_lines, verify_log
from glasshouse.wire.canonical import Json, decode
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.states import State

BARS = {"append_us": Bar(100.0), "verify_100k_s": Bar(5.0)}
LONG = 100_000
FEWEST = 100
_WAY = tuple(State)[1 : tuple(State).index(State.RUNNING) + 1]


def main() -> int:
    runner = pyperf.Runner(
        processes=3, values=1, loops=1, program_args=("-m", "benchmarks.evidence"), add_cmdline_args=_pass_on
    )
    runner.argparser.add_argument("--events", type=_events, default=LONG, help="length of the log")
    events = runner.parse_args().events
    metadata = {"events": events, "bars": ", ".join(f"{name} {bar}" for name, bar in BARS.items())}
    append = runner.bench_time_func("append an event", _append, events, inner_loops=events, metadata=metadata)
    verify = runner.bench_time_func("verify an event", _verify, events, inner_loops=events, metadata=metadata)
    if runner.args.worker or append is None or verify is None:
        return 0
    numbers = {"append_us": 1e6 * append.median(), "verify_100k_s": LONG * verify.median()}
    return judge(numbers, {name: (str(bar), bar.met(numbers[name])) for name, bar in BARS.items()})


def _append(loops: int, events: int) -> float:
    seconds = 0.0
    for _ in range(loops):
        with tempfile.TemporaryFile(buffering=0) as raw:
            seconds += _write(cast("BinaryIO", raw), events)[0]
    return seconds


def _verify(loops: int, events: int) -> float:
    stored, head = _log(events)
    begin = time.perf_counter()
    for _ in range(loops):
        stored.seek(0)
        verify_log(read_lines(stored), head)
    return time.perf_counter() - begin


@functools.cache
def _log(events: int) -> tuple[BinaryIO, Head]:
    stored = cast("BinaryIO", tempfile.TemporaryFile())  # noqa: SIM115 - lives as long as the process
    return stored, _write(stored, events)[1]


def _write(stored: BinaryIO, events: int) -> tuple[float, Head]:
    """Write a log of so many events; return the seconds for its progress events, scaled to all, and its head."""
    # A clock that goes on by a second at each look: no log holds more reports than one a second.
    clock, key = itertools.count(1_000_000, 1_000_000), SigningKey.generate()
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


def _events(text: str) -> int:
    if not text.isdecimal() or int(text) < FEWEST:
        raise argparse.ArgumentTypeError(f"the benchmark takes at least {FEWEST} events, not {text!r}")
    return int(text)


def _pass_on(command: list[str], arguments: argparse.Namespace) -> None:
    command += ["--events", str(arguments.events)]


if __name__ == "__main__":
    sys.exit(main())
