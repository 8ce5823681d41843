"""A measurement is computed again from its records: what was altered is refused, and says what it is refused for."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import Code, FormatError, VerificationError
from glasshouse.wire.canonical import decode, encode
from glasshouse.wire.crypto import sha256
from glasshouse_bench import statement
from glasshouse_bench.analysis import analyse
from glasshouse_bench.artifact import Part, Sample
from glasshouse_bench.design import Mode, Planted
from glasshouse_bench.statement import write_statement
from glasshouse_bench.verdict import Lack, MeasurementVerdict
from glasshouse_bench.verify import refuse_first_format, verify_measurement
from simulators.sealed_design import MACHINE
from simulators.slot_measurement import CREATED_US, OWNER, measured
from tools.artifact_stories import FIRST, STORIES, edit, fitted, payload, sign

WHY = {
    "step-changed": "not the record that its note names",
    "step-changed-and-signed": "analysis.json",
    "session-left-out": "lacks sessions/0002/session.json",
    "session-in-the-middle-left-out": "lacks sessions/0000/session.json",
    "design-other": "design.json is not the one that was signed",
    "seed-other-and-signed": "follows another schedule",
    "word-changed-and-signed": "claim.word",
    "interval-narrowed-and-signed": "slowdown_95.high",
    "not-a-number-and-signed": "standard_error",
    "exclusion-invented-and-signed": "excluded_blocks",
    "deployment-missing": "statement.deployments",
    "limit-missing": "statement.limits",
    "part-not-named": "do not agree on the part null",
    "member-more": "statement is not",
    "file-more-in-a-part": "a file in interleaved/",
    "file-more-in-a-session": "a file in 0000/",
    "receipt-more": "a file in receipts/",
    "record-missing": "raw.steps",
    "records-of-another-session": "follows another schedule",
    "receipt-of-another-session": "receipt of session 0 is of another run",
    "phases-longer-than-their-steps": "phases of the protected arm are longer",
    "phases-of-fewer-steps": "another number of losses",
    "phases-out-of-order": "another order",
    "calibrated-other-slots": "slot_ns is 49432000, and 48432000 follows",
    "calibrated-other-length": "length_ns is 5000002000, and 5000000000 follows",
    "calibration-missing": "calibration.json is not the one that a design names",
    "another-owner": "another owner",
    "first-format": "another type",
}


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured") / "good"
    return measured(folder, receipts=True, parity=True, sessions=3, length_ns=800_000_000)


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "measurement"))


def verified(folder: Path, now_us: int | None = None) -> MeasurementVerdict:
    return verify_measurement(folder, owner=OWNER.public, now_us=now_us)


def refusal(folder: Path) -> VerificationError:
    with pytest.raises(VerificationError) as caught:
        verified(folder)
    return caught.value


def test_a_good_measurement_says_its_level_and_whose_word_it_is(good: Path) -> None:
    verdict = verified(good)
    assert verdict.lacks == ()
    assert "assurance software; the times are the word of the owner, who controls both arms" in verdict.sentence
    assert "overhead, +" in verdict.sentence
    assert "faster" not in verdict.sentence
    assert [link.name for link in verdict.links] == [
        "statement",
        "slots",
        "interleaved",
        "null",
        "null holds 0",
        "receipts",
        "work parity",
    ]
    assert json.loads(encode(verdict.to_json()))["status"] == "good"
    assert payload(good)["deployments"][-1] == "parity-1"


@pytest.mark.parametrize("story", WHY)
def test_what_was_altered_is_refused_for_what_it_is(folder: Path, story: str) -> None:
    STORIES[story][1](folder)
    assert WHY[story] in refusal(folder).message


@pytest.mark.parametrize(
    ("null", "planted", "said", "holds"),
    [
        (1.0, None, "null holds 0", True),
        (1.05, None, "null holds 0", False),
        (1.05, Planted(step_ppm=50_000, bunched_ns=0), "null holds what was planted", True),
        (1.05, Planted(step_ppm=0, bunched_ns=50_000_000), "null holds what was planted", True),
        (1.0, Planted(step_ppm=50_000, bunched_ns=0), "null holds what was planted", False),
    ],
    ids=["nothing", "of-itself", "each-step", "each-second", "lost"],
)
def test_a_null_of_its_own_is_held_to_what_is_there(
    tmp_path: Path, null: float, planted: Planted | None, said: str, holds: bool
) -> None:
    measured(tmp_path, modes=[Mode.NULL], null=null, planted=planted, sessions=4, length_ns=800_000_000)
    link = next(one for one in verified(tmp_path).links if one.name.startswith("null holds"))
    assert (link.name, link.holds) == (said, holds)
    assert ("+5.00 %" in link.says.split("(")[0]) == (planted is not None)


def test_slots_that_follow_from_no_calibration_are_the_owners_choice(folder: Path) -> None:
    def slots() -> tuple[str, bool]:
        link = next(one for one in verified(folder).links if one.name == "slots")
        return link.says, link.holds

    assert slots() == ("chosen by the owner: a design names no calibration", False)
    STORIES["calibrated"][1](folder)
    assert slots() == ("as they follow from the calibration", True)


def test_what_does_not_follow_from_its_calibration_is_not_signed_either(folder: Path) -> None:
    STORIES["calibrated-other-slots"][1](folder)
    with pytest.raises(FormatError, match="does not follow from calibration"):
        write_statement(folder, owner=OWNER, created_us=CREATED_US)


def test_every_alteration_is_refused_or_lessens_the_verdict() -> None:
    lessened = {"calibrated", "without-receipts", "one-died", "stopped-early", "no-null"}
    assert set(STORIES) == set(WHY) | lessened | {"phases"}


def test_a_profile_of_a_step_is_named_with_whether_both_arms_did_the_same_work(folder: Path) -> None:
    STORIES["phases"][1](folder)
    verdict = verified(folder)
    assert verdict.lacks == ()
    assert verdict.links[-1] == ("phases", "10 profiled steps of each arm, the same losses", True)
    edit(folder / "phases.json", lambda one: one["raw_losses"].__setitem__(3, "0.25"))
    write_statement(folder, owner=OWNER, created_us=CREATED_US)
    assert verified(folder).links[-1] == ("phases", "10 profiled steps of each arm, other losses", False)


def test_receipts_are_counted_of_the_sessions_that_count(tmp_path: Path) -> None:
    measured(tmp_path, receipts=True, sessions=3, length_ns=800_000_000, signed=False)
    throttled = [{"at_ns": 1, "frequency_khz": None, "steal_ppm": None, "throttled": 1}]
    edit(tmp_path / FIRST / "session.json", lambda note: note.update(samples=throttled))
    write_statement(tmp_path, owner=OWNER, created_us=CREATED_US)
    assert (
        next(one for one in verified(tmp_path).links if one.name == "receipts").says == "2 of 2, lowest level software"
    )


def test_what_was_stopped_early_claims_nothing_however_narrow(tmp_path: Path) -> None:
    measured(tmp_path, ratio=1.0, sessions=8, attempts=7, length_ns=800_000_000)
    verdict = verified(tmp_path)
    assert Lack.ATTEMPTS in verdict.lacks
    claimed = verdict.measurement.main.analysis["claim"]
    assert (claimed["word"], claimed["held_back"]) == ("inconclusive", ["attempts"])


def test_a_word_needs_a_background_that_was_looked_at(tmp_path: Path) -> None:
    measured(tmp_path, ratio=1.0, sessions=6, length_ns=800_000_000)
    assert verified(tmp_path).measurement.main.analysis["claim"]["word"] == "equivalent"
    edit(tmp_path / FIRST / "session.json", lambda note: note.update(background=None))
    analysis = analyse(Part.open(tmp_path, Mode.INTERLEAVED))
    assert analysis["background"] is None
    assert analysis["claim"] is not None
    assert analysis["claim"]["held_back"] == ["background"]  # type: ignore[call-overload,index] # JSON


def test_blocks_of_stolen_time_are_excluded_by_the_designs_rule_and_throttling_voids(tmp_path: Path) -> None:
    measured(tmp_path, modes=[Mode.INTERLEAVED], sessions=3, length_ns=800_000_000, signed=False)
    part = Part.open(tmp_path, Mode.INTERLEAVED)

    def samples(session: int, *told: Sample) -> None:
        path = tmp_path / "interleaved" / "sessions" / f"{session:04d}" / "session.json"
        edit(path, lambda note: note.update(samples=[one.to_json() for one in told]))

    samples(0, Sample(at_ns=10**9), Sample(at_ns=1_900_000_000, steal_ppm=50_000), Sample(at_ns=3 * 10**9))
    samples(1, Sample(at_ns=1_900_000_000), Sample(at_ns=2_100_000_000, steal_ppm=50_001))
    samples(2, Sample(at_ns=10**9, throttled=1))
    sessions: Any = analyse(part)["sessions"]
    assert [one["excluded"] for one in sessions] == [{}, {"steal": 2}, {}]  # that sample reaches into two blocks
    assert [one["outcome"] for one in sessions] == ["complete", "complete", "throttled"]


def test_a_background_spread_over_more_than_its_slots_is_refused(folder: Path) -> None:
    edit(folder / FIRST / "session.json", lambda note: note["background"].update(over_ns=10**12))
    sign(folder, fitted(folder, payload(folder)))
    assert "spread over more" in refusal(folder).message


def test_whole_processes_are_compared_in_the_order_that_was_drawn(tmp_path: Path) -> None:
    measured(tmp_path, modes=[Mode.SEQUENTIAL], sessions=1, length_ns=800_000_000, slot_ns=50_000_000, signed=False)
    with pytest.raises(FormatError, match="another order than was drawn"):
        analyse(Part.open(tmp_path, Mode.SEQUENTIAL))  # both ran at once


def test_a_measurement_of_the_future_is_refused(good: Path) -> None:
    with pytest.raises(VerificationError, match="in the future"):
        verified(good, now_us=CREATED_US - 3_600_000_000)


def test_one_deployment_behind_two_sessions_is_refused(folder: Path) -> None:
    notes = [folder / "interleaved" / "sessions" / name / "session.json" for name in ("0000", "0001")]
    names = json.loads(notes[0].read_bytes())["protected"]
    edit(notes[1], lambda note: note["protected"].update(deployment=names["deployment"]))
    sign(folder, fitted(folder, payload(folder)))
    assert "one deployment stands behind two" in refusal(folder).message


@pytest.mark.parametrize("name", ["interleaved/design.json", f"{FIRST}/raw.steps", f"{FIRST}/session.json"])
def test_no_link_is_followed(folder: Path, tmp_path: Path, name: str) -> None:
    moved = tmp_path / "elsewhere"
    (folder / name).rename(moved)
    (folder / name).symlink_to(moved)
    assert refusal(folder).code is Code.ARTIFACT_INVALID


@pytest.mark.parametrize("name", ["interleaved", "interleaved/sessions", FIRST, "interleaved/receipts"])
def test_no_linked_folder_is_entered(folder: Path, tmp_path: Path, name: str) -> None:
    moved = tmp_path / "elsewhere"
    (folder / name).rename(moved)
    (folder / name).symlink_to(moved)
    assert "not a folder of the measurement's own" in refusal(folder).message


def test_a_pipe_in_place_of_a_record_waits_for_no_writer(folder: Path) -> None:
    (folder / FIRST / "raw.steps").unlink()
    os.mkfifo(folder / FIRST / "raw.steps")
    assert "no regular file" in refusal(folder).message


@pytest.mark.parametrize(
    ("name", "size"),
    [("statement.json", 1 << 33), ("interleaved/design.json", 1 << 33), (f"{FIRST}/raw.steps", 1 << 33)],
)
def test_a_huge_file_is_not_read(folder: Path, name: str, size: int) -> None:
    with (folder / name).open("r+b") as stream:
        stream.truncate(size)
    assert "longer than" in refusal(folder).message


def test_no_record_is_read_for_a_stranger(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = sha256((folder / FIRST / "raw.steps").read_bytes() + b"more").hex()
    edit(folder / FIRST / "session.json", lambda note: note["raw"].update(record_sha256=changed))
    monkeypatch.setattr(Part, "records", lambda *_: pytest.fail("a record was read before its note was the owner's"))
    assert "the attempts in interleaved/" in refusal(folder).message


def test_a_record_that_is_no_text_at_all_is_refused(folder: Path) -> None:
    (folder / FIRST / "raw.steps").write_bytes(b"\xff" * 1000)
    assert refusal(folder).code is Code.ARTIFACT_INVALID


def test_nothing_that_names_a_path_has_room(folder: Path) -> None:
    def named(note: dict[str, Any]) -> None:
        note["protected"]["deployment"] = "../../etc/passwd"

    edit(folder / FIRST / "session.json", named)
    sign(folder, fitted(folder, payload(folder)))
    assert "protected.deployment" in refusal(folder).message


def test_the_machines_name_is_not_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(tmp_path, sessions=3, length_ns=800_000_000, signed=False)
    monkeypatch.setattr(statement, "host_canaries", lambda: [str(MACHINE.cpu)])
    with pytest.raises(VerificationError) as caught:
        write_statement(tmp_path, owner=OWNER, created_us=CREATED_US)
    assert caught.value.code is Code.ARTIFACT_CANARY
    assert not (tmp_path / "statement.json").exists()


def test_the_first_format_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match="first format"):
        refuse_first_format(tmp_path, owner=OWNER.public)


def test_a_folder_without_a_part_is_no_measurement(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="without a part"):
        write_statement(tmp_path, owner=OWNER, created_us=CREATED_US)


def test_numbers_may_differ_as_libraries_round_and_no_further(folder: Path) -> None:
    path = folder / "null" / "analysis.json"
    analysis: Any = decode(path.read_bytes(), max_bytes=1 << 20)
    value = float(analysis["result"]["log_ratio"])
    for factor, held in ((1 + 1e-10, True), (1 + 1e-6, False)):
        analysis["result"]["log_ratio"] = f"{value * factor:.11e}"
        path.write_bytes(encode(analysis))
        told = payload(folder)
        told["parts"][1].update(analysis_sha256=sha256(path.read_bytes()).hex(), result=analysis["result"])
        sign(folder, told)
        if held:
            assert verified(folder).lacks == ()
        else:
            assert "log_ratio" in refusal(folder).message
