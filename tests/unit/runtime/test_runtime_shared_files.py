"""What stays in the machine's shared memory is found; what others have there, come and go or large, does no harm."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from glasshouse.evidence.events import ProbeResult
from glasshouse.runtime.keys import memory_search, shared_files
from glasshouse.runtime.run import probes
from tools.forked import in_child

CLEAN, FOUND, UNVERIFIABLE = ProbeResult.CLEAN, ProbeResult.FOUND, ProbeResult.UNVERIFIABLE
LATER_NS = 3_000_000_000


@pytest.fixture
def needles() -> list[memoryview]:
    return [memoryview(bytearray(os.urandom(32))) for _ in range(4)]


def probe(needles: list[memoryview], folder: Path, before: shared_files.Before | None = None) -> probes.Probe:
    return probes.probe_shared_memory(needles, before=before or {}, folder=str(folder))


def settled(folder: Path) -> shared_files.Before:
    """What is there now, looked at when the last change lies some seconds back."""
    return shared_files.look_before(str(folder), now_ns=time.time_ns() + LATER_NS)


def after(look: int, happens: Callable[[], None]) -> Callable[[str], shared_files._Listing]:
    """Let something happen right after a listing, before what it lists is opened."""
    real, looks = shared_files._look, iter(range(100))

    def listing(folder: str) -> shared_files._Listing:
        found = real(folder)
        if next(looks) == look:
            happens()
        return found

    return listing


def test_needles_in_files_are_found_also_across_pieces(tmp_path: Path, needles: list[memoryview]) -> None:
    assert probe(needles, tmp_path).result is CLEAN
    (tmp_path / "below").mkdir()
    path = tmp_path / "below" / "sem"
    path.write_bytes(bytes(memory_search.CHUNK_BYTES + 31 - 16) + bytes(needles[2]))
    assert probe(needles, tmp_path).result is FOUND
    path.write_bytes(b"nothing")
    assert probe(needles, tmp_path).result is CLEAN


def test_a_machine_without_shared_memory_is_clean_and_a_search_for_nothing_is_not(tmp_path: Path) -> None:
    assert probe([], tmp_path).result is UNVERIFIABLE
    assert probe([], tmp_path / "missing").detail == "no-shared-memory"


def test_large_files_that_were_there_before_and_are_as_they_were_are_left_out(
    tmp_path: Path, needles: list[memoryview], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_files, "MAX_SEARCHED_BYTES", 1 << 20)
    large = tmp_path / "somebody-elses"
    large.write_bytes(b"\1" * (4 << 20))
    before = settled(tmp_path)
    assert probe(needles, tmp_path).result is UNVERIFIABLE
    assert probe(needles, tmp_path, before) == probes.Probe(
        probe="shared-memory", result=CLEAN, detail="searched-0-KiB"
    )
    with large.open("r+b") as file:
        file.write(bytes(needles[0]))
    assert probe(needles, tmp_path, before).result is FOUND


def test_what_the_run_wrote_is_found_beside_more_than_is_searched(
    tmp_path: Path, needles: list[memoryview], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_files, "MAX_SEARCHED_BYTES", 1 << 20)
    (tmp_path / "a-large-one").write_bytes(b"\1" * (4 << 20))
    (tmp_path / "z").write_bytes(bytes(needles[3]))
    assert probe(needles, tmp_path).result is FOUND


def test_a_file_that_changed_just_before_it_was_looked_at_is_searched(
    tmp_path: Path, needles: list[memoryview]
) -> None:
    """Two changes within one tick of the kernel's clock look like one."""
    (tmp_path / "fresh").write_bytes(bytes(needles[1]))
    assert shared_files.look_before(str(tmp_path), now_ns=time.time_ns()) == {}


def test_a_write_through_a_mapping_is_found_where_nothing_is_left_out(needles: list[memoryview]) -> None:
    """In shared memory, what is written to a page that is mapped for writing leaves no trace in the file's times."""
    folder = Path(shared_files.FOLDER) / f"glasshouse-test-{os.getpid()}"
    folder.mkdir(mode=0o700)
    try:
        (folder / "mapped").write_bytes(bytes(4096))
        with (folder / "mapped").open("r+b") as file, mmap.mmap(file.fileno(), 4096) as view:
            view[0] = 1
            before = settled(folder)
            view[100:132] = bytes(needles[0])
        assert settled(folder) == before
        assert probe(needles, folder).result is FOUND
    finally:
        (folder / "mapped").unlink()
        folder.rmdir()


