"""State files are whole or absent, ours alone, and never written through somebody else's link."""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

from glasshouse.errors import Code, UsageError
from glasshouse.jobs.owner.home import (
    is_file,
    is_there,
    locked,
    private_folder,
    read_bounded,
    read_state,
    write_private,
    write_state,
)


@contextmanager
def little_room(count: int) -> Iterator[None]:
    """No file may grow beyond `count` bytes: the kernel answers as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_private_file_is_for_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_private(tmp_path / "secret", b"content")
        folder = private_folder(tmp_path / "folder" / "inner")
    finally:
        os.umask(before)
    assert (tmp_path / "secret").read_bytes() == b"content"
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_others_may_enter_is_closed_and_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o777)
    private_folder(tmp_path / "open")
    assert stat.S_IMODE((tmp_path / "open").stat().st_mode) == 0o700
    (tmp_path / "link").symlink_to(tmp_path / "open")
    with pytest.raises(UsageError, match="link"):
        private_folder(tmp_path / "link")


def test_writing_replaces_a_link_and_not_what_it_points_to(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"untouched")
    (tmp_path / "state").symlink_to(victim)
    write_private(tmp_path / "state", b"new")
    assert victim.read_bytes() == b"untouched"
    assert not (tmp_path / "state").is_symlink()


def test_without_replace_an_existing_file_stays_as_it_was(tmp_path: Path) -> None:
    write_private(tmp_path / "file", b"first")
    with pytest.raises(UsageError) as refused:
        write_private(tmp_path / "file", b"second", replace=False)
    assert refused.value.code is Code.USAGE
    assert (tmp_path / "file").read_bytes() == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_leaves_the_old_file_and_no_half_of_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_private(path, b"old")

    def long(out: BinaryIO) -> None:
        for _ in range(64):
            out.write(bytes(4096))

    with little_room(32768), pytest.raises(UsageError) as full:
        write_private(path, long)
    assert full.value.code is Code.DISK_FULL
    assert path.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def broken(out: BinaryIO) -> None:
        out.write(b"half")
        raise RuntimeError("the source went away")

    with pytest.raises(RuntimeError):
        write_private(tmp_path / "file", broken)
    assert list(tmp_path.iterdir()) == []


def test_a_name_may_be_as_long_as_the_file_system_lets_it(tmp_path: Path) -> None:
    """63 characters of four bytes each: a temporary name with the final one in it would be too long."""
    path = tmp_path / ("\U0001f9ec" * 63)
    write_private(path, b"content")
    assert path.read_bytes() == b"content"
    with pytest.raises(UsageError) as refused:
        write_private(tmp_path / ("\U0001f9ec" * 64), b"content")
    assert refused.value.code is Code.USAGE
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["x" * 256, "y/" * 3000, "file/below"])
def test_a_name_that_cannot_be_is_not_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    assert (is_there(tmp_path / name), is_file(tmp_path / name)) == (False, False)
    assert (is_there(tmp_path / "file"), is_file(tmp_path / "file"), is_file(tmp_path)) == (True, True, False)


def test_a_folder_that_cannot_be_synced_is_no_defect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = os.fsync

    def refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(UsageError, match="input/output error"):
        write_private(tmp_path / "file", b"content")


def test_reading_is_bounded_and_takes_regular_files_only(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(bytes(100))
    with pytest.raises(UsageError) as too_long:
        read_bounded(tmp_path / "long", max_bytes=99)
    assert too_long.value.code is Code.TOO_LARGE
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "absent", "."):
        with pytest.raises(UsageError) as missing:
            read_bounded(tmp_path / name)
        assert missing.value.code is Code.FILE_MISSING


def test_state_survives_the_round_trip_and_damage_is_named(tmp_path: Path) -> None:
    write_state(tmp_path / "state.json", {"name": "Zürich", "count": 3})
    assert read_state(tmp_path / "state.json", what="state") == {"name": "Zürich", "count": 3}
    for damage in (b"", b"[1]", b'{"name":', b"\xff"):
        (tmp_path / "state.json").write_bytes(damage)
        with pytest.raises(UsageError, match="damaged"):
            read_state(tmp_path / "state.json", what="state")


def test_folders_on_the_way_are_ours_alone_too_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        private_folder(tmp_path / "a" / "b" / "home")
    finally:
        os.umask(before)
    for folder in ("a", "a/b", "a/b/home"):
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o700


def test_the_lock_of_a_folder_that_is_not_there_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be opened"), locked(tmp_path / "home"):
        pass
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "moved").mkdir()
    (tmp_path / "home").symlink_to("moved")
    with locked(tmp_path / "home"):
        assert (tmp_path / "home").is_dir()
    with locked(tmp_path / "lock", file=True):
        assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600
