"""Following a run reads whole lines as they come, and keeps what a person wants to see."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from glasshouse.errors import Code, VerificationError
from glasshouse.evidence.events import Event
from glasshouse.evidence.receipt import REQUIRED_PROBES
from glasshouse.jobs.supervise.follow import Seen, Tail
from glasshouse.wire.states import Outcome, State
from simulators.world import World


@pytest.fixture(scope="module")
def lines() -> tuple[bytes, ...]:
    return World().run().lines


def test_a_log_that_grows_is_read_line_by_line_however_it_is_cut(tmp_path: Path, lines: tuple[bytes, ...]) -> None:
    path, data, found = tmp_path / "events.log", b"".join(lines), 0
    tail = Tail(path)
    assert list(tail.read()) == []
    with path.open("ab", buffering=0) as log:
        for start in range(0, len(data), 97):
            log.write(data[start : start + 97])
            found += len(list(tail.read()))
    tail.close()
    assert found == len(lines)


def test_what_was_seen_is_what_the_log_says(tmp_path: Path, lines: tuple[bytes, ...]) -> None:
    (tmp_path / "events.log").write_bytes(b"".join(lines))
    seen = Seen.of(tmp_path / "events.log")
    assert (seen.state, seen.outcome, seen.code) == (State.ZEROIZED, Outcome.COMPLETED, None)
    assert list(seen.entered_us) == list(State)
    assert seen.work is not None
    assert (seen.work.done, seen.work.total, seen.work.loss) == (5, 5, "0.4")
    assert seen.rate_per_s == pytest.approx(1)
    assert seen.remaining_s == 0
    assert (seen.outputs, seen.segments) == (2, 1)
    assert seen.probes == {name: "unverifiable" if name == "swap" else "clean" for name in REQUIRED_PROBES}
    assert seen.checks == {("agent", "not-dumpable"): "passed"}


def test_nothing_is_estimated_from_too_little(tmp_path: Path, lines: tuple[bytes, ...]) -> None:
    until_first = [line for line in lines if b'"done":' not in line or b'"done":1,' in line][:7]
    (tmp_path / "events.log").write_bytes(b"".join(until_first))
    seen = Seen.of(tmp_path / "events.log")
    assert seen.rate_per_s is None
    assert seen.remaining_s is None
    assert Seen.of(tmp_path / "absent").state is None


@pytest.mark.parametrize("junk", [b"nonsense\n", b"\x1b[2J\n", b"x" * 5000, b'{"state":"running"}\n'])
def test_what_is_no_event_is_not_shown(tmp_path: Path, junk: bytes) -> None:
    """The log comes from a machine that nobody trusts: a line of escapes must not reach a terminal."""
    (tmp_path / "events.log").write_bytes(junk)
    with pytest.raises(VerificationError) as refused:
        Seen.of(tmp_path / "events.log")
    assert refused.value.code is Code.LOG_INVALID


def test_a_link_in_place_of_the_log_is_not_followed(tmp_path: Path, lines: tuple[bytes, ...]) -> None:
    (tmp_path / "real.log").write_bytes(b"".join(lines))
    (tmp_path / "events.log").symlink_to(tmp_path / "real.log")
    with pytest.raises(VerificationError, match="symbolic"):
        Seen.of(tmp_path / "events.log")


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "events.log")
    with pytest.raises(VerificationError) as refused:
        Seen.of(tmp_path / "events.log")
    assert refused.value.code is Code.LOG_INVALID


@pytest.mark.parametrize(("last_total", "shown"), [(5, 60), (60, 60), (None, None), (80, 80), (3, None)])
def test_a_run_that_stops_early_still_says_what_was_planned(
    lines: tuple[bytes, ...], last_total: int | None, shown: int | None
) -> None:
    reports = [Event.parse(line.rstrip()) for line in lines if b'"type":"progress"' in line]
    seen = Seen()
    seen.take(replace(reports[0], body={**reports[0].body, "total": 60}))
    seen.take(replace(reports[-1], body={**reports[-1].body, "total": last_total}))
    assert seen.work is not None
    assert (seen.work.done, seen.work.total) == (5, shown)
