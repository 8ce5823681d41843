"""Nothing enters a package but regular files below the job file's folder, as they were when they were listed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import Code, PackageError, UsageError
from glasshouse.jobs.define import input_files
from glasshouse.jobs.define.input_files import gather


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    job = tmp_path / "job"
    (job / "data" / "deep").mkdir(parents=True)
    (job / "train.py").write_text("print()")
    (job / "data" / "b.csv").write_text("b")
    (job / "data" / "deep" / "a.csv").write_text("aa")
    (tmp_path / "outside.txt").write_text("secret of another")
    return job


def test_files_and_folders_keep_their_names_in_order(folder: Path) -> None:
    sources = gather(folder, {"train.py": "train.py", "records": "data"}).sources
    assert [(source.path, source.bytes) for source in sources] == [
        ("records/b.csv", 1),
        ("records/deep/a.csv", 2),
        ("train.py", 7),
    ]
    with sources[1].open() as stream:
        assert stream.read() == b"aa"


@pytest.mark.parametrize(
    "path", ["../outside.txt", "data/../../outside.txt", "/etc/hostname", "~/x", "data/../train.py"]
)
def test_a_path_that_leaves_the_folder_is_refused(folder: Path, path: str) -> None:
    with pytest.raises(UsageError, match="leaves the job file's folder"):
        gather(folder, {"x": path})


def test_a_link_is_refused_wherever_it_stands_on_the_way(folder: Path) -> None:
    (folder / "link.txt").symlink_to(folder.parent / "outside.txt")
    (folder / "linked").symlink_to(folder / "data")
    (folder / "data" / "inner.csv").symlink_to(folder.parent / "outside.txt")
    for path in ("link.txt", "linked", "linked/b.csv", "data"):
        with pytest.raises(UsageError) as refused:
            gather(folder, {"x": path})
        assert refused.value.code is Code.JOB_INVALID
        assert "link" in refused.value.message


def test_devices_and_pipes_are_refused(folder: Path) -> None:
    os.mkfifo(folder / "data" / "pipe")
    for path in ("data", "data/pipe"):
        with pytest.raises(UsageError, match="device"):
            gather(folder, {"x": path})


def test_missing_and_empty_inputs_are_named(folder: Path) -> None:
    (folder / "nothing").mkdir()
    for path in ("absent.csv", "nothing"):
        with pytest.raises(UsageError) as missing:
            gather(folder, {"table": path})
        assert missing.value.code is Code.FILE_MISSING
        assert "inputs.'table'" in missing.value.message


def test_two_inputs_of_one_name_are_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="two inputs would both be"):
        gather(folder, {"data": "data", "data/b.csv": "train.py"})


def test_a_file_that_changes_before_it_is_read_is_refused(folder: Path) -> None:
    grown, swapped = (gather(folder, {"x": path}).sources for path in ("train.py", "data/b.csv"))
    (folder / "train.py").write_text("print('longer')")
    (folder / "data" / "b.csv").unlink()
    (folder / "data" / "b.csv").symlink_to(folder.parent / "outside.txt")
    for sources in (grown, swapped):
        with pytest.raises(UsageError) as changed:
            sources[0].open()
        assert changed.value.code is Code.SOURCE_CHANGED


def test_a_folder_swapped_for_a_link_after_listing_is_not_followed(folder: Path) -> None:
    """Between listing and reading an attacker exchanges a folder for a link to another with the same names."""
    sources = gather(folder, {"records": "data/deep"}).sources
    (folder / "data").rename(folder / "moved")
    elsewhere = folder.parent / "elsewhere" / "deep"
    elsewhere.mkdir(parents=True)
    (elsewhere / "a.csv").write_text("!!")
    (folder / "data").symlink_to(elsewhere.parent)
    with pytest.raises(UsageError) as changed:
        sources[0].open()
    assert changed.value.code is Code.SOURCE_CHANGED


def test_links_to_files_are_followed_where_the_owner_says_so_and_never_elsewhere(folder: Path) -> None:
    """A snapshot of the hub consists of links into another folder."""
    (folder / "snapshot").mkdir()
    (folder / "snapshot" / "model.bin").symlink_to("../../outside.txt")
    with pytest.raises(UsageError) as refused:
        gather(folder, {"model": "snapshot"})
    assert "follow_links = true" in refused.value.hint
    (source,) = gather(folder, {"model": "snapshot"}, follow_links=True).sources
    # Led elsewhere after it was resolved: what was listed is what is packed.
    (folder / "snapshot" / "model.bin").unlink()
    (folder / "snapshot" / "model.bin").symlink_to("../train.py")
    with source.open() as stream:
        assert (source.path, stream.read()) == ("model/model.bin", b"secret of another")


def test_a_followed_link_leads_to_a_regular_file_or_nowhere(folder: Path) -> None:
    os.mkfifo(folder.parent / "pipe")
    for name, target in {"pipe": "../pipe", "null": "/dev/null", "folder": "data", "gone": "gone", "a": "none"}.items():
        (folder / name).symlink_to(target)
        with pytest.raises(UsageError) as refused:
            gather(folder, {"x": name}, follow_links=True)
        assert refused.value.code in (Code.JOB_INVALID, Code.FILE_MISSING)
        assert "no regular file" in refused.value.message or "leads to nothing" in refused.value.message


def test_a_followed_file_exchanged_after_listing_is_refused(folder: Path) -> None:
    (folder / "link").symlink_to("../outside.txt")
    (source,) = gather(folder, {"x": "link"}, follow_links=True).sources
    (folder.parent / "outside.txt").unlink()
    (folder.parent / "outside.txt").symlink_to("job/train.py")
    with pytest.raises(UsageError) as refused:
        source.open()
    assert refused.value.code is Code.SOURCE_CHANGED


def test_a_file_exchanged_in_place_with_its_old_size_and_time_is_refused(folder: Path) -> None:
    path = folder / "train.py"
    before = path.stat()
    sources = gather(folder, {"x": "train.py"}).sources
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # the kernel's clock goes in steps
        path.write_text("a key!!")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with pytest.raises(UsageError) as changed:
        sources[0].open()
    assert changed.value.code is Code.SOURCE_CHANGED


@pytest.fixture
def bottomless(folder: Path) -> Iterator[Path]:
    """A folder in which folders lie in each other deeper than Python calls functions."""
    where = os.open(folder / "data", os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("d", dir_fd=where)
        below = os.open("d", os.O_RDONLY, dir_fd=where)
        os.close(where)
        where = below
    os.close(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=where))
    os.close(where)
    yield folder
    subprocess.run(["rm", "-r", folder / "data"], check=True)  # deeper than the test's own cleaning reaches


def test_folders_in_folders_without_end_are_too_long_a_name_and_no_defect(bottomless: Path) -> None:
    with pytest.raises(PackageError, match="1 to 1024 bytes"):
        gather(bottomless, {"x": "data"})


def test_a_name_that_is_no_text_is_named(folder: Path) -> None:
    (folder / "data" / os.fsdecode(b"caf\xe9.csv")).write_text("latin-1")
    with pytest.raises(PackageError, match=r"caf.*is not Unicode text"):
        gather(folder, {"x": "data"})


def test_a_folder_of_too_many_files_is_not_listed_to_its_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(50):
        (folder / "data" / str(number)).touch()
    monkeypatch.setattr(input_files, "_MAX_FILES", 10)
    seen: list[str] = []
    leaves_out = input_files._Walk._leaves_out

    def counted(walk: Any, name: str, entry: os.DirEntry[str], *rest: Any) -> bool:
        seen.append(entry.name)
        return leaves_out(walk, name, entry, *rest)

    monkeypatch.setattr(input_files._Walk, "_leaves_out", counted)
    with pytest.raises(UsageError, match="more than 10 files") as refused:
        gather(folder, {"x": "data"})
    assert "exclude" in refused.value.hint
    assert len(seen) < 20
