"""What lies beside a receipt: logs, heads and files that contradict it, are missing, or are something else."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import Code, GlasshouseError, UsageError, VerificationError
from glasshouse.evidence.bundle import Bundle
from glasshouse.evidence.events import ProbeResult
from glasshouse.evidence.receipt import Probe
from glasshouse.jobs.verify.documents import verify_file
from glasshouse.jobs.verify.receipt_chain import walk
from glasshouse.jobs.verify.verdict import Verdict, verify_bundle
from glasshouse.wire.states import Outcome, State
from simulators.measured import measured
from simulators.world import Run, World, with_log


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@pytest.fixture(scope="module")
def run(world: World) -> Run:
    return world.run()


def head_lines(run: Run) -> list[bytes]:
    return [head.encode() + b"\n" for head in run.heads]


# ---- the log beside the bundle


@pytest.fixture
def verdict(world: World, run: Run) -> Verdict:
    return verify_bundle(run.data, owner=world.owner.public)


def test_log_and_heads_tell_the_receipts_story(verdict: Verdict, run: Run) -> None:
    told = with_log(verdict, run.lines, head_lines(run))
    assert told.to_json()["log_events"] == len(run.lines)


def lying_receipt(world: World, **changes: Any) -> tuple[Verdict, Run]:
    run = World().run(change=lambda receipt: replace(receipt, **changes))
    return verify_bundle(run.data, owner=world.owner.public), run


def test_a_receipt_that_tells_another_story_than_its_log(world: World, run: Run) -> None:
    receipt = run.receipt
    assert receipt.work is not None
    lies: list[dict[str, Any]] = [
        {"outcome": Outcome.FAILED, "code": Code.WORKER_FAILED},
        {"zeroization": receipt.zeroization[::-1]},
        {"zeroization": (*receipt.zeroization, Probe(probe="zeroization", result=ProbeResult.CLEAN))},
        {"zeroization": (replace(receipt.zeroization[0], detail="none"), *receipt.zeroization[1:])},
        {"work": replace(receipt.work, done=4)},
        {"work": replace(receipt.work, unit="epoch")},
        {"outputs": receipt.outputs[:1]},
        {"outputs": (replace(receipt.outputs[0], sealed_sha256=bytes(32)), receipt.outputs[1])},
        {"segments": 0},
    ]
    for lie in lies:
        verdict, told = lying_receipt(world, **lie)
        with pytest.raises(VerificationError, match="different") as caught:
            with_log(verdict, told.lines)
        assert caught.value.code is Code.LOG_INVALID


def test_a_log_whose_digests_are_of_something_else(world: World) -> None:
    honest = World()
    honest.measurement = measured("another")  # what the log says; claims and receipt say so too
    run = honest.run()
    assert any(b'"subject":"measurement"' in line for line in run.lines)
    other = replace(run.receipt, measurement=b"\x01" * 32)
    chain = walk(World().run().data, owner=world.owner.public)
    verdict = Verdict(chain=replace(chain, receipt=other, head=run.heads[-1].head))
    with pytest.raises(VerificationError, match="digests"):
        with_log(verdict, run.lines)


def test_heads_that_are_none_or_of_another_run(verdict: Verdict, run: Run) -> None:
    other = World("rival").run()
    mine = head_lines(run)
    for lines in ([b"{}\n"], head_lines(other)[:1], [mine[1], mine[0]], [*mine, mine[-1]]):
        with pytest.raises(VerificationError) as caught:
            with_log(verdict, run.lines, lines)
        assert caught.value.code is Code.LOG_INVALID


def test_countersigned_heads_beside_a_run_that_nobody_attested(world: World, run: Run) -> None:
    refused = World().run(
        attested=False, evidence_made=False, reach=State.CREATED, outcome=Outcome.REFUSED, code=Code.HARDENING_MISSING
    )
    verdict = verify_bundle(refused.data, owner=world.owner.public)
    with pytest.raises(VerificationError, match="never attested"):
        with_log(verdict, refused.lines, head_lines(run)[:1])


def test_no_head_is_taken_out_in_silence_and_the_last_one_ends_with_its_line(verdict: Verdict, run: Run) -> None:
    mine = head_lines(run)
    assert len(mine) > 2
    for lines in ([], mine[1:], mine[:1] + mine[2:], mine[:-1], [*mine[:-1], mine[-1][:-1]], [*mine, b"\n"]):
        with pytest.raises(VerificationError) as caught:
            with_log(verdict, run.lines, lines)
        assert caught.value.code is Code.LOG_INVALID


def test_a_head_that_is_repeated_without_end_is_not_read_to_the_end(verdict: Verdict, run: Run) -> None:
    """The machine's host fills the owner's memory with copies of one genuine line."""

    def copies() -> Iterator[bytes]:
        for number in range(10 * len(run.lines)):
            assert number <= len(run.lines), "a log of so many events has no more heads"
            yield run.heads[0].encode() + b"\n"

    with pytest.raises(VerificationError) as caught:
        with_log(verdict, run.lines, copies())
    assert caught.value.code is Code.LOG_INVALID


def test_a_full_disk_may_lose_a_head_of_a_run_that_failed_and_of_no_other(world: World) -> None:
    failed = World().run(outcome=Outcome.FAILED, code=Code.DISK_FULL, reach=State.RUNNING)
    verdict = verify_bundle(failed.data, owner=world.owner.public)
    lines = head_lines(failed)
    assert with_log(verdict, failed.lines, lines[:1] + lines[2:]).heads == len(lines) - 1
    with pytest.raises(VerificationError):
        with_log(verdict, failed.lines, lines[:-1])


# ---- files


@pytest.fixture
def folder(tmp_path: Path, run: Run) -> Path:
    (tmp_path / "receipt.json").write_bytes(run.data)
    (tmp_path / "events.log").write_bytes(b"".join(run.lines))
    (tmp_path / "heads.log").write_bytes(b"".join(head_lines(run)))
    return tmp_path


def link_to_itself(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("name", ["receipt.json", "events.log", "heads.log"])
def test_any_file_of_a_run_verifies_it_whole(world: World, folder: Path, name: str) -> None:
    verdict = verify_file(folder / name, owner=world.owner.public)
    assert isinstance(verdict, Verdict)
    assert verdict.log is not None


def test_a_damaged_log_beside_a_sound_bundle_is_refused(world: World, folder: Path) -> None:
    log = folder / "events.log"
    log.write_bytes(log.read_bytes().replace(b'"0.8"', b'"0.7"'))
    with pytest.raises(VerificationError) as caught:
        verify_file(folder / "receipt.json", owner=world.owner.public)
    assert caught.value.code is Code.LOG_INVALID


def test_a_bundle_alone_is_verified_without_its_log(world: World, folder: Path) -> None:
    (folder / "events.log").unlink()
    verdict = verify_file(folder / "receipt.json", owner=world.owner.public)
    assert isinstance(verdict, Verdict)
    assert verdict.log is None
    assert any("events" in part for part in verdict.not_looked_at)
    assert verdict.to_json()["not_looked_at"] == list(verdict.not_looked_at)


@pytest.mark.parametrize("name", ["events.log", "heads.log"])
def test_of_a_run_a_log_that_is_missing_is_never_passed_over(world: World, folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(VerificationError, match=name) as caught:
        verify_file(folder / "receipt.json", owner=world.owner.public, whole=True)
    assert caught.value.code is Code.LOG_INVALID
    with pytest.raises(UsageError) as named:
        verify_file(folder / name, owner=world.owner.public)
    assert named.value.code is Code.FILE_MISSING


@pytest.mark.parametrize("instead", [link_to_itself, a_folder, a_pipe])
@pytest.mark.parametrize("name", ["events.log", "heads.log"])
def test_what_stands_in_the_place_of_a_log_must_be_a_file(
    world: World, folder: Path, name: str, instead: Callable[[Path], None]
) -> None:
    """A pipe would never end, and a link leads to what somebody can change while it is read."""
    instead(folder / name)
    for whole in (True, False):
        with pytest.raises(VerificationError, match="not a regular file") as caught:
            verify_file(folder / "receipt.json", owner=world.owner.public, whole=whole)
        assert caught.value.code is Code.LOG_INVALID


@pytest.mark.parametrize("instead", [link_to_itself, a_folder, a_pipe])
def test_what_stands_in_the_place_of_a_receipt_must_be_a_file(
    world: World, folder: Path, instead: Callable[[Path], None]
) -> None:
    instead(folder / "receipt.json")
    with pytest.raises(UsageError, match="not a regular file"):
        verify_file(folder / "receipt.json", owner=world.owner.public)


def test_a_log_alone_proves_nothing(world: World, folder: Path) -> None:
    (folder / "receipt.json").unlink()
    with pytest.raises(VerificationError) as caught:
        verify_file(folder / "events.log", owner=world.owner.public)
    assert caught.value.code is Code.CHAIN_INCOMPLETE


def test_a_file_that_is_not_there_or_is_none_of_these(world: World, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        verify_file(tmp_path / "nothing", owner=world.owner.public)
    assert caught.value.code is Code.FILE_MISSING
    other = tmp_path / "photo.png"
    other.write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(GlasshouseError):
        verify_file(other, owner=world.owner.public)


def test_bundles_are_parsed_as_they_were_written(run: Run) -> None:
    assert Bundle.parse(run.data).encode() == run.data


@pytest.mark.parametrize(
    ("outcome", "code", "says"),
    [
        (Outcome.INTERRUPTED, Code.INTERRUPTED, "it was interrupted."),
        (Outcome.FAILED, Code.WORKER_KILLED, "it failed (worker-killed)."),
    ],
)
def test_a_run_that_did_not_complete_is_not_called_complete(
    world: World, outcome: Outcome, code: Code, says: str
) -> None:
    verdict = verify_bundle(world.run(outcome=outcome, code=code).data, owner=world.owner.public)
    assert verdict.sentence.startswith(f"Authentic (assurance software): the run did not complete; {says} ")
