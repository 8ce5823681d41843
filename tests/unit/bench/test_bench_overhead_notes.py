"""What a session leaves beside its slices: its lifecycle, its work, and what may be said of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from glasshouse.bench.overhead.facts import Facts, plain
from glasshouse.bench.overhead.interval import mean_of
from glasshouse.bench.overhead.lifecycle import STEPS, lifecycle
from glasshouse.bench.overhead.notes import ArmWork, SessionNote, read_notes
from glasshouse.bench.overhead.parity import Parity, Same, parity
from glasshouse.bench.overhead.slices import tree
from glasshouse.errors import FormatError
from glasshouse.wire.canonical import encode
from simulators.measurement import FACTS

WEIGHTS = ("output", "weights", b"w" * 32)
METRICS = ("output", "file", None)
WORK = ArmWork(done=1000, start_ns=10**9, outputs=(WEIGHTS, METRICS))
TIMES = {"attest": 10, "harden": 20, "open": 30, "release": 40, "seal_outputs": 50, "total": 10**6, "zeroize": 60}
NOTE = SessionNote(session=0, raw=WORK, protected=WORK, lifecycle_us=TIMES, imports_us=None, bundle_sha256=b"b" * 32)


def test_a_note_is_read_as_it_was_written() -> None:
    failed = SessionNote(session=1, raw=None, protected=None, lifecycle_us=None, imports_us=None, bundle_sha256=None)
    for note in (NOTE, replace(failed, session=0)):
        assert SessionNote.parse(note.encode()) == note
    lines = [NOTE.encode() + b"\n", failed.encode() + b"\n"]
    assert list(read_notes(lines)) == [NOTE, failed]
    assert len(tree([NOTE, failed])) == 2
    for wrong in (lines[::-1], lines[1:], [lines[0], lines[1][:-1]], [lines[0], lines[0]]):
        with pytest.raises(FormatError):
            list(read_notes(wrong))


@pytest.mark.parametrize(
    "changes",
    [
        {"bundle_sha256": None},
        {"lifecycle_us": None},
        {"lifecycle_us": {"attest": 1}},
        {"lifecycle_us": {**TIMES, "attest": -1}},
        {"lifecycle_us": {**TIMES, "nap": 1}},
        {"raw": {"done": 1}},
        {"raw": {**WORK.to_json(), "outputs": [{"kind": "output", "class": "secret", "hmac_sha256": "00" * 32}]}},
        {"raw": {**WORK.to_json(), "outputs": [{"kind": "output", "class": "weights", "hmac_sha256": "00"}]}},
        {"raw": {**WORK.to_json(), "outputs": [{"kind": "output", "class": "weights", "hmac_sha256": None}]}},
        {"raw": {**WORK.to_json(), "outputs": [{"kind": "output", "class": "file", "hmac_sha256": "00" * 32}]}},
        {"raw": {**WORK.to_json(), "outputs": [{"kind": "output", "class": "weights", "sha256": "00" * 32}]}},
        {"note": "x"},
    ],
    ids=str,
)
def test_a_note_that_is_none(changes: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        SessionNote.parse(encode({**NOTE.to_json(), **changes}))
    with pytest.raises(FormatError):
        replace(NOTE, bundle_sha256=None)
    with pytest.raises(FormatError):
        replace(NOTE, bundle_sha256=None, lifecycle_us=None, imports_us=5)


def session(lifecycle_us: dict[str, int | None] | None = None, *, later_ns: int = 300_000) -> SessionNote:
    """A session of which everything is known, whose protected run was so much later at its first step."""
    protected = replace(WORK, start_ns=WORK.start_ns + later_ns)
    return replace(NOTE, raw=WORK, protected=protected, lifecycle_us=lifecycle_us or TIMES)


def test_f_is_what_the_start_takes_longer_and_what_follows_the_training() -> None:
    notes = [session({**TIMES, "attest": 10 + 7 * number}, later_ns=300_000 + 9_000 * number) for number in range(4)]
    found = lifecycle(notes)
    assert found is not None
    costs = [(300 + 9 * number + TIMES["seal_outputs"] + TIMES["zeroize"]) / 1e6 for number in range(4)]
    assert found.seconds == pytest.approx(math.fsum(costs) / 4)
    assert found.interval is not None
    assert found.interval.low == pytest.approx(mean_of(costs).interval(0.95).low)
    assert found.interval.holds(found.seconds)
    assert found.sessions == 4
    assert set(found.steps_s) == set(STEPS)
    assert found.steps_s["attest"] == pytest.approx(20.5e-6)
    assert "total" not in found.to_json()["steps_s"]  # type: ignore[operator]


def test_f_is_also_the_sum_of_the_six_steps_and_a_remainder() -> None:
    one = lifecycle([session()])
    assert one is not None
    assert one.interval is None
    assert one.in_receipts_s == pytest.approx(math.fsum(one.steps_s.values()))
    assert one.seconds == pytest.approx(math.fsum(one.steps_s.values()) + one.start_s)
    assert one.start_s > 0


def test_f_of_a_session_whose_raw_run_started_slowly_is_not_made_prettier() -> None:
    found = lifecycle([session(later_ns=-300_000)])
    assert found is not None
    assert found.start_s < found.seconds < 0


def test_f_is_of_the_sessions_in_which_all_of_it_is_known() -> None:
    unknown = [
        session({**TIMES, "zeroize": None}),
        replace(session(), raw=None),
        replace(session(), protected=None),
        replace(session(), lifecycle_us=None, imports_us=None, bundle_sha256=None),
    ]
    assert lifecycle(unknown) is None
    assert lifecycle([]) is None
    one = lifecycle([session(), *unknown])
    assert one is not None
    assert (one.sessions, one.interval) == (1, None)


@pytest.mark.parametrize(
    ("raw", "protected", "same"),
    [
        (WORK, WORK, Same.SAME),
        (WORK, replace(WORK, outputs=(WEIGHTS, ("checkpoint", "file", None))), Same.SAME),
        (WORK, replace(WORK, outputs=(("output", "weights", b"v" * 32), METRICS)), Same.DIFFERENT),
        (WORK, replace(WORK, outputs=(("checkpoint", "weights", b"w" * 32), METRICS)), Same.DIFFERENT),
        (WORK, replace(WORK, outputs=(WEIGHTS, WEIGHTS)), Same.DIFFERENT),
        (WORK, replace(WORK, done=999), Same.NOT_COMPARABLE),
        (WORK, None, Same.NOT_COMPARABLE),
        (None, WORK, Same.NOT_COMPARABLE),
        (replace(WORK, outputs=(METRICS,)), replace(WORK, outputs=(METRICS,)), Same.NOT_COMPARABLE),
    ],
)
def test_parity_is_of_weights_after_equal_work(raw: ArmWork | None, protected: ArmWork | None, same: Same) -> None:
    assert parity([replace(NOTE, raw=raw, protected=protected)]).sessions == (same,)


def test_one_session_that_differs_is_the_word_for_all() -> None:
    def word(*sessions: Same) -> Same:
        return Parity(sessions=sessions).word

    assert word(Same.SAME, Same.DIFFERENT, Same.NOT_COMPARABLE) is Same.DIFFERENT
    assert word(Same.NOT_COMPARABLE, Same.SAME) is Same.SAME
    assert word(Same.NOT_COMPARABLE) is Same.NOT_COMPARABLE
    assert word() is Same.NOT_COMPARABLE


# ---- facts


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", "Intel(R) Xeon(R) CPU @ 2.20GHz"),
        ("  6.1.0-13-cloud-amd64 #1 SMP\n", "6.1.0-13-cloud-amd64 1 SMP"),
        ("/home/ana/µ", "home ana"),
        ("x" * 200, "x" * 96),
        ("/:\\", None),
        ("", None),
    ],
)
def test_a_machines_words_are_made_plain(text: str, shown: str | None) -> None:
    assert plain(text) == shown
    Facts(workload=FACTS.workload, system={**FACTS.system, "cpu": plain(text)}, created_us=0)


@pytest.mark.parametrize(
    ("member", "changes"),
    [
        ("workload", {"name": "/etc/passwd"}),
        ("workload", {"name": "x" * 97}),
        ("workload", {"name": None}),
        ("workload", {"kind": "mining"}),
        ("workload", {"unit": "steps per year"}),
        ("workload", {"facts": {"path": "a/b"}}),
        ("workload", {"facts": {"note": "x" * 33}}),
        ("workload", {"facts": {"Note": 1}}),
        ("workload", {"facts": {"list": [1]}}),
        ("workload", {"facts": {f"f{number}": 1 for number in range(33)}}),
        ("workload", {"facts": None}),
        ("workload", {"host": "x"}),
        ("system", {"cpu": "a\nb"}),
        ("system", {"kernel": "http://x"}),
        ("system", {"logical_cpus": 0}),
        ("system", {"virtualised": 1}),
        ("system", {"gpu": {"name": "A"}}),
        ("system", {"gpu": {"name": "A", "driver": None, "uuid": "x"}}),
        ("system", {"hostname": "x"}),
    ],
    ids=str,
)
def test_facts_have_no_room_for_a_path_a_name_or_a_novel(member: str, changes: dict[str, Any]) -> None:
    values: dict[str, Any] = {"workload": FACTS.workload, "system": FACTS.system}
    with pytest.raises(FormatError):
        Facts(**{**values, member: {**values[member], **changes}}, created_us=0)


@pytest.mark.parametrize("planted_ppm", [-1, 10_000_001])
def test_a_planted_overhead_is_bounded(planted_ppm: int) -> None:
    with pytest.raises(FormatError):
        replace(FACTS, planted_ppm=planted_ppm)
