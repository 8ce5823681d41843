"""The files of a measurement as attacks: missing, cut, replaced by links, endless, or signed by nobody."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glasshouse.bench.overhead.artifact import MAX_ANALYSIS_BYTES
from glasshouse.bench.overhead.design import Mode
from glasshouse.bench.overhead.receipts import lowest
from glasshouse.bench.overhead.slices import SessionEnd
from glasshouse.bench.overhead.statement import write_statement
from glasshouse.bench.overhead.verdict import Lack, MeasurementVerdict
from glasshouse.errors import Code, ExitCode, VerificationError
from glasshouse.evidence.receipt import Receipt
from glasshouse.jobs.verdict import Status
from glasshouse.wire.states import Outcome, State
from simulators.measurement import (
    FACTS,
    OWNER,
    SessionRun,
    edit_lines,
    reseal,
    small_design,
    write,
    write_part,
)
from simulators.measurement_stories import measured, refusal, verified
from simulators.simulate import World as Machine
from simulators.simulate import run_world

INTERLEAVED = Path("interleaved")


pytestmark = pytest.mark.usefixtures("few_resamples")


def links(verdict: MeasurementVerdict) -> dict[str, str]:
    return {link.name: link.says for link in verdict.links}


# ---- files


def every_file(folder: Path) -> Iterator[Path]:
    yield from sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def test_every_file_is_needed_and_none_may_be_cut_or_replaced_by_a_link(honest: Path, folder: Path) -> None:
    names = list(every_file(honest))
    assert len(names) == 20
    for name in names:
        path, data = folder / name, (honest / name).read_bytes()
        for damage in (b"", data[:-1], data[: len(data) // 2], data + b"\n"):
            path.write_bytes(damage)
            assert refusal(folder).code is Code.ARTIFACT_INVALID, name
        path.unlink()
        assert refusal(folder).code is Code.ARTIFACT_INVALID, name
        path.symlink_to(honest / name)
        assert refusal(folder).code is Code.ARTIFACT_INVALID, name
        path.unlink()
        path.write_bytes(data)
    assert verified(folder).status is Status.GOOD


def test_one_flipped_bit_anywhere_is_refused(honest: Path, folder: Path) -> None:
    rng = random.Random(11)
    for name in every_file(honest):
        data = (honest / name).read_bytes()
        for _ in range(4):
            damaged = bytearray(data)
            damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            (folder / name).write_bytes(damaged)
            # A flipped signer's name is another owner's, to whoever reads it.
            assert refusal(folder).exit_code is ExitCode.VERIFICATION_FAILED, name
        (folder / name).write_bytes(data)


def test_an_interrupted_measurement_is_signed_for_what_it_is(tmp_path: Path) -> None:
    """Stopped before its first session had ended: nothing was measured, and nothing is claimed."""
    folder = tmp_path / "out"
    write_part(folder / "interleaved", small_design(Mode.INTERLEAVED), [])
    write_statement(folder, FACTS, owner=OWNER)
    verdict = verified(folder)
    assert (verdict.status, verdict.assurance) == (Status.INCOMPLETE, "none")
    assert "no block counts, and nothing is claimed" in verdict.sentence
    assert links(verdict)["interleaved"] == "0 of 0 blocks count; 0 of 3 sessions completed"


def test_a_folder_without_a_measurement_is_not_signed(tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match="no part was measured"):
        write_statement(tmp_path, FACTS, owner=OWNER)


@pytest.mark.parametrize("name", ["interleaved/notes.txt", "interleaved/receipts/x.json", "null/receipts/0000.json"])
def test_a_file_that_nobody_signed(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("{}")
    assert refusal(folder).code is Code.ARTIFACT_INVALID


def test_a_part_that_nobody_signed(tmp_path: Path, honest: Path) -> None:
    write(tmp_path / "out", modes=[Mode.INTERLEAVED], phases=0)
    shutil.copytree(honest / "null", tmp_path / "out/null")
    assert "does not speak of the part null" in refusal(tmp_path / "out").message
    shutil.rmtree(tmp_path / "out/null")
    (tmp_path / "out/phases.jsonl").write_bytes((honest / "phases.jsonl").read_bytes())
    assert "does not speak of phases.jsonl" in refusal(tmp_path / "out").message


def test_a_part_or_its_receipts_behind_a_link(honest: Path, folder: Path) -> None:
    for name in ("interleaved", "interleaved/receipts", "null"):
        shutil.rmtree(folder / name)
        (folder / name).symlink_to(honest / name)
        assert refusal(folder).code is Code.ARTIFACT_INVALID
        (folder / name).unlink()
        shutil.copytree(honest / name, folder / name)
    assert verified(folder).status is Status.GOOD


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("statement.json", (8 << 20) + 1),
        ("interleaved/analysis.json", MAX_ANALYSIS_BYTES + 1),
        ("interleaved/design.json", 5000),
        ("interleaved/slices.jsonl", 1 << 20),
        ("interleaved/sessions.jsonl", 1 << 20),
        ("interleaved/receipts/0000.json", (1 << 20) + 1),
        ("phases.jsonl", 1 << 20),
    ],
)
def test_an_endless_line_or_file_is_not_read_to_its_end(folder: Path, name: str, size: int) -> None:
    with (folder / name).open("wb") as out:
        out.truncate(size)
    assert refusal(folder).code is Code.ARTIFACT_INVALID


def test_more_lines_than_any_measurement_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glasshouse.bench.overhead.artifact.MAX_RECORDS", 10)
    assert "more than 10 lines" in refusal(folder).message


@pytest.mark.parametrize("name", ["interleaved/slices.jsonl", "interleaved/sessions.jsonl", "phases.jsonl"])
def test_no_more_lines_are_read_than_were_signed(folder: Path, name: str) -> None:
    lines = (folder / name).read_bytes().splitlines(keepends=True)
    (folder / name).write_bytes(b"".join([*lines, b"this line is never looked at\n"]))
    assert f"has more than {len(lines)} lines" in refusal(folder).message


def test_times_at_the_end_of_the_integers_are_refused_and_crash_nothing(folder: Path) -> None:
    def endless(found: list[dict[str, Any]]) -> None:
        measured(found, arm="P", position=3, session=2, block=3).update(t1_ns=2**53 - 1)

    edit_lines(folder / "null/slices.jsonl", lambda found: endless(found))
    reseal(folder)
    assert verified(folder).lacks == ()


def test_a_failed_attempt_stays_in_the_count(tmp_path: Path) -> None:
    """A session whose protected run failed: its slices, its reason and its receipt are all there."""

    def failed(world: SessionRun, told: Any) -> bytes:
        if world.session == "interleaved 2":
            return world.run(outcome=Outcome.FAILED, code=Code.WORKER_KILLED, reach=State.RUNNING, change=told).data
        return world.run(change=told).data

    with pytest.raises(VerificationError):  # its note must not say that it ended by itself
        write(tmp_path / "out", phases=0, run=failed)
    folder = tmp_path / "out"

    def broke_off(found: list[dict[str, Any]]) -> None:
        cut = [one for one in found if one["session"] == 2 and one.get("phase") == "measured" and one["block"] > 0]
        for one in cut:
            found.remove(one)
        found[-1].update(blocks_started=1, outcome="failed", code="worker-killed")

    edit_lines(folder / "interleaved/slices.jsonl", broke_off)
    edit_lines(folder / "interleaved/sessions.jsonl", lambda found: found[2].update(protected=None))
    write_statement(folder, FACTS, owner=OWNER)
    verdict = verified(folder)
    assert verdict.status is Status.GOOD
    assert links(verdict)["interleaved"] == "9 of 9 blocks count; 2 of 3 sessions completed"
    ended = [record for record in verdict.measurement.parts[0].records if isinstance(record, SessionEnd)]
    assert ended[-1].code is Code.WORKER_KILLED


def test_runs_that_never_trained_cannot_stand_behind_a_word(tmp_path: Path) -> None:
    """An owner who invents slices, says that every session failed, and lays receipts of failed runs beside them."""

    def run(world: SessionRun, told: Callable[[Receipt], Receipt]) -> bytes:
        def failed(receipt: Receipt) -> Receipt:
            return replace(told(receipt), work=None)

        return world.run(outcome=Outcome.FAILED, code=Code.WORKER_KILLED, reach=State.RUNNING, change=failed).data

    def all_failed(found: list[dict[str, Any]]) -> None:
        for one in found:
            if one["kind"] == "session":
                one.update(outcome="failed", code="worker-killed")

    folder = tmp_path / "out"
    write(folder, phases=0, modes=[Mode.NULL])
    design = small_design(Mode.INTERLEAVED)
    records = run_world(Machine(noise=0.004), design, np.random.default_rng(3))
    write_part(folder / "interleaved", design, records, run=run)
    edit_lines(folder / "interleaved/slices.jsonl", all_failed)
    edit_lines(folder / "interleaved/sessions.jsonl", lambda found: [one.update(protected=None) for one in found])
    write_statement(folder, FACTS, owner=OWNER)
    verdict = verified(folder)
    assert (verdict.lacks, verdict.exit_code) == ((Lack.RUNS,), ExitCode.INCOMPLETE)
    assert "no protected run that was timed completed" in verdict.sentence
    assert "3 of runs that did not complete" in links(verdict)["receipts"]


def test_the_lowest_level_is_told_and_not_the_highest(honest: Path) -> None:
    backings = verified(honest).backings
    weaker = replace(backings[0], assurance="unattested")
    stronger = replace(backings[0], assurance="gpu-tee")
    assert lowest([stronger, backings[0], replace(backings[0], assurance=None)]) == "software"
    assert lowest([stronger, weaker]) == "unattested"
    assert lowest([]) is None


def test_the_designs_of_the_three_parts_are_their_own() -> None:
    assert len({small_design(mode).sha256 for mode in Mode}) == 3