def test_holes_of_a_large_file_are_not_read_and_what_lies_between_them_is(
    tmp_path: Path, needles: list[memoryview], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_files, "MAX_SEARCHED_BYTES", 1 << 20)
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(8 << 30)
    assert probe(needles, tmp_path).result is CLEAN
    needles[2][-1] = 0  # its last byte lies in the hole
    with (tmp_path / "sparse").open("r+b") as file:
        file.seek((4 << 30) - 31)
        file.write(bytes(needles[2])[:31])
    assert probe(needles, tmp_path).result is FOUND


def test_a_folder_that_vanishes_does_not_end_the_search(
    tmp_path: Path, needles: list[memoryview], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_bytes(bytes(needles[0]))
    real, gone = os.scandir, []

    def scandir(path: str) -> object:
        if Path(path) != tmp_path and not gone:
            gone.append(path)
            Path(path).rmdir()
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert probe(needles, tmp_path).result is FOUND
    assert gone


def test_files_that_come_and_go_meanwhile_are_gone(
    tmp_path: Path, needles: list[memoryview], monkeypatch: pytest.MonkeyPatch
) -> None:
    passing = tmp_path / "passing"
    passing.write_bytes(b"x")
    monkeypatch.setattr(shared_files, "_look", after(0, passing.unlink))
    assert probe(needles, tmp_path).result is CLEAN


def test_a_file_that_only_changes_its_name_meanwhile_is_searched(
    tmp_path: Path, needles: list[memoryview], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "before"
    path.write_bytes(bytes(needles[0]))
    monkeypatch.setattr(shared_files, "_look", after(0, lambda: path.rename(tmp_path / "after") and None))
    assert probe(needles, tmp_path).result is FOUND


def test_a_name_that_is_another_file_now_is_looked_at_again(
    tmp_path: Path, needles: list[memoryview], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "name"
    path.write_bytes(bytes(needles[0]))

    def swap() -> None:
        path.rename(tmp_path / "elsewhere")
        path.write_bytes(b"innocent")

    monkeypatch.setattr(shared_files, "_look", after(0, swap))
    assert probe(needles, tmp_path).result is FOUND


def test_where_something_vanishes_at_every_look_nothing_is_claimed(
    tmp_path: Path, needles: list[memoryview], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shared_files._look

    def restless(folder: str) -> shared_files._Listing:
        passing = tmp_path / "passing"
        passing.write_bytes(b"x")
        found = real(folder)
        passing.unlink()
        return found

    monkeypatch.setattr(shared_files, "_look", restless)
    assert probe(needles, tmp_path).detail == "files-not-searched-1"


def test_more_files_than_are_listed_are_unverifiable(
    tmp_path: Path, needles: list[memoryview], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_files, "_MAX_FILES", 2)
    for number in range(3):
        (tmp_path / str(number)).write_bytes(b"x")
    assert probe(needles, tmp_path).detail == "files-not-searched-1"


def test_a_file_and_a_folder_that_cannot_be_read_are_unverifiable_and_a_closed_folder_is_not(
    tmp_path: Path, needles: list[memoryview]
) -> None:
    """As root everything opens: another user's process asks."""
    if os.geteuid() != 0:
        pytest.skip("this machine's user is not root, who alone can become another")
    folder = Path(shared_files.FOLDER) / f"glasshouse-test-{os.getpid()}"
    folder.mkdir(mode=0o755)
    (folder / "closed").mkdir(mode=0o700)
    (folder / "closed" / "theirs").write_bytes(bytes(needles[0]))

    def as_another() -> tuple[str, str]:
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        closed = probe(needles, folder)
        return closed.result.value, closed.detail

    try:
        assert in_child(as_another) == ("clean", "searched-0-KiB")
        (folder / "closed").chmod(0o711)
        assert in_child(as_another) == ("unverifiable", "files-not-searched-1")
        (folder / "closed").chmod(0o700)
        (folder / "open-to-all").write_bytes(b"x")
        (folder / "open-to-all").chmod(0o622)
        assert in_child(as_another) == ("unverifiable", "files-not-searched-1")
    finally:
        (folder / "closed" / "theirs").unlink()
        (folder / "closed").rmdir()
        (folder / "open-to-all").unlink(missing_ok=True)
        folder.rmdir()
