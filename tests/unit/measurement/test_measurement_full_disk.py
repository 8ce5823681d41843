"""The disk is full while a measurement writes: one sentence, nothing half-written; it goes on when there is room."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from glasshouse.errors import Code, RunError, UsageError
from glasshouse_bench.artifact import Part, read_file
from glasshouse_bench.design import Mode
from glasshouse_bench.harness.planning import Wish
from glasshouse_bench.harness.room import room_for
from glasshouse_bench.statement import write_statement
from glasshouse_bench.verify import verify_measurement
from simulators.instant_bench import Bench
from simulators.slot_measurement import CREATED_US
from tools.memory_disk import fill, memory_disk

WISH = Wish(modes=[Mode.INTERLEAVED, Mode.NULL], seconds=80, margin=0.01)
KIB = 1024


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with memory_disk(tmp_path / "disk", size="4m", names=400) as place:
        yield place


# Where it breaks off: calibration, owner, a design, a raw and a later protected record; every folder, and a note.
@pytest.mark.parametrize(
    "free",
    [{"free_bytes": kib * KIB} for kib in (0, 4, 12, 28, 300)] + [{"free_names": names} for names in (0, 3, 5, 13)],
    ids=str,
)
def test_a_disk_that_fills_up_ends_it_in_a_sentence_and_it_goes_on(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: dict[str, int]
) -> None:
    bench = Bench(disk / "mine", tmp_path, monkeypatch, records=True)
    filler = fill(disk, **free)
    with pytest.raises(UsageError, match="no room to write") as full:
        bench.measure(WISH, sessions=-1)
    assert full.value.code is Code.DISK_FULL
    assert f"the same command goes on with what is complete: -o {bench.folder}" in full.value.hint
    left = [path for path in bench.folder.rglob("*") if path.is_file()]
    assert not [path for path in left if path.name in ("statement.json", "analysis.json") or path.suffix == ".part"]
    for path in left:
        assert path.stat().st_size, f"{path.name} is half-written"
    tried = len(bench.sessions)

    shutil.rmtree(filler)
    parts = bench.measure(WISH, sessions=-1)
    assert [part.attempted for part in parts] == [part.design.sessions for part in parts]
    write_statement(bench.folder, owner=bench.owner.signing, created_us=CREATED_US)
    measured = verify_measurement(bench.folder, owner=bench.owner.public).measurement
    outcomes = [one.analysis["attempts"]["outcomes"] for one in measured.parts]
    lost = sum(one.get("died", 0) for one in outcomes)
    assert lost <= min(1, tried)
    assert sum(one["complete"] for one in outcomes) + lost == sum(part.design.sessions for part in parts)


def test_a_statement_that_has_no_room_is_none(disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(disk / "mine", tmp_path, monkeypatch, records=True)
    bench.measure(WISH, sessions=-1)
    filler = fill(disk, free_bytes=0)
    with pytest.raises(UsageError, match="no room to write"), room_for(bench.folder):
        write_statement(bench.folder, owner=bench.owner.signing, created_us=CREATED_US)
    assert not list(bench.folder.rglob("statement.json"))
    shutil.rmtree(filler)
    write_statement(bench.folder, owner=bench.owner.signing, created_us=CREATED_US)
    assert verify_measurement(bench.folder, owner=bench.owner.public).measurement.parts


def test_a_killed_writer_leaves_no_file_that_a_verifier_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path / "mine", tmp_path, monkeypatch)
    bench.measure(WISH)
    part = Part.open(bench.folder, Mode.INTERLEAVED)
    half = [part.folder / ".00.part", part.folder / "receipts" / ".11.part"]
    for path in half:
        path.write_bytes(b"half")
    bench.measure(WISH)
    assert not [path for path in half if path.exists()]
    assert read_file(part.folder / "design.json", max_bytes=1 << 16)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_for_what_a_run_needs_is_no_defect(tmp_path: Path, number: int) -> None:
    with pytest.raises(UsageError, match=r"no room to write /elsewhere/raw\.log") as full, room_for(tmp_path):
        raise OSError(number, os.strerror(number), "/elsewhere/raw.log")
    assert (full.value.code, "goes on" in full.value.hint) == (Code.DISK_FULL, True)


def test_a_worker_that_had_no_room_in_the_calibration_says_what_to_do(tmp_path: Path) -> None:
    last = "OSError: [Errno 28] No space left on device | glasshouse: the training failed"
    with pytest.raises(UsageError, match="No space left") as full, room_for(tmp_path):
        raise RunError(Code.WORKER_FAILED, f"the job does not run: {last}")
    assert (full.value.code, "free some space" in full.value.hint) == (Code.DISK_FULL, True)


@pytest.mark.parametrize("other", [OSError(errno.EIO, "it broke"), RunError(Code.INTERRUPTED, "stopped")])
def test_whatever_else_goes_wrong_is_said_as_it_is(tmp_path: Path, other: Exception) -> None:
    with pytest.raises(type(other)) as raised, room_for(tmp_path):
        raise other
    assert raised.value is other
