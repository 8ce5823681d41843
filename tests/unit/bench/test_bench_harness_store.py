"""The files of a part: whole lines, whatever goes wrong."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from glasshouse.bench.harness import store as store_module
from glasshouse.bench.harness.store import Store
from glasshouse.bench.overhead.artifact import Part, read_design
from glasshouse.bench.overhead.design import Design, Mode
from glasshouse.bench.overhead.notes import SessionNote
from glasshouse.errors import Code, UsageError
from simulators.simulate import NO_WARMUP, World, run_session

DESIGN = Design(
    mode=Mode.NULL,
    seed=hashlib.sha256(b"store").digest(),
    sessions=1,
    blocks_per_session=2,
    slice_steps=10,
    warmup=NO_WARMUP,
)
RECORDS = run_session(World(), DESIGN, 0, np.random.default_rng(3))
NOTE = SessionNote(session=0, raw=None, protected=None, lifecycle_us=None, imports_us=None, bundle_sha256=None)


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "null", DESIGN)
    assert read_design(tmp_path / "null") == DESIGN  # before the first slice
    for record in RECORDS:
        store.append(record)
    store.note(NOTE)
    store.close()
    assert Part.load(tmp_path / "null").records == tuple(RECORDS)
    assert sorted(path.name for path in (tmp_path / "null").iterdir()) == [
        "design.json",
        "sessions.jsonl",
        "slices.jsonl",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["null"]


def test_a_part_is_never_written_over(tmp_path: Path) -> None:
    Store(tmp_path / "null", DESIGN).close()
    with pytest.raises(UsageError) as caught:
        Store(tmp_path / "null", DESIGN)
    assert caught.value.code is Code.USAGE


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_in_a_line_takes_the_whole_line_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store = Store(tmp_path / "null", DESIGN)
    store.append(RECORDS[0])
    real = os.write
    calls = iter(range(100))

    def half(descriptor: int, data: bytes) -> int:
        if next(calls):
            raise OSError(number, "full")
        return real(descriptor, bytes(data[:20]))

    with monkeypatch.context() as patch:
        patch.setattr(store_module.os, "write", half)
        with pytest.raises(UsageError) as caught:
            store.append(RECORDS[1])
    assert caught.value.code is Code.DISK_FULL
    assert (tmp_path / "null" / "slices.jsonl").read_bytes() == RECORDS[0].encode() + b"\n"
    # The room that was kept is real, and given back when it is asked for.
    room = tmp_path / ".null.room"
    assert room.stat().st_blocks * 512 >= 1 << 20
    store.make_room()
    assert not room.exists()
    store.append(RECORDS[1])
    store.close()
    assert (tmp_path / "null" / "slices.jsonl").read_bytes().count(b"\n") == 2


def test_a_folder_that_cannot_be_made_is_the_users_to_know(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError):
        Store(tmp_path / "file" / "null", DESIGN)


def test_a_receipt_is_kept_by_its_sessions_number(tmp_path: Path) -> None:
    store = Store(tmp_path / "null", DESIGN)
    store.receipt(7, b"{}")
    store.close()
    assert (tmp_path / "null" / "receipts" / "0007.json").read_bytes() == b"{}"
