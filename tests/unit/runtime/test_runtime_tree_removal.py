"""A folder goes with all that a worker left in it, and nothing else goes with it."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from glasshouse.runtime.kernel import CLONE_NEWNS, MS_BIND, MS_PRIVATE, MS_REC, REAL
from glasshouse.runtime.worker import tree_removal
from tools.forked import in_child
from tools.machine import needs_namespaces, needs_root

NOBODY = 65534


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder that any user can reach, for those that a child of another user makes in it."""
    path = Path("/tmp") / f"glasshouse-removal-{os.urandom(8).hex()}"
    path.mkdir()
    path.chmod(0o1777)
    yield path
    subprocess.run(["rm", "-rf", path], check=True)


def nest(depth: int, name: str) -> None:
    """Make folders in folders, with a file in each, below the working folder."""
    for _ in range(depth):
        Path(name).mkdir()
        Path("plain").write_text("the owner's")
        os.chdir(name)


@pytest.mark.parametrize("name", ["d", "d" * 200], ids=["deeper-than-the-stack", "longer-than-a-path-may-be"])
def test_no_depth_is_too_deep_and_few_descriptors_are_enough(tmp_path: Path, name: str) -> None:
    top = tmp_path / "top"

    def story() -> tuple[bool, int]:
        top.mkdir()
        os.chdir(top)
        nest(1500, name)
        os.chdir("/")
        lowest_free = os.open("/", os.O_RDONLY)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 4, lowest_free + 4))
        gone = tree_removal.removed(str(top))
        again = os.open("/", os.O_RDONLY)
        return gone, again - lowest_free

    assert in_child(story, alone=True) == (True, 0)
    assert not top.exists()


def closed(top: Path) -> None:
    (top / "a" / "b" / "c").mkdir(parents=True)
    (top / "a" / "b" / "c" / "plain").write_text("the owner's")
    os.mkfifo(top / "a" / "b" / "pipe")
    for path, mode in ((top / "a" / "b" / "c", 0), (top / "a" / "b", 0o300), (top / "a", 0o500), (top, 0o300)):
        path.chmod(mode)


@pytest.mark.parametrize("user", [None, pytest.param(NOBODY, marks=needs_root)], ids=["this-user", "another-user"])
def test_folders_that_cannot_be_listed_or_written_go_too(place: Path, user: int | None) -> None:
    def story() -> bool:
        (place / "top").mkdir()
        closed(place / "top")
        return tree_removal.removed(str(place / "top"))

    assert in_child(story, user=user)
    assert not (place / "top").exists()


@needs_root
def test_files_that_were_made_immutable_or_append_only_go_too(tmp_path: Path) -> None:
    top = tmp_path / "top"
    (top / "folder" / "below").mkdir(parents=True)
    marked = [top / "file", top / "folder" / "below" / "file", top / "folder" / "below", top / "folder", top]
    for path in marked:
        if not path.exists():
            path.write_text("the owner's")
    program = shutil.which("chattr")
    flags = ["+i", "+a", "+i", "+a", "+i"]
    if program is None or any(
        subprocess.run([program, flag, path], capture_output=True, check=False).returncode
        for flag, path in zip(flags, marked, strict=True)
    ):
        pytest.skip("this file system has no such flags")
    with pytest.raises(PermissionError):
        (top / "folder").rmdir()
    assert tree_removal.removed(str(top))


def test_no_link_is_followed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("another's")
    kept.chmod(0o500)
    top = tmp_path / "top"
    (top / "below").mkdir(parents=True)
    (top / "below" / "link").symlink_to(kept)
    (top / "file").symlink_to(kept / "file")
    assert tree_removal.removed(str(top))
    (tmp_path / "link").symlink_to(kept)
    assert not tree_removal.removed(str(tmp_path / "link"))
    assert (kept / "file").read_text() == "another's"
    assert kept.stat().st_mode & 0o777 == 0o500


@needs_root
@needs_namespaces
def test_no_mount_is_entered_not_even_of_the_same_file_system(tmp_path: Path) -> None:
    kept, top = tmp_path / "kept", tmp_path / "top"
    kept.mkdir()
    (kept / "file").write_text("another's")
    for path in (top / "mount", top / "a" / "mount"):
        path.mkdir(parents=True)
    (top / "plain").write_text("the owner's")

    def story() -> tuple[bool, int]:
        REAL.unshare(CLONE_NEWNS)
        REAL.mount("none", "/", None, MS_REC | MS_PRIVATE)
        for path in (top / "mount", top / "a" / "mount"):
            REAL.mount(str(kept), str(path), None, MS_BIND)
        return tree_removal.removed(str(top)), len([path for path in top.rglob("*") if path.name == "plain"])

    assert in_child(story) == (False, 0)
    assert (kept / "file").read_text() == "another's"


def test_what_cannot_be_removed_keeps_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top = tmp_path / "top"
    for name in ("stays", "goes"):
        (top / name / "deep").mkdir(parents=True)
        (top / name / "deep" / name).write_text("the owner's")
    unlink = os.unlink

    def refuse(name: str, *, dir_fd: int) -> None:
        if name == "stays":
            raise PermissionError(name)
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr("glasshouse.runtime.worker.tree_removal.os.unlink", refuse)
    assert not tree_removal.removed(str(top))
    assert [path.name for path in top.rglob("*") if path.is_file()] == ["stays"]
    monkeypatch.undo()
    assert tree_removal.removed(str(top))


def test_a_folder_that_never_gets_empty_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "top").mkdir()
    (tmp_path / "top" / "file").write_text("the owner's")
    assert not tree_removal.removed(str(tmp_path / "top"), give_up_s=0)
    assert tree_removal.removed(str(tmp_path / "top"))


def test_very_many_names_are_never_held_at_once(tmp_path: Path) -> None:
    top = tmp_path / "top"
    code = f"""
import resource
from glasshouse.runtime.worker import tree_removal
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert tree_removal.removed({str(top)!r})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    top.mkdir()
    for number in range(20_000):
        os.close(os.open(top / f"{number:0200}", os.O_CREAT | os.O_WRONLY))
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 2048, "KiB: the names alone are 4000"
    assert not top.exists()
