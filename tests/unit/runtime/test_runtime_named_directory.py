"""A directory with a name is its agent's until that is gone, whichever container asks; then the next start takes it."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import PlatformError
from glasshouse.runtime.confine.mounts import MountTable
from glasshouse.runtime.worker import named_directory, tree_removal
from tools.forked import in_child
from tools.machine import needs_root

GONE = 2**22 + 1  # no process has this number


def test_a_directory_whose_agent_is_gone_is_swept_and_a_living_ones_is_not(tmp_path: Path) -> None:
    own = named_directory.make([str(tmp_path)])
    path = Path(own.path)
    dead = tmp_path / f"glasshouse-ws-{GONE}-12345-feed"
    reused = tmp_path / f"glasshouse-ws-{os.getpid()}-1-feed"  # our number, but another start
    for one in (dead, reused):
        (one / "work").mkdir(parents=True)
        (one / "work" / "plain").write_text("left behind")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"glasshouse-ws-{GONE}-1-link").symlink_to(tmp_path / "elsewhere")
    assert named_directory.sweep([str(tmp_path)]) == 2
    assert {one.name for one in tmp_path.iterdir()} == {path.name, "elsewhere", f"glasshouse-ws-{GONE}-1-link"}
    assert path.stat().st_mode & 0o777 == 0o700
    assert own.remove()
    assert own.remove(), "twice is fine"


def test_a_directory_of_an_agent_in_another_container_is_not_swept_while_that_lives(tmp_path: Path) -> None:
    """Its number is that of its own process namespace: here it is no process's, or another's."""
    own = named_directory.make([str(tmp_path)])
    elsewhere = tmp_path / f"glasshouse-ws-{GONE}-12345-feed"
    Path(own.path).rename(elsewhere)
    (elsewhere / "model.bin").write_text("of a run that goes on")
    assert named_directory.sweep([str(tmp_path)]) == 0
    assert named_directory.left([str(tmp_path)]) == []
    assert not named_directory.remove_left(str(elsewhere))
    assert (elsewhere / "model.bin").exists()
    own.remove()  # by its old name: what remains is what a killed agent leaves
    assert named_directory.sweep([str(tmp_path)]) == 1


def test_the_lock_goes_with_the_agent_however_it_ends(tmp_path: Path) -> None:
    def agent() -> None:
        own = named_directory.make([str(tmp_path)])
        Path(own.path).rename(tmp_path / f"glasshouse-ws-{GONE}-1-feed")
        assert named_directory.left([str(tmp_path)]) == []
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(Exception, match="ended with -9"):
        in_child(agent)
    assert named_directory.left([str(tmp_path)]) == [str(tmp_path / f"glasshouse-ws-{GONE}-1-feed")]


def test_no_program_that_the_agent_starts_gets_the_lock(tmp_path: Path) -> None:
    own = named_directory.make([str(tmp_path)])
    held = [int(link.name) for link in Path("/proc/self/fd").iterdir() if os.path.realpath(link) == own.path]
    assert [os.get_inheritable(descriptor) for descriptor in held] == [False]
    own.remove()


@needs_root
def test_a_directory_that_is_closed_to_its_own_user_is_left_all_the_same() -> None:
    def story() -> tuple[int, bool]:
        with tempfile.TemporaryDirectory(dir="/tmp") as place:
            closed = Path(place) / f"glasshouse-ws-{GONE}-1-aa"
            (closed / "work").mkdir(parents=True)
            closed.chmod(0o300)
            return named_directory.sweep([place]), closed.exists()

    assert in_child(story, user=65534) == (1, False)


def test_a_directory_that_cannot_be_removed_ends_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stubborn, other = tmp_path / f"glasshouse-ws-{GONE}-1-aa", tmp_path / f"glasshouse-ws-{GONE}-2-bb"
    for path in (stubborn, other):
        (path / "work").mkdir(parents=True)
    removed = tree_removal.removed
    monkeypatch.setattr(
        "glasshouse.runtime.worker.tree_removal.removed",
        lambda path: path != str(stubborn) and removed(path),
    )
    assert named_directory.sweep([str(tmp_path / "missing"), str(tmp_path)]) == 1
    assert [path.name for path in tmp_path.iterdir()] == [stubborn.name]


def test_a_directory_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[str] = []

    def meet(descriptor: int, _operation: int) -> None:
        if not met:
            met.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
            Path(met[0]).rmdir()

    monkeypatch.setattr("glasshouse.runtime.worker.named_directory.fcntl.flock", meet)
    own = named_directory.make([str(tmp_path)])
    assert own.path not in met
    assert [str(path) for path in tmp_path.iterdir()] == [own.path]
    own.remove()


def test_no_place_for_a_directory_is_a_platform_error(tmp_path: Path) -> None:
    with pytest.raises(PlatformError):
        named_directory.make([str(tmp_path / "missing")])


# where it lies


class Places:
    """Memory file systems and a disk, each with so much room, as this machine's table of mounts would have them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **memory_bytes: int) -> None:
        self.folder, self._bytes = folder, {str(folder / name): size for name, size in memory_bytes.items()}
        (folder / "disk").mkdir()
        lines = ["20 1 0:1 / / rw - ext4 /dev/vda rw"]
        for number, path in enumerate(self._bytes):
            Path(path).mkdir()
            lines.append(f"{30 + number} 20 0:{number + 2} / {path} rw - tmpfs tmpfs rw")
        table = "\n".join(lines).encode()
        monkeypatch.setattr(MountTable, "read", lambda _kernel: MountTable(table))
        monkeypatch.setattr(named_directory, "_free_bytes", self.free_bytes)
        monkeypatch.setattr(named_directory, "_SHARED", str(folder / "shm"))
        monkeypatch.setenv("TMPDIR", str(folder / "disk"))

    def free_bytes(self, path: str) -> int:
        return next((size for place, size in self._bytes.items() if (path + "/").startswith(place + "/")), 1 << 40)

    def made(self, **options: Any) -> str:
        own = named_directory.make(**options)
        try:
            in_memory, free_bytes = named_directory.room(own.path)
            place = Path(own.path).parent
            assert in_memory is (place.name != "disk")
            assert free_bytes == self.free_bytes(own.path)
            return place.name
        finally:
            own.remove()


def test_it_lies_in_the_memory_file_system_with_the_most_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = Places(tmp_path, monkeypatch, shm=64 << 20, scratch=8 << 30, run=1 << 30)
    assert places.made(least_bytes=100 << 20) == "scratch"
    assert named_directory.largest() == (str(tmp_path / "scratch"), 8 << 30)
    (tmp_path / "scratch").chmod(0o500)
    if os.geteuid():
        assert places.made() == "run"


def test_it_lies_on_a_disk_where_memory_is_too_small_and_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = Places(tmp_path, monkeypatch, shm=64 << 20)
    assert places.made(least_bytes=100 << 20, disk=True) == "disk"
    assert places.made(least_bytes=64 << 20, disk=True) == "shm"
    assert places.made(least_bytes=100 << 20) == "shm", "and is refused before the key is asked for"


def test_without_a_memory_file_system_it_lies_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = Places(tmp_path, monkeypatch)
    assert places.made() == "disk"
    assert named_directory.largest() is None


def test_what_a_killed_agent_left_is_found_in_every_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Places(tmp_path, monkeypatch, shm=1 << 20, scratch=1 << 30)
    left = [tmp_path / place / f"glasshouse-ws-{GONE}-1-feed" for place in ("disk", "scratch", "shm")]
    for path in left:
        path.mkdir()
    assert named_directory.left() == sorted(map(str, left))
    assert named_directory.sweep() == 3
