"""A harness seals a design, attempts its sessions once each, is killed, and goes on."""

from dataclasses import replace
from pathlib import Path

import pytest

from glasshouse.errors import FormatError, UsageError
from glasshouse.wire.canonical import decode
from glasshouse_bench.artifact import Attempt, Part
from glasshouse_bench.design import Design, Mode
from glasshouse_bench.documents import plain
from simulators.sealed_design import design, note


def test_a_design_is_read_as_it_was_written() -> None:
    sealed = design()
    assert Design.parse(decode(sealed.encode(), max_bytes=1 << 16)) == sealed


@pytest.mark.parametrize(
    "member",
    ["margin_ppm", "sessions", "widening_ppm", "workload", "seed", "version"],
)
def test_a_design_with_a_member_too_few_is_refused(member: str) -> None:
    value = dict(design().to_json())
    del value[member]
    with pytest.raises(FormatError, match=member):
        Design.parse(value)


def test_a_design_cannot_be_made_that_could_not_be_read() -> None:
    with pytest.raises(FormatError, match="sessions"):
        replace(design(), sessions=0)
    with pytest.raises(FormatError, match="assurance"):
        replace(design(), assurance=None)


def test_every_session_has_a_schedule_of_its_own() -> None:
    sealed = design()
    assert len({sealed.session_seed(number) for number in range(100)}) == 100
    assert sealed.plan(3, "R", end_ns=5).seed == sealed.plan(3, "P", end_ns=9).seed == sealed.session_seed(3)


def test_whole_processes_take_turns_two_by_two() -> None:
    sealed = design(Mode.ALTERNATING, sessions=10)
    firsts = [sealed.raw_first(number) for number in range(200)]
    assert all(one != other for one, other in zip(firsts[::2], firsts[1::2], strict=True))
    assert 20 < sum(firsts[::2]) < 80
    assert sealed.plan(0, "R", end_ns=10**9).own_slot(123 * 10**6) == 123 * 10**6 // sealed.slot_ns


def test_a_session_is_attempted_once_and_counts_however_it_ended(tmp_path: Path) -> None:
    part = Part.begin(tmp_path, design())
    assert part.next() == 0
    part.attempt(note(0))
    with pytest.raises(UsageError, match="not the next one"):
        part.attempt(note(0))
    again = Part.begin(tmp_path, design())  # the harness was killed, and is started again
    assert again.next() == 1
    assert list(again.notes()) == [note(0)]


def test_what_a_broken_off_attempt_left_is_removed(tmp_path: Path) -> None:
    part = Part.begin(tmp_path, design())
    part.attempt(note(0))
    left = [part.folder / "sessions" / "0000" / name for name in ("raw.steps", ".0011223344556677.part")]
    for path in left:
        path.write_bytes(b"half")
    assert Part.begin(tmp_path, design()).next() == 1
    assert not any(path.exists() for path in left)
    (part.folder / "sessions" / "0001").mkdir()  # killed before its note was written: it was not attempted
    assert Part.begin(tmp_path, design()).next() == 1


def test_the_note_has_the_digests_of_what_was_kept(tmp_path: Path) -> None:
    part = Part.begin(tmp_path, design())
    part.attempt(note(0))
    kept = part.keep(note(0), raw=b"raw", protected=None)
    assert kept.raw.record_sha256 is not None
    assert kept.protected.record_sha256 is None
    assert list(Part.open(tmp_path, Mode.INTERLEAVED).notes()) == [kept]


def test_another_design_does_not_go_on_with_a_part(tmp_path: Path) -> None:
    Part.begin(tmp_path, design())
    with pytest.raises(UsageError, match="another design"):
        Part.begin(tmp_path, replace(design(), sessions=9))


def test_parts_of_one_design_are_merged_and_no_session_is_chosen(tmp_path: Path) -> None:
    here, there = (Part.begin(tmp_path / name, design()) for name in ("here", "there"))
    for part, sessions in ((here, 1), (there, 2)):
        for session in range(sessions):
            part.attempt(note(session))
            part.keep(note(session), raw=b"raw %d" % session)
    assert here.merge(there) == 1
    assert list(here.notes()) == list(there.notes())
    assert here.records(here.note(1)[0]) == [b"raw 1", None]
    other = Part.begin(tmp_path / "other", design())
    other.attempt(note(0))
    other.keep(note(0), raw=b"another attempt")
    with pytest.raises(UsageError, match="attempted twice"):
        here.merge(other)
    with pytest.raises(UsageError, match="another design"):
        here.merge(Part.begin(tmp_path / "more", design(sessions=9)))


def test_a_receipt_of_no_run_is_refused() -> None:
    value = dict(note(0).to_json())
    value["receipt_sha256"] = "00" * 32
    with pytest.raises(FormatError, match="no run"):
        Attempt.parse(value)


@pytest.mark.parametrize(
    ("text", "found"),
    [("Intel(R) Xeon(R) @ 2.80GHz", "Intel(R) Xeon(R) @ 2.80GHz"), ("Vulnerable: /home/x", "Vulnerable home x")],
)
def test_a_text_of_the_machine_keeps_no_path(text: str, found: str) -> None:
    assert plain(text) == found
    assert plain("//:") is None
